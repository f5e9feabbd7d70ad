"""Tokens of no sequence: out 0, lse -inf and no gradient from or to them, with every option, whatever they hold."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import SMALL_TILES as SMALL_BLOCKS
from flash_inputs import SMALL_TILES
from support import ON_GPU

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles
from pallas_attn._tile import weights
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.flash_attention import segments
from pallas_attn.ops.ragged_attention import reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
TOKENS, LAST, HEADS, KV_HEADS, DIM = 24, 19, 4, 2, 16
BOUNDS, IN_FRONT = jnp.array([0, 8, 8, LAST], jnp.int32), jnp.array([3, 8, 8, LAST], jnp.int32)
TABLES, LENS = jnp.array([[1, 2], [-1, 5], [0, 3]], jnp.int32), jnp.array([20, 0, 11], jnp.int32)
SINKS = jnp.array([0.5, 5.0, -jnp.inf, jnp.inf])
SLOPES = jnp.linspace(0.1, 1.0, HEADS)
TILES = RaggedAttentionConfig(RaggedTiles(16, 16, num_splits=2))
DENSE = builders.dense_causal(32, block_size=16, q_block_size=16)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


BIAS, MASK = normal(1, HEADS, TOKENS, TOKENS), normal(1, 1, TOKENS, TOKENS) > -2
TREE = jnp.asarray(np.tri(TOKENS, dtype=bool)[:, :11])
SCALES = dict(
    k_scale=jnp.linspace(0.5, 1, 2 * 6).reshape(6, 2), v_scale=jnp.linspace(1, 2, 2 * 6).reshape(6, 2)
)


def flash(q, k, v, *, bounds=BOUNDS, **how):
    if "config" in how:
        how["config"] = SMALL_TILES
    arrays = (x[None] for x in (q, k, v))
    results = pallas_attn.flash_attention(*arrays, cu_q_lens=bounds, causal=True, **how)
    return tuple(x[0] for x in results)


def pool(dtype=jnp.float32) -> jax.Array:
    return jnp.round(20 * normal(6, 16, KV_HEADS, DIM)).astype(dtype)


def ragged(q, *, dtype=jnp.float32, **how):
    return pallas_attn.ragged_paged_attention(q, pool(dtype), -pool(dtype), TABLES, LENS, BOUNDS, **how)


def prefix(q, k, v, **how):
    return pallas_attn.prefix_prefill(q, k, v, pool(), -pool(), TABLES, LENS, BOUNDS, **how)


def latents(q, **how):
    how.pop("config", None)
    q = jnp.concatenate([q[..., :8]] * 12, axis=-1)  # 32 elements, and 64 of a rotary part
    ups = dict(key_up=normal(HEADS, 32, 512) / 20, value_up=normal(HEADS, DIM, 512))
    return pallas_attn.mla_prefill(q, normal(6, 16, 1, 576), TABLES, LENS, BOUNDS, **ups, **how)


def blocks(q, k, v, **how):
    if "config" in how:
        how["config"] = SMALL_BLOCKS
    return pallas_attn.blocksparse_attention(q, k, v, DENSE, cu_q_lens=BOUNDS, cu_k_lens=BOUNDS, **how)


class Call(NamedTuple):
    function: Callable[..., Any]
    arrays: int = 1
    """Of the query, and of keys and values, that lie as tokens."""
    begin: int = 0
    """Of what is no padding."""
    of_kernels: bool = False
    """Whether these have gradients."""
    options: dict[str, Any] = {}  # noqa: RUF012


LOGITS = dict(softcap=2.0, sliding_window=5, scale=0.3, sinks=SINKS)
EVERY = {**LOGITS, "alibi_slopes": SLOPES}
CALLS = {
    "flash": Call(flash, 3, of_kernels=True),
    "flash, sinks": Call(flash, 3, of_kernels=True, options=dict(sinks=SINKS)),
    "flash, every option": Call(
        flash, 3, 3, of_kernels=True, options=dict(**LOGITS, bias=BIAS, mask=MASK, bounds=IN_FRONT)
    ),
    "ragged": Call(ragged),
    "ragged, every option": Call(ragged, options=EVERY),
    "ragged, a tree": Call(ragged, options=dict(**EVERY, tree_mask=TREE)),
    "ragged, 8 bits": Call(ragged, options=dict(**EVERY, **SCALES, dtype=jnp.int8)),
    "ragged, not causal": Call(ragged, options=dict(sinks=SINKS, causal=False)),
    "prefix": Call(prefix, 3),
    "prefix, every option": Call(prefix, 3, options=dict(**EVERY, tree_mask=TREE)),
    "latents": Call(latents),
    "blocks": Call(blocks, 3, of_kernels=True, options=dict(scale=0.3)),
}


@functools.cache
def program(case: str, implementation: str) -> Callable[..., Any]:
    """(results, gradients or nothing) of (sinks, *arrays), and of what comes back."""
    call = CALLS[case]
    how = dict(call.options, return_lse=True, implementation=implementation)
    if implementation == "interpret":
        how["config"] = TILES
    sinks = how.pop("sinks", None)

    def run(sinks, *arrays):
        return call.function(*arrays, **how, **({} if sinks is None else dict(sinks=sinks)))

    @jax.jit
    def both(cotangents, *arrays):
        if case == "latents" or (implementation != "xla" and not call.of_kernels):
            return run(sinks, *arrays), ()
        results, pull = jax.vjp(run, sinks, *arrays)
        return results, pull(cotangents)

    return both


def observed(case: str, implementation: str, held: float) -> dict[str, np.ndarray]:
    """Results and, where there are some, gradients, with `held` in padding and in what comes back to it."""
    call = CALLS[case]
    padding = jnp.asarray((np.arange(TOKENS) < call.begin) | (np.arange(TOKENS) >= LAST))[:, None]
    query, key, value, d_out = (normal(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    arrays = (jnp.where(padding[..., None], held, x) for x in (query, 2 * key, -value)[: call.arrays])
    cotangents = (
        jnp.where(padding[..., None], held, d_out),
        jnp.where(padding, held, jnp.ones((TOKENS, HEADS))),
    )
    results, gradients = program(case, implementation)(cotangents, *arrays)
    names = "out", "lse", "d_sinks", "d_query", "d_key", "d_value"
    named = zip(names, (*results, *gradients), strict=False)
    return {name: np.asarray(array) for name, array in named if array is not None}


def check(case: str, found: dict[str, np.ndarray], clean: dict[str, np.ndarray]) -> None:
    padding = (np.arange(TOKENS) < CALLS[case].begin) | (np.arange(TOKENS) >= LAST)
    for name, array in found.items():
        np.testing.assert_array_equal(array, clean[name], err_msg=name)
        assert not np.isnan(array).any(), name
        if name != "d_sinks":
            np.testing.assert_array_equal(array[padding], -np.inf if name == "lse" else 0, err_msg=name)
        assert (np.isfinite(array) & (array != 0)).any(), name


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.sweep(case=lambda case: [case.partition(",")[:1]])
def test_padding_is_nothing(case, implementation):
    check(case, observed(case, implementation, np.nan), observed(case, implementation, 0.0))


def seeing(product, lse, *others):
    """As if every query saw a key."""
    return OF_QUERIES(product, lse._replace(rest=jnp.where(jnp.isneginf(lse.rest), 0, lse.rest)), *others)


class Unpadded(reference._Blocks):
    """As if what lies behind the last sequence were one that its pages hold, too."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seq, self.is_padding = jnp.minimum(self.seq, 2), jnp.zeros_like(self.is_padding)


