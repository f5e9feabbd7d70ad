"""What `ragged_paged_attention` refuses, and in which words."""

import jax.numpy as jnp
import pytest
from support import unchecked

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles

pytestmark = pytest.mark.once
F32, I32 = jnp.float32, jnp.int32


def arguments(**changes):
    pool = jnp.zeros((10, 16, 2, 64), F32)
    given = {
        "query": jnp.zeros((6, 4, 64), F32),
        "key_cache": pool,
        "value_cache": pool,
        "block_tables": jnp.zeros((2, 3), I32),
        "seq_lens": jnp.zeros(2, I32),
        "cu_q_lens": jnp.zeros(3, I32),
    }
    return given | changes


BAD = {
    "query rank": (
        {"query": jnp.zeros((6, 64))}, ValueError,
        r"'query': expected shape \[total_tokens, num_heads, head_dim\], got \[6, 64\]",
    ),
    "query dtype": ({"query": jnp.zeros((6, 4, 64), I32)}, TypeError, "'query': expected dtype bfloat16 or float16"),
    "cache dtype": (
        {"key_cache": jnp.zeros((10, 16, 2, 64), jnp.bfloat16)}, TypeError,
        "'key_cache': expected dtype float32 or float8_e4m3fn or float8_e5m2 or int8, got bfloat16",
    ),
    "key width": (
        {"key_cache": jnp.zeros((10, 16, 2, 32))}, ValueError,
        r"'key_cache': expected shape \[num_pages, page_size, num_kv_heads, head_dim=64 \(as query\)\]",
    ),
    "value pages": (
        {"value_cache": jnp.zeros((9, 16, 2, 64))}, ValueError,
        r"'value_cache': expected shape \[num_pages=10 \(as key_cache\)",
    ),
    "tables dtype": ({"block_tables": jnp.zeros((2, 3))}, TypeError, "'block_tables': expected dtype int32, got"),
    "lens": (
        {"seq_lens": jnp.zeros(3, I32)}, ValueError,
        r"'seq_lens': expected shape \[max_seqs=2 \(as block_tables\)\], got \[3\]",
    ),
    "bounds": ({"cu_q_lens": jnp.zeros(2, I32)}, ValueError, r"'cu_q_lens': expected shape \[3\], got \[2\]"),
    "heads": (
        {"query": jnp.zeros((6, 3, 64))}, ValueError, r"'query': expected a multiple of num_kv_heads \(2\), got 3"
    ),
    "no tokens": ({"query": jnp.zeros((0, 4, 64))}, ValueError, "'query': expected no empty dimension"),
    "num_seqs type": ({"num_seqs": 1.0}, TypeError, "'num_seqs': expected an int, got 1.0 of type float"),
    "num_seqs dtype": ({"num_seqs": jnp.float32(1)}, TypeError, "'num_seqs': expected dtype int32, got float32"),
    "num_seqs shape": (
        {"num_seqs": jnp.zeros(2, I32)}, ValueError, r"'num_seqs': expected an int32 scalar or an array \[1\], got"
    ),
    "num_seqs beyond": ({"num_seqs": 3}, ValueError, "'num_seqs': expected at most 2, got 3"),
    "scale": ({"scale": 0.0}, ValueError, "'scale': expected a finite number above 0, or None, got 0.0"),
    "softcap": ({"softcap": -1}, ValueError, "'softcap': expected a finite number above 0, or None, got -1"),
    "window": ({"sliding_window": 0}, ValueError, "'sliding_window': expected at least 1, got 0"),
    "traced window": ({"sliding_window": jnp.zeros(1, I32)}, ValueError, r"'sliding_window': expected shape \[\]"),
    "slopes": (
        {"alibi_slopes": jnp.zeros(3)}, ValueError, r"'alibi_slopes': expected shape \[num_heads=4 \(as query\)\]"
    ),
    "sinks": ({"sinks": jnp.zeros(4, I32)}, TypeError, "'sinks': expected dtype bfloat16 or float16 or float32"),
    "needless scale": ({"k_scale": 1.0}, ValueError, "'k_scale': expected None for a cache of float32, got a scale"),
    "tree dtype": ({"tree_mask": jnp.ones((6, 4))}, TypeError, "'tree_mask': expected dtype bool, got float32"),
    "tree shape": (
        {"tree_mask": jnp.ones((2, 4), bool)}, ValueError,
        r"'tree_mask': expected shape \[total_tokens=6 \(as query\), max_tree\], got \[2, 4\]",
    ),
    "no tree": ({"tree_mask": jnp.ones((6, 0), bool)}, ValueError, "'tree_mask': expected no empty dimension"),
    "tree of all": (
        {"tree_mask": jnp.ones((6, 4), bool), "causal": False}, ValueError,
        "'tree_mask': expected None with causal=False, got an array",
    ),
    "positions alone": (
        {"query_positions": jnp.zeros(6, I32)}, ValueError,
        "'query_positions': expected None without 'tree_mask', got an array",
    ),
    "positions": (
        {"tree_mask": jnp.ones((6, 4), bool), "query_positions": jnp.zeros((6, 4), I32)}, ValueError,
        r"'query_positions': expected shape \[total_tokens=6",
    ),
    "scales of other pages": (
        {"key_cache": jnp.zeros((10, 16, 2, 64), jnp.int8), "value_cache": jnp.zeros((10, 16, 2, 64), jnp.int8),
         "k_scale": jnp.ones((9, 2))}, ValueError,
        r"'k_scale': expected a scalar or shape \[num_kv_heads=2\] or \[num_pages=10, num_kv_heads=2\], got",
    ),
    "causal": ({"causal": None}, TypeError, "'causal': expected True or False, got None"),
    "return_lse": ({"return_lse": 1}, TypeError, "'return_lse': expected True or False, got 1"),
    "layout": ({"layout": "HDN"}, ValueError, "'layout': expected one of 'NHD', 'HND', 'PACKED', got 'HDN'"),
    "config": ({"config": RaggedTiles(16, 16, 1), "implementation": "interpret"}, TypeError,
               "'config': expected RaggedAttentionConfig, got RaggedTiles"),
    "config of xla": (
        {"config": RaggedAttentionConfig(RaggedTiles(16, 16, 1)), "implementation": "xla"}, ValueError,
        "'config': expected None for implementation 'xla', got a config",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=f"^ragged_paged_attention: argument {message}"):
        unchecked(pallas_attn.ragged_paged_attention)(**arguments(**changes))


def test_a_forced_implementation_says_why_it_cannot():
    wide = {name: jnp.zeros((10, 16, 2, 320)) for name in ("key_cache", "value_cache")}
    with pytest.raises(
        ValueError, match="'interpret' cannot serve this call: head_dim is at most 256, got 320"
    ):
        unchecked(pallas_attn.ragged_paged_attention)(
            **arguments(query=jnp.zeros((6, 4, 320)), **wide), implementation="interpret"
        )
    with pytest.raises(ValueError, match="'pallas' cannot serve this call: needs an NVIDIA GPU"):
        unchecked(pallas_attn.ragged_paged_attention)(**arguments(), implementation="pallas")


def test_tiles_are_checked():
    with pytest.raises(
        ValueError, match="RaggedTiles: argument 'block_q': expected a power of two >= 16, got 24"
    ):
        RaggedTiles(24, 16, 1)


def test_tiles_whose_splits_there_is_no_room_for_are_refused():
    """num_splits 0, which was taken and left outputs unwritten."""
    with pytest.raises(ValueError, match=r"RaggedAttentionConfig: argument 'long': .*num_splits .*, got 0"):
        RaggedAttentionConfig(RaggedTiles(16, 16))
    RaggedAttentionConfig(RaggedTiles(16, 16, 1), RaggedTiles(16, 16))
