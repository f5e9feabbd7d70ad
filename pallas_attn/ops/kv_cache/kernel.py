"""`write_kv` in Pallas: each program copies one token's heads into its slot of both pools, in place."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn import _pallas
from pallas_attn.ops.kv_cache.layout import PoolShape, pool_shape, token_index


def write_kv_pallas(
    key, value, key_cache, value_cache, slot_mapping, *, layout: str, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    pool = pool_shape(key_cache, layout)
    kernel = functools.partial(_write_kernel, pool=pool, layout=layout)
    return tuple(
        _pallas.kernel_call(
            kernel,
            slot_mapping,
            key,
            value,
            key_cache,
            value_cache,
            name="pallas_attn_write_kv",
            grid=(key.shape[0],),
            out_shape=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in (key_cache, value_cache)],
            input_output_aliases={3: 0, 4: 1},
            num_warps=4,
            num_stages=1,
            interpret=interpret,
        )
    )


def _write_kernel(
    slots_ref,
    key_ref,
    value_ref,
    _key_in,
    _value_in,
    key_cache_ref,
    value_cache_ref,
    *,
    pool: PoolShape,
    layout: str,
):
    token = _pallas.program_id(0)
    slot = _pallas.load(slots_ref.at[token])
    usable = (slot >= 0) & (slot < pool.num_pages * pool.page_size)
    page, offset = slot // pool.page_size, slot % pool.page_size

    # Triton tiles have power-of-two sides; the rest is masked.
    heads = jnp.arange(_pallas.next_power_of_2(pool.num_kv_heads))[:, None]
    dims = jnp.arange(_pallas.next_power_of_2(pool.head_dim))[None, :]
    inside = (heads < pool.num_kv_heads) & (dims < pool.head_dim) & usable
    tile = jnp.zeros(inside.shape, jnp.int32)
    destination = token_index(layout, page + tile, offset + tile, heads + tile, dims + tile)
    for new_ref, cache_ref in ((key_ref, key_cache_ref), (value_ref, value_cache_ref)):
        new = _pallas.load(new_ref.at[token + tile, heads + tile, dims + tile], mask=inside, other=0.0)
        _pallas.store(cache_ref.at[destination], new.astype(cache_ref.dtype), mask=inside)
