"""What the calls of test_refusals.py are made of: right arguments, and kinds of wrong ones."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import refusals as kinds
from flax import nnx
from refusals import ARRAY, COUNT, LAYER, SOFTCAP, Kind, ones, zeros

import pallas_attn
from pallas_attn import nn
from pallas_attn.nn import linen

F32, I32 = jnp.float32, jnp.int32


class Call(NamedTuple):
    """A function, arguments that it takes, and of which kind those are that can be wrong."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, Kind]


TABLES = jnp.array([[0, 1], [2, 3]], I32)


def attention(cache_dtype: Any = F32) -> dict[str, Any]:
    pool = zeros((4, 8, 2, 16), cache_dtype)
    return dict(
        query=ones((2, 4, 16)),
        key_cache=pool,
        value_cache=pool,
        block_tables=TABLES,
        seq_lens=jnp.array([3, 0], I32),
    )


def latent_attention() -> dict[str, Any]:
    return dict(
        query=ones((2, 1, 4, 576)),
        latent_cache=zeros((4, 8, 1, 576)),
        block_tables=TABLES,
        seq_lens=jnp.array([3, 0], I32),
    )


def dense_attention() -> dict[str, Any]:
    return {name: ones((2, 3, heads, 16)) for name, heads in (("query", 4), ("key", 2), ("value", 2))}


@functools.cache
def flash_mla() -> dict[str, Any]:
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    arrays = dict(zip(names, latent_attention().values(), strict=True))
    # Jitted, so that it is one program.
    schedule = jax.jit(lambda lens: pallas_attn.get_mla_metadata(lens, 4, 1))
    metadata, splits = schedule(arrays["cache_seqlens"])
    return dict(arrays, head_dim_v=512, tile_scheduler_metadata=metadata, num_splits=splits)


def new_tokens(n: int = 3, heads: int = 2) -> dict[str, Any]:
    new = ones((2, n, heads, 16))
    return dict(layer=0, key=new, value=new, positions=jnp.array([[*range(n)]] * 2, I32))


def new_latents() -> dict[str, Any]:
    return dict(layer=0, latents=ones((2, 3, 576)), positions=zeros((2, 3), I32))


def attended(cache: Any, n: int = 3) -> dict[str, Any]:
    return dict(new_tokens(n), query=ones((2, n, 4, 16)), cache=cache)


def attended_ragged(cache: Any) -> dict[str, Any]:
    """Three tokens of the first sequence, one of the second, one of padding."""
    new = ones((5, 2, 16))
    whose = dict(positions=jnp.array([0, 1, 2, 0, -1], I32), cu_q_lens=jnp.array([0, 3, 4], I32))
    return dict(layer=0, query=ones((5, 4, 16)), key=new, value=new, cache=cache, **whose)


def latent_cache() -> Any:
    return pallas_attn.PagedLatentCache.create(
        num_layers=2, num_pages=4, page_size=8, block_tables=TABLES, dtype=F32
    )


def latent_prefill() -> dict[str, Any]:
    up = ones((4, 16, 512))
    given = {n: x for n, x in ragged().items() if not n.endswith("_cache")}
    return dict(given, query=ones((5, 4, 80)), latent_cache=zeros((4, 8, 1, 576)), key_up=up, value_up=up)


def page_scales() -> dict[str, Any]:
    new, scales = ones((3, 2, 16)), ones((4, 2))
    return dict(key=new, value=new, k_scale=scales, v_scale=scales, slot_mapping=zeros(3, I32))


def linen_call(**arguments: Any) -> Any:
    options = {n: arguments.pop(n) for n in list(arguments) if n in linen.PagedAttention.__dataclass_fields__}
    return linen.PagedAttention(**options).init_with_output(jax.random.key(0), **arguments)


def latent_layer() -> nn.MultiHeadLatentAttention:
    config = nn.MLAConfig(hidden_size=8, num_heads=2, qk_nope_head_dim=4, v_head_dim=4)
    return nn.MultiHeadLatentAttention(config, rngs=nnx.Rngs(0))


def ragged() -> dict[str, Any]:
    return dict({**attention(), "query": ones((5, 4, 16))}, cu_q_lens=jnp.array([0, 3, 4], I32), num_seqs=2)


SIZES = dict(num_layers=2, num_pages=4, page_size=8)
COUNTS = dict.fromkeys(SIZES, COUNT)
MASKS = dict(softcap=SOFTCAP, sliding_window=COUNT.or_none())
MLA_CONFIG = dict(hidden_size=8, num_heads=2, q_lora_rank=4)
FROM_0 = Kind(("3", 2.5, True, [1], np.float32(2), np.ones((), int), ones((), int), -1, {}))
TILES = dict.fromkeys(("block_q", "block_kv", "num_warps", "num_stages"), COUNT)
TILES |= dict(num_splits=FROM_0)
FIXED_SPLITS = TILES | dict(split_tokens=FROM_0)
TREE = dict(tree_mask=ones((2, 1, 1), bool), query_positions=zeros((2, 1), I32))
RAGGED_TREE = dict(tree_mask=ones((5, 2), bool), query_positions=zeros(5, I32))
NEW = dict(layer=LAYER, key=ARRAY, value=ARRAY, positions=ARRAY)
WINDOW = Kind(("3", 2.5, True, [1], 0, -1, {}, ones(1, I32), ones(()), np.ones((), I32)), optional=True)
ANY_RANK = Kind(ARRAY.values, lambda right: (zeros(right.shape, t) for t in (np.complex64, np.bool_, I32)))
NUM_SEQS = Kind(("2", 1.5, True, [1], {}, -1, 3, ones(()), ones(2, I32), np.ones((), int)), optional=True)
OUT_SCALE = Kind(("1", [1.0], True, 0.0, -1.0, kinds.NAN, kinds.INF, 1j, ones(1), np.ones(())), optional=True)
NEAR_ZERO = Kind(("1", [1.0], True, -1.0, kinds.NAN, kinds.INF, 1j, ones(()), np.ones(1)))
SIGNED = Kind(
    (
        "1",
        [1.0],
        True,
        kinds.NAN,
        kinds.INF,
        -kinds.INF,
        1e39,
        -1e39,
        10**400,
        1j,
        ones(1),
        np.ones(1),
        np.full((), kinds.NAN),
        np.ones((), bool),
        ones((), bool),
        {},
    ),
    optional=True,
)
BIAS = ones((1, 4, 3, 3))
# jax.nn promotes integers to the logits' float32.
WRONG_BIAS = Kind(
    tuple(value for value in ARRAY.values if not isinstance(value, np.float32)),
    lambda right: (zeros(right.shape, dtype) for dtype in (np.complex64, np.bool_)),
    optional=True,
)
# None among (left, right) is no bound.
SIDES = Kind(
    ("3", 2.5, True, [1], 0, -1, {}, (1,), (1, -1), (1.5, 0), (1, "x"), ones((), int)), optional=True
)
MASK = Kind(("x", 1, True, [True], ones((2, 4, 3, 3)), ones((2, 4, 3), bool), ones((2, 3, 3, 3), bool)))
MASK = MASK.or_none()
SLOPES_OR_SINKS = dict.fromkeys(("alibi_slopes", "sinks"), ones(4))
