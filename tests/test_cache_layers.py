"""Layers, page ids and positions that a cache does not have, and integers of every width for those that it has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_cache, unchecked

import pallas_attn
from pallas_attn import PagedKVCache


def caches(dtype="int8"):
    tables = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    paged = small_cache(block_tables=tables, dtype=dtype)
    latents = pallas_attn.PagedLatentCache.create(
        num_layers=2, num_pages=4, page_size=8, block_tables=tables, dtype="float32"
    )
    return paged, latents


@pytest.mark.once
@pytest.mark.parametrize("layer", [2, -1, 2**31 - 1, -(2**31), 2**29])
def test_a_traced_layer_out_of_range_touches_no_other(layer):
    """Not even layers whose pages it would name if the product wrapped around."""
    paged, latents = caches()
    new, positions = jnp.ones((2, 3, 2, 16)), jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))

    @jax.jit
    def through(layer):
        return (
            paged.write(layer, new, new, positions),
            paged.calibrate(layer, 9 * new, new, positions),
            latents.write(layer, jnp.ones((2, 3, 576)), positions),
            (paged.layer_tables(layer), latents.layer_tables(layer), paged.slots(layer, positions)),
            paged.scales(layer),
            pallas_attn.paged_attention(
                new[:, 0],
                *[paged.key_cache] * 2,
                paged.layer_tables(layer),
                jnp.array([3, 0]),
                **paged.scales(0),
            ),
        )

    *same, nowhere, scales, attended = through(jnp.int32(layer))
    for before, after in zip((paged, paged, latents), same, strict=True):
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert all((np.asarray(x) == -1).all() for x in nowhere)
    assert all(np.isnan(x).all() for x in scales.values())
    assert np.isnan(attended[0]).all()
    assert (np.asarray(attended[1]) == 0).all()
    right = through(jnp.int32(1))
    jax.tree.map(np.testing.assert_array_equal, right[1], paged.calibrate(1, 9 * new, new, positions))
    jax.tree.map(np.testing.assert_array_equal, right[2], latents.write(1, jnp.ones((2, 3, 576)), positions))


@pytest.mark.once
def test_integers_of_any_width():
    """With 64-bit types on, JAX's own integers are wide; what int32 does not hold names no page."""
    cache = jnp.arange(4.0)[:, None] + jnp.zeros((4, 3))
    expected = [0.0, 0.0, 2.0, 3.0]
    wide = np.array([0, 2, 2**32], np.int64), np.array([1, 2**32 + 3, 3], np.int64)
    for source, target in (([0], [1]), ((0, -1, 2**70), (1, 3, 3)), wide, (np.uint8([0]), np.int16([1]))):
        np.testing.assert_array_equal(pallas_attn.copy_pages(cache, source, target)[:, 0], expected)
        copied = small_cache().copy_pages(source, target)
        assert copied.key_cache.shape == small_cache().key_cache.shape
    np.testing.assert_array_equal(pallas_attn.copy_pages(cache, [], []), cache)
    with jax.enable_x64(True):
        for source, target in (([0], [1]), wide, tuple(map(jnp.asarray, wide))):
            for copy in (pallas_attn.copy_pages, jax.jit(pallas_attn.copy_pages)):
                np.testing.assert_array_equal(copy(cache, source, target)[:, 0], expected)
        paged, _ = caches()
        layers = jnp.arange(2)
        assert layers.dtype == jnp.int64
        tables = jax.lax.map(paged.layer_tables, layers)
        assert tables.dtype == jnp.int32
        assert (jax.jit(paged.layer_tables)(jnp.int64(2**32)) == -1).all()
    for layer in (1, np.int64(1), np.uint8(1), np.array(1), jnp.int32(1)):
        np.testing.assert_array_equal(unchecked(PagedKVCache.layer_tables)(paged, layer), tables[1])


def test_wrong_positions_and_latents_are_named():
    cache, new = small_cache(), jnp.zeros((2, 3, 2, 16))
    for positions in (jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.int32)):
        with pytest.raises(
            ValueError,
            match=r"PagedKVCache.write: argument 'positions': expected shape \[num_seqs=2 \(as cache\), n\]",
        ):
            cache.write(0, new, new, positions)
    with pytest.raises(TypeError, match=r"argument 'positions': expected dtype int32, got float32"):
        cache.write(0, new, new, jnp.zeros((2, 3)))
    create = functools.partial(
        pallas_attn.PagedLatentCache.create,
        num_layers=1,
        num_pages=2,
        page_size=4,
        block_tables=cache.shared_tables,
    )
    latents, positions = create(), jnp.zeros((2, 8), jnp.int32)
    with pytest.raises(
        ValueError,
        match=r"PagedLatentCache.write: argument 'latents': expected shape "
        r"\[num_seqs=2 \(as cache\), n=8 \(as positions\), 576\]",
    ):
        latents.write(0, jnp.ones((2, 9, 512)), positions)
    with pytest.raises(ValueError, match=r"argument 'positions': expected shape .*, got \[3, 8\]"):
        latents.write(0, jnp.ones((3, 8, 576)), jnp.zeros((3, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"PagedLatentCache.create: argument 'dtype': expected one of"):
        create(dtype=jnp.int8)


@pytest.mark.parametrize("kind", ["PagedKVCache", "PagedLatentCache"])
def test_tables_of_all_layers_are_not_those_of_one(kind):
    """An op that got them would read layer 0's pages, whichever layer is meant."""
    sizes = dict(num_kv_heads=2, head_dim=16) if kind == "PagedKVCache" else {}
    tables = jnp.array([[1, 0]], jnp.int32)
    create = functools.partial(
        getattr(pallas_attn, kind).create, num_pages=2, page_size=4, block_tables=tables, **sizes
    )
    message = f"^{kind}: attribute 'block_tables': expected a cache of one layer, got 3 layers: ops want layer_tables"
    with pytest.raises(AttributeError, match=message):
        create(num_layers=3).block_tables  # noqa: B018
    one, three = create(num_layers=1), create(num_layers=3)
    assert one.block_tables.tolist() == one.layer_tables(0).tolist() == [[1, 0]]
    assert three.shared_tables.tolist() == [[1, 0]]
    assert three.replace(block_tables=tables[::, ::-1]).layer_tables(2).tolist() == [[4, 5]]
