"""Pools of more elements than 32 bits count, on a GPU: what lies there is written and read as in a small pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import COMPILED

import pallas_attn

pytestmark = pytest.mark.gpu

LIMIT = 2**31
PAGE_SIZE, HEADS, DIM = 16, 8, 128
HEADS_OF_QUERIES = 16
# Of an 8-bit pool from 2**31 to 2**32 elements Pallas' lowering counts wrongly, and is refused.
POOLS = [
    ("pallas", "bfloat16", 1),
    ("triton", "bfloat16", 1),
    ("triton", "int8", 1.5),
    ("triton", "float8_e4m3fn", 1.5),
    ("triton", "int8", 2),
]


def spread_pages(num_pages: int, page_elements: int) -> np.ndarray:
    """The first, the last, and those around 2**31 elements and half of that, none twice."""
    at = [LIMIT // 2 // page_elements, LIMIT // page_elements]
    pages = [num_pages - 1, *(page + more for page in at for more in (0, 1, -1)), 0]
    return np.array(list(dict.fromkeys(min(page, num_pages - 1) for page in pages)), np.int32)


def slots_of(pages: np.ndarray, page_size: int) -> jax.Array:
    return jnp.asarray((pages[:, None] * page_size + np.arange(page_size)).ravel(), jnp.int32)


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="implementation")
def write_and_attend(keys, values, new, query, pages, slots, scales, implementation):
    keys, values = pallas_attn.write_kv(
        new, -new, keys, values, slots, **scales, implementation=implementation
    )
    lens = jnp.array([pages.shape[1] * PAGE_SIZE - 3], jnp.int32)
    out = pallas_attn.paged_attention(
        query, keys, values, pages, lens, **scales, implementation=implementation
    )
    return keys, values, out


@jax.jit
def written_tokens(pool) -> jax.Array:
    return jnp.sum(jnp.any(pool != 0, axis=tuple(range(2, pool.ndim))))


@pytest.mark.parametrize(("implementation", "dtype", "size"), POOLS)
def test_tokens_anywhere(implementation, dtype, size):
    page_elements = PAGE_SIZE * HEADS * DIM
    num_pages = int(size * LIMIT) // page_elements + 2
    pages = spread_pages(num_pages, page_elements)
    new = jax.random.normal(jax.random.key(0), (len(pages) * PAGE_SIZE, HEADS, DIM), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (1, HEADS_OF_QUERIES, DIM), jnp.bfloat16)
    scales = {} if dtype == "bfloat16" else {"k_scale": jnp.float32(1 / 32), "v_scale": jnp.float32(1 / 32)}

    def run(num_pages, pages, implementation):
        pools = (jnp.zeros((num_pages, PAGE_SIZE, HEADS, DIM), dtype) for _ in range(2))
        slots = slots_of(pages, PAGE_SIZE)
        return write_and_attend(*pools, new, query, jnp.asarray(pages[None]), slots, scales, implementation)

    *large, out = run(num_pages, pages, implementation)
    *small, expected = run(len(pages), np.arange(len(pages), dtype=np.int32), "xla")
    for pool, right in zip(large, small, strict=True):
        assert pool.size > LIMIT
        np.testing.assert_array_equal(np.asarray(pool[pages]), np.asarray(right))
        assert written_tokens(pool) == len(new), "tokens elsewhere"
    np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=0.02, atol=0.02)


def test_latents_anywhere():
    """Of 656 bytes, written, and attended to whole and by their numbers."""
    page_size, implementation = 64, "triton"
    page_elements = page_size * 656
    num_pages = int(1.5 * LIMIT) // page_elements
    pages = spread_pages(num_pages, page_elements)
    new = jax.random.normal(jax.random.key(0), (len(pages) * page_size, 576), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (1, 1, 16, 576), jnp.bfloat16)
    lens = jnp.array([len(new)], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="implementation")
    def run(pool, pages, slots, implementation):
        pool = pallas_attn.write_latents(
            new, pool, slots, scales="power_of_two", implementation=implementation
        )
        whole = pallas_attn.mla_decode(query, pool, pages[None], lens, implementation=implementation)
        chosen = pallas_attn.sparse_mla_decode(query, pool, slots[None, None], implementation=implementation)
        return pool, whole, chosen

    def pool_of(num_pages, pages, implementation):
        pool = jnp.zeros((num_pages, page_size, 1, 656), jnp.uint8)
        return run(pool, jnp.asarray(pages), slots_of(pages, page_size), implementation)

    large, *found = pool_of(num_pages, pages, implementation)
    small, *expected = pool_of(len(pages), np.arange(len(pages), dtype=np.int32), "xla")
    assert LIMIT < large.size < 2 * LIMIT
    np.testing.assert_array_equal(np.asarray(large[pages]), np.asarray(small))
    assert written_tokens(large) == len(new), "tokens elsewhere"
    for out, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(out), np.float32(right), rtol=0.03, atol=0.02)


@pytest.mark.parametrize("implementation", COMPILED)
@pytest.mark.parametrize("num_heads", [16, 32])
def test_plain_latents_anywhere(num_heads, implementation):
    """By both walks over tokens: which it is depends on the rows."""
    page_size = 64
    page_elements = page_size * 576
    num_pages = LIMIT // page_elements + 2
    pages = spread_pages(num_pages, page_elements)
    new = jax.random.normal(jax.random.key(0), (len(pages), page_size, 1, 576), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (1, 1, num_heads, 576), jnp.bfloat16)
    lens = jnp.array([len(pages) * page_size - 3], jnp.int32)
    large = jnp.zeros((num_pages, page_size, 1, 576), jnp.bfloat16).at[pages].set(new)
    assert large.size > LIMIT

    def attend(pool, pages, implementation):
        tables = jnp.asarray(pages, jnp.int32)[None]
        out = pallas_attn.mla_decode(query, pool, tables, lens, implementation=implementation)
        return np.asarray(out, np.float32)

    expected = attend(new, np.arange(len(pages)), "xla")
    np.testing.assert_allclose(attend(large, pages, implementation), expected, rtol=0.02, atol=0.02)