OF_QUERIES = weights.of_queries
BROKEN = {
    "a sink's lse": ("flash, sinks", segments, "padding", lambda side: jnp.zeros_like(side.rank, bool)),
    "a sink's lse, behind a sequence": ("ragged, every option", reference, "_Blocks", Unpadded),
    "new tokens behind a sequence": ("prefix, every option", reference, "_Blocks", Unpadded),
    "what comes back": ("flash, every option", weights, "of_queries", seeing),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.control
def test_what_takes_padding_for_tokens_is_caught(fault, monkeypatch):
    """Negative control."""
    case, *broken = BROKEN[fault]
    monkeypatch.setattr(*broken)
    jax.clear_caches()
    program.cache_clear()
    try:
        found, clean = (observed(case, "xla", held) for held in (np.nan, 0.0))
    finally:
        jax.clear_caches()
        program.cache_clear()
    with pytest.raises(AssertionError):
        check(case, found, clean)


@pytest.mark.parametrize("fault", ["out", "lse", "d_query", "d_key", "d_value", "d_sinks"])
def test_each_part_is_looked_at(fault):
    """Negative control: one wrong number, with either content."""
    case = "flash, every option"
    right = of_zeros(case)
    check(case, right, right)
    wrong = {name: array.copy() for name, array in right.items()}
    wrong[fault][-1] = np.nan if fault == "d_sinks" else 1e-30
    with pytest.raises(AssertionError):
        check(case, wrong, wrong)


of_zeros = functools.cache(functools.partial(observed, implementation="xla", held=0.0))
