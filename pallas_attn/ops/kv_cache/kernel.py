"""`write_kv` in Pallas: each program copies one token's heads into its slot of both pools, in place. Before that, where
scales of pages grew, each program rounds one head of one page again."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.layout import PoolShape, Which, token_index
from pallas_attn._tile.pages import nothing
from pallas_attn._tile.pieces import ceil_div
from pallas_attn._tile.quantization import quantize
from pallas_attn.ops.kv_cache.page_scales import Growth

# Elements of a page that a program has at once.
_AT_ONCE = 4096


@functools.partial(jax.jit, static_argnames=("pool", "layout", "lowering"))
def write_kv_pallas(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale,
    v_scale,
    growth: Growth | None = None,
    *,
    pool: PoolShape,
    layout: str,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, jax.Array]:
    def in_place(kernel, pools, *operands, name: str, grid: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        return tuple(
            triton.kernel_call(
                functools.partial(kernel, pool=pool, layout=layout),
                *pools,
                *operands,
                name=f"pallas_attn_{name}",
                grid=grid,
                out_shape=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in pools],
                input_output_aliases={0: 0, 1: 1},
                num_warps=4,
                num_stages=1,
                lowering=lowering,
            )
        )

    pools, num_tokens = (key_cache, value_cache), key.shape[0]
    if growth is not None:
        # Of tokens that lead no page which grows, the programs end at once.
        pools = in_place(
            _rescale_kernel, pools, *growth, name="rescale_pages", grid=(num_tokens, pool.num_kv_heads)
        )
    scales = () if k_scale is None else (k_scale, v_scale)
    return in_place(
        _write_kernel, pools, slot_mapping, key, value, *scales, name="write_kv", grid=(num_tokens,)
    )


def _rescale_kernel(
    _key_in,
    _value_in,
    pages_ref,
    k_growth_ref,
    v_growth_ref,
    key_cache_ref,
    value_cache_ref,
    *,
    pool: PoolShape,
    layout: str,
):
    token, head = triton.program_id(0), triton.program_id(1)
    page = triton.load(pages_ref.at[token])
    dims = jnp.arange(triton.next_power_of_2(pool.head_dim))[None, :]
    at_once = min(triton.next_power_of_2(pool.page_size), max(_AT_ONCE // dims.size, 1))
    tile = jnp.zeros((at_once, dims.size), jnp.int32)

    def rescale(which: Which, growth_ref, cache_ref) -> None:
        growth = triton.load(growth_ref.at[token, head])

        def some(step, carry):
            slots = step * at_once + jnp.arange(at_once)[:, None]
            inside = (slots < pool.page_size) & (dims < pool.head_dim)
            places = (page + tile, slots + tile, head + tile, dims + tile)
            place = cache_ref.at[token_index(layout, which, *places, cache_ref.dtype)]
            stored = triton.load(place, mask=inside, other=nothing(cache_ref))
            triton.store(place, quantize(stored, cache_ref.dtype, growth), mask=inside)
            return carry

        steps = jnp.where((page >= 0) & (growth > 1), jnp.int32(ceil_div(pool.page_size, at_once)), 0)
        jax.lax.fori_loop(0, steps, some, jnp.int32(0))

    rescale("key", k_growth_ref, key_cache_ref)
    rescale("value", v_growth_ref, value_cache_ref)


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
