"""What a call does not write to keeps its bits, NaNs their payloads among them: XLA's compiler for the CPU moves e5m2
as wider numbers, all of an array where one element is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, of_any_bits, small_cache

from pallas_attn import convert_layout, prefix_prefill, write_kv, write_latents

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
DTYPES = pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16"])
E5M2 = jnp.dtype(jnp.float8_e5m2)


def assert_kept(after, before, written) -> None:
    """`written`: an index of what may differ."""
    kept = np.ones(before.shape[: len(written)], bool)
    kept[written] = False
    assert np.asarray(after)[kept].tobytes() == np.asarray(before)[kept].tobytes()


@IMPLEMENTATIONS
@DTYPES
def test_slots_of_other_tokens(implementation, dtype):
    rng = np.random.default_rng(0)
    caches = [of_any_bits(rng, (4, 8, 2, 16), dtype) for _ in range(2)]
    new, slots = jnp.ones((2, 2, 16), jnp.bfloat16), jnp.array([11, -1], jnp.int32)
    write = functools.partial(write_kv, implementation=implementation)
    for cache, got in zip(caches, jax.jit(write)(new, new, *caches, slots), strict=True):
        expected = np.array(cache)
        expected[1, 3] = 1
        assert np.asarray(got).tobytes() == expected.tobytes()
    stacked = [jnp.stack([cache, cache[::-1]]) for cache in caches]
    both = jax.vmap(write, in_axes=(None, None, 0, 0, None))(new, new, *stacked, slots)
    for cache, got in zip(stacked, both, strict=True):
        assert_kept(got, cache, (slice(None), 1, 3))


@IMPLEMENTATIONS
@pytest.mark.parametrize("layout", ["HND", "PACKED"])
def test_pages_whose_scales_stay(implementation, layout):
    """Of a page that grows all is rounded again, of others nothing."""
    rng = np.random.default_rng(1)
    tables = jnp.array([[0, 1], [2, -1]], jnp.int32)
    cache = small_cache(layout=layout, dtype=E5M2, block_tables=tables, scale_per_page=True)
    pools = {
        name: of_any_bits(rng, getattr(cache, name).shape, E5M2) for name in ("key_cache", "value_cache")
    }
    before = cache.replace(**pools)
    new = jnp.full((2, 2, 2, 16), 1e6)
    positions = jnp.array([[3, 4], [-1, 0]], jnp.int32)
    after = before.write(1, new, new, positions, implementation=implementation)
    assert float(after.k_scale[4, 0]) > 1
    for name in pools:
        assert_kept(getattr(after, name), getattr(before, name), ([4, 6],))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_latents_of_other_tokens(implementation, dtype):
    cache = of_any_bits(np.random.default_rng(2), (3, 8, 1, 656 if dtype == "uint8" else 576), dtype)
    after = write_latents(
        jnp.ones((2, 576)), cache, jnp.array([3, -1], jnp.int32), implementation=implementation
    )
    assert_kept(after, cache, (0, 3))


@IMPLEMENTATIONS
def test_rows_that_are_left_to_another_kernel(implementation):
    out = of_any_bits(np.random.default_rng(3), (6, 2, 16), E5M2)
    new, pool, one = jnp.ones((6, 2, 16)), jnp.ones((3, 8, 2, 16)), jnp.full(3, 4, jnp.int32)
    bounds = jnp.array([0, 1, 5, 6], jnp.int32)
    tables = jnp.arange(3, dtype=jnp.int32)[:, None]
    after = prefix_prefill(
        *(new, new, new, pool, pool, tables, one, bounds),
        out=out,
        skip_decode=True,
        implementation=implementation,
    )
    assert_kept(after, out, (slice(1, 5),))


@DTYPES
def test_layouts(dtype):
    pool = of_any_bits(np.random.default_rng(4), (4, 8, 2, 16), dtype)
    to = functools.partial(convert_layout, source="NHD", target="PACKED")
    back = functools.partial(convert_layout, source="PACKED", target="NHD")
    for array in jax.jit(lambda *pools: back(*to(*pools)))(pool, pool):
        assert np.asarray(array).tobytes() == np.asarray(pool).tobytes()
