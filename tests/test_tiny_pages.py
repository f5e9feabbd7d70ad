"""How many tokens a page has is no part of an answer: pages of 1 to 4, each free slot NaN, beside those of 16."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import COMPILED, ON_GPU

import pallas_attn
from pallas_attn import PagedAttentionConfig, RaggedAttentionConfig, RaggedTiles
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.mla_decode.config import MLADecodeConfig

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
LENS = (37, 0, 16)
BOUNDS = jnp.array([0, 5, 5, 7], jnp.int32)  # two tokens of padding behind
HEADS, DIM = 2, 16
FAULTS = {
    "one look-up a tile": lambda column: column - column % 8,
    "the next column": lambda column: column + 1,
    "each page twice as large": lambda column: column // 2,
}
"""Which column of the block table is read in place of another."""
CUT = dict(num_splits=3, min_split_tokens=16)
TILES = RaggedAttentionConfig(RaggedTiles(16, 16, **CUT))
CONFIGS = {
    "paged_attention": PagedAttentionConfig(16, 16, **CUT),
    "ragged_paged_attention": TILES,
    "prefix_prefill": TILES,
    "mla_decode": MLADecodeConfig(16, 16, num_splits=3),
}
BLOCKS = builders.dense_causal(48, block_size=16, q_block_size=16)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def laid(page_size: int, layout: str, fault: Any, *token: int) -> tuple[list[jax.Array], jax.Array]:
    """(a pool of keys and one of values, the block table of LENS): pages in any order, NaN wherever nothing is."""
    rng = np.random.default_rng(page_size)
    counts = [-(-length // page_size) for length in LENS]
    free = iter(rng.permutation(sum(counts) + 3))
    tables = np.full((len(LENS), max(counts)), 2147480000, np.int32)
    pools = [np.full((sum(counts) + 3, page_size, *token), np.nan, np.float32) for _ in range(2)]
    for seq, length in enumerate(LENS):
        tables[seq, : counts[seq]] = [next(free) for _ in range(counts[seq])]
        at = np.arange(length)
        place = tables[seq, at // page_size], at % page_size
        for which, pool in enumerate(pools):
            pool[place] = normal(10 * seq + which, length, *token)
    if fault is not None:
        tables = tables[:, np.minimum(fault(np.arange(tables.shape[1])), tables.shape[1] - 1)]
    if layout == "HND":
        pools = [np.swapaxes(pool, 1, 2) for pool in pools]
    return [jnp.asarray(pool) for pool in pools], jnp.asarray(tables)


def attend(op: str, page_size: int, implementation: str, layout="NHD", config=True, fault=None):
    how: dict[str, Any] = dict(return_lse=True, implementation=implementation)
    if implementation != "xla" and config:
        how["config"] = CONFIGS.get(op)
    call: Callable[..., Any] = functools.partial(getattr(pallas_attn, op), **how)
    lens = jnp.array(LENS, jnp.int32)
    tokens = jnp.asarray(normal(1, 9, 2 * HEADS, DIM))
    if op == "mla_decode":
        (pool, _), tables = laid(page_size, layout, fault, 1, 576)
        latents = [x.astype(jnp.bfloat16) for x in (jnp.asarray(normal(0, 3, 1, 4, 576)), pool)]
        if implementation not in COMPILED:  # tiles of 576 fit compiled kernels in 16 bits alone
            latents = [x.astype(jnp.float32) for x in latents]
        return call(*latents, tables, lens)
    (keys, values), tables = laid(page_size, layout, fault, HEADS, DIM)
    if op == "paged_attention":
        return call(tokens[:3], keys, values, tables, lens, layout=layout)
    if op == "ragged_paged_attention":
        return call(tokens, keys, values, tables, lens, BOUNDS, layout=layout)
    if op == "prefix_prefill":
        new = (jnp.asarray(normal(seed, 9, HEADS, DIM)) for seed in (2, 3))
        return call(tokens, *new, keys, values, tables, lens + jnp.diff(BOUNDS), BOUNDS, layout=layout)
    places = dict(block_tables=tables, seq_lens=lens, cu_q_lens=BOUNDS)
    return call(tokens, keys, values, BLOCKS, **places)


def assert_same(found, expected) -> None:
    for ours, right in zip(found, expected, strict=True):
        assert np.isfinite(np.where(np.isneginf(right), 0, right)).all()
        rounded = found[0].dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.float32(ours), right, rtol=2e-2 if rounded else 1e-4, atol=1e-2 if rounded else 1e-5
        )
    assert np.abs(expected[0]).max() > 0.5


OPS = ["paged_attention", "ragged_paged_attention", "prefix_prefill", "mla_decode", "blocksparse_attention"]
of_16 = functools.cache(functools.partial(attend, page_size=16, implementation="xla"))


@IMPLEMENTATIONS
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
def test_pages_of_few_tokens(op, page_size, implementation):
    assert_same(attend(op, page_size, implementation), of_16(op))


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", OPS[:3])
def test_of_another_layout_and_by_default(op, implementation):
    assert_same(attend(op, 1, implementation, "HND", config=False), of_16(op))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.control
def test_what_takes_pages_for_larger_is_caught(op, fault):
    """Negative control: what would come out if a tile were looked up once, or pages counted otherwise."""
    with pytest.raises(AssertionError):
        assert_same(attend(op, 2, "xla", fault=FAULTS[fault]), of_16(op))
