"""What sparse_mla_decode, sparse_mla_prefill and their config refuse, and in which words."""

from typing import Any

import jax.numpy as jnp
import pytest
from support import unchecked

import pallas_attn
from pallas_attn import SparseMLAConfig


def arguments(**changes: Any) -> dict[str, Any]:
    right = dict(
        query=jnp.zeros((2, 1, 4, 576), jnp.bfloat16),
        latent_cache=jnp.zeros((3, 8, 1, 656), jnp.uint8),
        indices=jnp.zeros((2, 1, 6), jnp.int32),
    )
    return right | changes


ERRORS = [
    (dict(query=jnp.zeros((2, 4, 576))), "query", "expected shape"),
    (dict(query=jnp.zeros((2, 1, 4, 576), jnp.int8)), "query", "expected dtype"),
    (dict(latent_cache=jnp.zeros((3, 8, 1, 576), jnp.uint8)), "latent_cache", r"expected shape .* 1, 656\]"),
    (
        dict(latent_cache=jnp.zeros((3, 8, 1, 576))),
        "latent_cache",
        "expected dtype bfloat16 or uint8, got float32",
    ),
    (dict(indices=jnp.zeros((2, 2, 6), jnp.int32)), "indices", "expected shape"),
    (dict(indices=jnp.zeros((2, 1, 0), jnp.int32)), "indices", "expected no empty dimension"),
    (dict(addressing="pages"), "addressing", "expected one of 'slots', 'positions'"),
    (dict(addressing="positions"), "block_tables", "expected an array, got NoneType"),
    (dict(block_tables=jnp.zeros((2, 3), jnp.int32)), "block_tables", "expected None where ids are slots"),
    (dict(topk_length=jnp.zeros(3, jnp.int32)), "topk_length", "expected shape"),
    (dict(sinks=jnp.zeros(3)), "sinks", r"expected shape \[num_heads=4"),
    (dict(sinks=jnp.zeros(4, jnp.bfloat16)), "sinks", "expected dtype float32"),
    (dict(scale=0.0), "scale", "expected a finite number above 0"),
    (dict(return_lse=1), "return_lse", "expected True or False"),
    (dict(config=3, implementation="interpret"), "config", "expected SparseMLAConfig, got int"),
    (dict(config=SparseMLAConfig(16, 16, 1)), "config", "expected None for implementation 'xla'"),
]


@pytest.mark.once
@pytest.mark.parametrize(("changes", "name", "message"), ERRORS)
def test_errors(changes, name, message):
    with pytest.raises((TypeError, ValueError), match=f"^sparse_mla_decode: argument '{name}': {message}"):
        unchecked(pallas_attn.sparse_mla_decode)(**arguments(**changes))


@pytest.mark.once
def test_errors_of_prefill():
    right = dict(
        query=jnp.zeros((2, 4, 576), jnp.bfloat16),
        latents=jnp.zeros((9, 1, 576), jnp.bfloat16),
        indices=jnp.zeros((2, 1, 6), jnp.int32),
    )
    call = unchecked(pallas_attn.sparse_mla_prefill)
    for changes, message in (
        (
            dict(latents=jnp.zeros((9, 576), jnp.bfloat16)),
            r"'latents': expected shape \[num_kv_tokens, 1, 576\]",
        ),
        (dict(topk_length=jnp.zeros(3, jnp.int32)), r"'topk_length': expected shape \[num_tokens=2"),
        (
            dict(config=SparseMLAConfig(16, 16, 2), implementation="interpret"),
            "'config': expected num_splits 1",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^sparse_mla_prefill: argument {message}"):
            call(**(right | changes))
    float32 = {name: jnp.zeros(right[name].shape, jnp.float32) for name in ("query", "latents")}
    with pytest.raises(
        ValueError, match="sparse_mla_prefill: implementation 'pallas' cannot serve this call"
    ):
        call(**(right | float32), implementation="pallas")


@pytest.mark.once
def test_errors_of_the_config():
    message = "^SparseMLAConfig: argument 'num_splits': expected at least 1, got 0"
    with pytest.raises(ValueError, match=message):
        SparseMLAConfig(16, 16, num_splits=0)


@pytest.mark.once
def test_errors_of_flash_mla_names():
    call = unchecked(pallas_attn.flash_mla_with_kvcache)
    query, pool, ids = arguments().values()
    for changes, message in (
        (dict(is_fp8_kvcache=False), "'k_cache': expected dtype bfloat16 or float16 or float32, got uint8"),
        (dict(q=query.astype(jnp.float16)), "'q': expected dtype bfloat16, got float16"),
        (dict(causal=True), "'causal': expected False with indices, got True"),
        (dict(indices=None), "'block_table': expected an array, got NoneType"),
        (dict(indices=None, attn_sink=jnp.zeros(4)), "'attn_sink': expected None without indices"),
        (dict(topk_length=jnp.zeros(5, jnp.int32)), "'topk_length': expected shape"),
        (dict(head_dim_v=576), "'head_dim_v': expected 512, got 576"),
        (dict(implementation="hip"), "'implementation': expected None or one of"),
    ):
        right = dict(
            q=query,
            k_cache=pool,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            is_fp8_kvcache=True,
            indices=ids,
        )
        with pytest.raises((TypeError, ValueError), match=f"^flash_mla_with_kvcache: argument {message}"):
            call(**(right | changes))
    with pytest.raises(ValueError, match=r"^flash_mla_sparse_fwd: argument 'd_v': expected 512, got 576"):
        pallas_attn.flash_mla_sparse_fwd(query[:, 0], pool.reshape(-1, 1, 656), ids, 1.0, 576)
    with pytest.raises(
        ValueError, match=r"^flash_mla_sparse_fwd: argument 'indices': expected shape \[s_q=2 \(as q\)"
    ):
        pallas_attn.flash_mla_sparse_fwd(query[:, 0], pool.reshape(-1, 1, 656), ids[:1], 1.0)


@pytest.mark.once
def test_metadata_is_made_from_what_flash_mla_is_told():
    call = unchecked(pallas_attn.get_mla_metadata)
    lens = jnp.array([70, 300], jnp.int32)
    for ours, plain in zip(call(lens, 128, 1, 128, True, topk=2048), call(lens, 128, 1), strict=True):
        assert (ours == plain).all()
    for changes, message in (
        (dict(num_heads_q=0), "'num_heads_q': expected at least 1, got 0"),
        (dict(topk=2.0), "'topk': expected an int, got 2"),
        (dict(is_fp8_kvcache=1), "'is_fp8_kvcache': expected True or False, got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^get_mla_metadata: argument {message}"):
            call(lens, 128, 1, **changes)
