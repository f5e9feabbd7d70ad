"""`write_kv` in Pallas: each program copies one token's heads into its slot of both pools, in place. Before that, where
pages have growing scales, each program updates one head of one page: its scale, and its stored values."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import PoolShape, Which
from pallas_attn._call.sizes import ceil_div, next_power_of_2
from pallas_attn._tile import triton
from pallas_attn._tile.layout import token_index
from pallas_attn._tile.pages import nothing
from pallas_attn._tile.quantization import magnitudes, quantize
from pallas_attn.ops.kv_cache.operands import Operands
from pallas_attn.ops.kv_cache.page_scales import grown

# Elements of a page, or slots of tokens, that a program processes at once.
_AT_ONCE = 1024


@functools.partial(jax.jit, static_argnames="lowering")
def write_kv_pallas(operands: Operands, *, lowering: triton.Lowering = "pallas") -> tuple[jax.Array, ...]:
    pool, layout = operands.pool, operands.layout

    def in_place(kernel, arrays, *operands, name: str, **options) -> tuple[jax.Array, ...]:
        return tuple(
            triton.kernel_call(
                functools.partial(kernel, pool=pool, layout=layout),
                *arrays,
                *operands,
                name=f"pallas_attn_{name}",
                out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
                input_output_aliases={i: i for i in range(len(arrays))},
                num_stages=1,
                lowering=lowering,
                **options,
            )
        )

    new, num_tokens = (operands.slot_mapping, operands.key, operands.value), operands.key.shape[0]
    pools = operands.key_cache, operands.value_cache
    scales = tuple(x for x in (operands.k_scale, operands.v_scale) if x is not None)
    if operands.grows:
        # One warp, so that all threads have read a page's scale before any of them writes the new one.
        grid = (num_tokens, pool.num_kv_heads)
        both = in_place(_grow_kernel, (*pools, *scales), *new, name="grow_pages", grid=grid, num_warps=1)
        pools, scales = both[:2], both[2:]
    pools = in_place(_write_kernel, pools, *new, *scales, name="write_kv", grid=(num_tokens,), num_warps=4)
    return (*pools, *scales) if operands.grows else pools


def _grow_kernel(*refs, pool: PoolShape, layout: str):
    """`page_scales.growing_scales` for one head of one page, by the program of the page's first token; those of other
    tokens exit at once."""
    slots_ref, key_ref, value_ref, key_cache_ref, value_cache_ref, k_scale_ref, v_scale_ref = refs[4:]
    token, head = triton.program_id(0), triton.program_id(1)
    num_tokens, nowhere = slots_ref.shape[0], jnp.int32(pool.num_pages * pool.page_size)
    slot, before = (triton.load(slots_ref.at[at]) for at in (token, jnp.maximum(token - 1, 0)))
    page = slot // pool.page_size
    dims = jnp.arange(next_power_of_2(pool.head_dim))[None, :]
    rows = max(_AT_ONCE // dims.size, 1)

    def of_page(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(slots of some tokens, whether they lie in the page)"""
        slots = triton.load(slots_ref.at[tokens], mask=tokens < num_tokens, other=-1)
        return slots, slots // pool.page_size == page

    def members() -> tuple[jax.Array, ...]:
        """The page's first token, its last one and its lowest slot."""
        at_once = min(next_power_of_2(num_tokens), _AT_ONCE)

        def some(step, found):
            tokens = step * at_once + jnp.arange(at_once)
            slots, here = of_page(tokens)
            return (
                jnp.minimum(found[0], jnp.min(jnp.where(here, tokens, num_tokens))),
                jnp.maximum(found[1], jnp.max(jnp.where(here, tokens, 0))),
                jnp.minimum(found[2], jnp.min(jnp.where(here, slots, nowhere))),
            )

        nobody = jnp.int32(num_tokens), jnp.int32(0), nowhere
        return jax.lax.fori_loop(0, ceil_div(num_tokens, at_once), some, nobody)

    def peaks(last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest key and the largest value; a page's tokens are mostly adjacent."""
        at_once = min(next_power_of_2(num_tokens), rows)

        def some(step, found):
            tokens = token + step * at_once + jnp.arange(at_once)
            _, here = of_page(tokens)
            inside = here[:, None] & (dims < pool.head_dim)
            tile = jnp.zeros(inside.shape, jnp.int32)
            places = (tokens[:, None] + tile, head + tile, dims + tile)
            new = (triton.load(ref.at[places], mask=inside, other=0.0) for ref in (key_ref, value_ref))
            return tuple(
                jnp.maximum(peak, jnp.max(magnitudes(one))) for peak, one in zip(found, new, strict=True)
            )

        return jax.lax.fori_loop(0, (last - token) // at_once + 1, some, (jnp.float32(0), jnp.float32(0)))

    def rescale(which: Which, factor: jax.Array, cache_ref) -> None:
        at_once = min(next_power_of_2(pool.page_size), rows)
        tile = jnp.zeros((at_once, dims.size), jnp.int32)

        def some(step, carry):
            slots = step * at_once + jnp.arange(at_once)[:, None]
            inside = (slots < pool.page_size) & (dims < pool.head_dim)
            places = (page + tile, slots + tile, head + tile, dims + tile)
            place = cache_ref.at[token_index(layout, which, *places, cache_ref.dtype)]
            stored = triton.load(place, mask=inside, other=nothing(cache_ref))
            triton.store(place, quantize(stored, cache_ref.dtype, factor), mask=inside)
            return carry

        steps = jnp.where(factor > 1, jnp.int32(ceil_div(pool.page_size, at_once)), 0)
        jax.lax.fori_loop(0, steps, some, jnp.int32(0))

    may_lead = (token == 0) | (before // pool.page_size != page)

    @triton.when((slot >= 0) & (slot < nowhere) & may_lead)
    def _():
        first, last, lowest = members()

        @triton.when(first == token)
        def _():
            caches, scales = (key_cache_ref, value_cache_ref), (k_scale_ref, v_scale_ref)
            were = [triton.load(ref.at[page, head]) for ref in scales]
            begun = lowest == page * pool.page_size
            for which, cache_ref, scale_ref, was, peak in zip(
                ("key", "value"), caches, scales, were, peaks(last), strict=True
            ):
                scale, factor = grown(was, peak, begun, cache_ref.dtype)
                triton.store(scale_ref.at[page, head], scale)
                rescale(which, factor, cache_ref)


def _write_kernel(_key_in, _value_in, slots_ref, key_ref, value_ref, *refs, pool: PoolShape, layout: str):
    *scale_refs, key_cache_ref, value_cache_ref = refs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)
    token = triton.program_id(0)
    slot = triton.load(slots_ref.at[token])
    usable = (slot >= 0) & (slot < pool.num_pages * pool.page_size)
    page, offset = slot // pool.page_size, slot % pool.page_size

    # Triton's tiles have power-of-two sides; the excess is masked.
    heads = jnp.arange(next_power_of_2(pool.num_kv_heads))[:, None]
    dims = jnp.arange(next_power_of_2(pool.head_dim))[None, :]
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
