"""Paged decode where numbers are large, on a GPU: thousands of sequences, tables of 65,536 columns, a million tokens, a
pool above 2**31 elements.

What it is compared with gathers the tokens that a sequence has and nothing else, in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU

from pallas_attn import paged_attention
from pallas_attn.testing import compare
from pallas_attn.tuning import timing

pytestmark = pytest.mark.gpu

PAGE, KV_HEADS, HEADS, DIM = 16, 2, 8, 64
NUM_PAGES = 2**31 // (PAGE * KV_HEADS * DIM) + 4096
COLUMNS = 65536
GIANT = COLUMNS * PAGE - 3
# A prime: no two pages of a pool hold the same, and none what lies 2**31 or 2**32 elements further on.
BLOCK = (1 << 22) - 3
BATCHES = {
    "one of a million tokens": (GIANT,),
    "a million tokens beside 4095 others": (GIANT, *(37 * i % 201 for i in range(4095))),
    "4096 alike": (128,) * 4096,
}


@functools.cache
def pools() -> tuple[jax.Array, jax.Array]:
    drawn = (np.random.default_rng(seed).standard_normal(BLOCK, np.float32) for seed in (1, 2))
    shape = (NUM_PAGES, PAGE, KV_HEADS, DIM)
    keys, values = (timing.tiled(jnp.asarray(block, jnp.bfloat16), shape) for block in drawn)
    assert keys.size > 2**31
    return keys, values


@functools.partial(jax.jit, static_argnames="most")
def expected(query, keys, values, pages, length, *, most: int) -> jax.Array:
    """Of one sequence, from the first `most` tokens of its pages, of which it has `length`."""
    key, value = (
        pool[pages].reshape(-1, KV_HEADS, DIM)[:most].astype(jnp.float32) for pool in (keys, values)
    )
    grouped = query.astype(jnp.float32).reshape(KV_HEADS, HEADS // KV_HEADS, DIM)
    logits = jnp.einsum("hgd,thd->hgt", grouped, key, precision="highest") * DIM**-0.5
    held = jnp.arange(most) < length
    weights = jax.nn.softmax(jnp.where(held, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("hgt,thd->hgd", weights, value, precision="highest").reshape(HEADS, DIM)
    return jnp.where(length > 0, out, 0.0)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", ON_GPU)
def test_large_numbers(batch, implementation):
    lens = np.array(BATCHES[batch], np.int32)
    rng = np.random.default_rng(3)
    # Pages from all over the pool, beyond 2**31 elements too; garbage where a sequence has none.
    drawn = rng.integers(0, NUM_PAGES, (len(lens), 16), dtype=np.int32)
    drawn[:, -4:] = rng.integers(NUM_PAGES - 4096, NUM_PAGES, (len(lens), 4))
    tables = jnp.pad(jnp.asarray(drawn), ((0, 0), (0, COLUMNS - 16)), constant_values=np.int32(2**31 - 7))
    if lens[0] == GIANT:
        tables = tables.at[0].set(rng.integers(0, NUM_PAGES, COLUMNS, dtype=np.int32))
    query = jnp.asarray(rng.standard_normal((len(lens), HEADS, DIM), np.float32), jnp.bfloat16)
    keys, values = pools()
    call = functools.partial(paged_attention, implementation=implementation)
    out = np.asarray(jax.jit(call)(query, keys, values, tables, jnp.asarray(lens)), np.float32)
    short = np.flatnonzero(lens != GIANT)
    if len(short):
        attend = functools.partial(expected, most=256)
        of_each = jax.vmap(attend, in_axes=(0, None, None, 0, 0))
        right = of_each(query[short], keys, values, tables[short, :16], jnp.asarray(lens[short]))
        assert compare.row_errors(out[short], np.asarray(right)).max() < 8e-3
    if lens[0] == GIANT:
        right = expected(query[0], keys, values, tables[0], GIANT, most=GIANT)
        assert compare.row_errors(out[0], np.asarray(right)).max() < 8e-3
