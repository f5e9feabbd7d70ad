"""`write_kv` in Pallas: each program copies one token's heads into its slot of both pools, in place."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.layout import PoolShape, Which, token_index
from pallas_attn._tile.quantization import quantize


@functools.partial(jax.jit, static_argnames=("pool", "layout", "lowering"))
def write_kv_pallas(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    *,
    pool: PoolShape,
    layout: str,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, jax.Array]:
    scales = () if k_scale is None else (k_scale, v_scale)
    kernel = functools.partial(_write_kernel, pool=pool, layout=layout)
    return tuple(
        triton.kernel_call(
            kernel,
            key_cache,
            value_cache,
            slot_mapping,
            key,
            value,
            *scales,
            name="pallas_attn_write_kv",
            grid=(key.shape[0],),
            out_shape=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in (key_cache, value_cache)],
            input_output_aliases={0: 0, 1: 1},
            num_warps=4,
            num_stages=1,
            lowering=lowering,
        )
    )


def _write_kernel(_key_in, _value_in, slots_ref, key_ref, value_ref, *refs, pool: PoolShape, layout: str):
    *scale_refs, key_cache_ref, value_cache_ref = refs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)
    token = triton.program_id(0)
    slot = triton.load(slots_ref.at[token])
    usable = (slot >= 0) & (slot < pool.num_pages * pool.page_size)
    page, offset = slot // pool.page_size, slot % pool.page_size

    # Triton tiles have power-of-two sides; the rest is masked.
    heads = jnp.arange(triton.next_power_of_2(pool.num_kv_heads))[:, None]
    dims = jnp.arange(triton.next_power_of_2(pool.head_dim))[None, :]
    inside = (heads < pool.num_kv_heads) & (dims < pool.head_dim) & usable
    tile = jnp.zeros(inside.shape, jnp.int32)

    def write(which: Which, new_ref, scale_ref, cache_ref) -> None:
        new = triton.load(new_ref.at[token + tile, heads + tile, dims + tile], mask=inside, other=0.0)
        if scale_ref is not None:
            head = heads.reshape(-1)
            by_page = len(scale_ref.shape) == 2
            place = scale_ref.at[page + 0 * head, head] if by_page else scale_ref.at[head]
            scale = triton.load(place, mask=(head < pool.num_kv_heads) & usable, other=1.0)
            new = quantize(new, cache_ref.dtype, scale[:, None])
        place = token_index(
            layout, which, page + tile, offset + tile, heads + tile, dims + tile, cache_ref.dtype
        )
        triton.store(cache_ref.at[place], new.astype(cache_ref.dtype), mask=inside)

    write("key", key_ref, k_scale_ref, key_cache_ref)
    write("value", value_ref, v_scale_ref, value_cache_ref)
