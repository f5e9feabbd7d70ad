"""A decoding step that writes to a cache and attends to it, on eight devices: run as eight_devices.py is."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eight_devices import (
    KINDS,
    POOL,
    QUERY,
    WHOLE,
    assert_equal,
    kinds_and_implementations,
    latent,
    mesh_of,
    new_tokens,
    paged,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import PagedKVCache, PagedLatentCache, paged_attention


@kinds_and_implementations
def test_a_step_with_a_cache(kind, implementation):
    """What a model does in every layer: new tokens into the cache, then attention; and pages are copied."""
    arguments = stepped_from()
    cache, _, key, *_ = arguments
    shardings = dataclasses.replace(
        cache, key_cache=POOL, value_cache=POOL, shared_tables=P("seq"), seq_lens=P("seq")
    )
    new = P("seq", None, "head")
    specs = (shardings, QUERY, new, new, P("seq"))
    mesh = mesh_of(kind)
    arrays = jax.device_put(arguments, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    step = functools.partial(stepped, implementation=implementation)
    assert_equal(step, arrays, expected_step(), moves=key.size, out=QUERY)


@functools.cache
def stepped_from() -> tuple[Any, ...]:
    """The cache, and what is new to it: query, key, value, positions."""
    tables = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    cache = PagedKVCache.create(
        num_layers=2,
        num_pages=16,
        page_size=16,
        num_kv_heads=4,
        head_dim=32,
        block_tables=tables,
        dtype="float32",
    )
    key, value = (new[:4, None] for new in new_tokens()[:2])
    return cache, paged()[0], key, value, jnp.zeros((4, 1), jnp.int32)


def stepped(cache, query, key, value, positions, *, implementation: str):
    cache = cache.write(1, key, value, positions)
    pools = cache.key_cache, cache.value_cache, cache.layer_tables(1)
    out = paged_attention(query, *pools, cache.seq_lens + 1, implementation=implementation)
    return out, cache.copy_pages(jnp.array([0]), jnp.array([15])).key_cache


@functools.cache
def expected_step() -> tuple[np.ndarray, ...]:
    on_one_device = jax.jit(functools.partial(stepped, implementation="xla"))
    return tuple(map(np.asarray, on_one_device(*stepped_from())))


@KINDS
def test_a_step_with_a_latent_cache(kind):
    tables = jnp.arange(16, dtype=jnp.int32).reshape(4, 4)
    cache = PagedLatentCache.create(
        num_layers=2, num_pages=16, page_size=16, block_tables=tables, dtype="float32"
    )
    latents, positions = latent()[0][:, :, 0], jnp.zeros((4, 2), jnp.int32) + jnp.arange(2)

    def write(cache, latents, positions):
        return cache.write(1, latents, positions).latent_cache

    expected = jax.jit(write)(cache, latents, positions)
    shardings = dataclasses.replace(cache, latent_cache=WHOLE, shared_tables=P("seq"), seq_lens=P("seq"))
    mesh = mesh_of(kind)
    specs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (shardings, P("seq"), P("seq")))
    assert_equal(write, jax.device_put((cache, latents, positions), specs), expected, moves=latents.size)
