"""`write_kv` in plain jnp: a scatter that drops the slots it must skip; before it, scales of pages grow."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import DIMS, Which, is_quantized
from pallas_attn._tile.layout import moved, token_index
from pallas_attn._tile.quantization import quantize
from pallas_attn.ops.kv_cache.operands import Operands
from pallas_attn.ops.kv_cache.page_scales import growing_scales


def write_kv_xla(operands: Operands) -> tuple[jax.Array, ...]:
    pool, layout, slot_mapping = operands.pool, operands.layout, operands.slot_mapping
    key, value, k_scale, v_scale = operands.key, operands.value, operands.k_scale, operands.v_scale
    key_cache, value_cache = operands.key_cache, operands.value_cache
    if operands.grows:
        assert k_scale is not None
        assert v_scale is not None
        k_scale, v_scale, growth = growing_scales(
            *(key, value, k_scale, v_scale, slot_mapping), page_size=pool.page_size, dtype=key_cache.dtype
        )
        key_cache = _rescaled(key_cache, growth.pages, growth.key, layout, "key")
        value_cache = _rescaled(value_cache, growth.pages, growth.value, layout, "value")
    num_slots = pool.num_pages * pool.page_size
    # Negative indices would wrap around, so skipped slots go past the end, where mode="drop" ignores them.
    slots = jnp.where(slot_mapping < 0, num_slots, slot_mapping)
    page, offset = (s[:, None, None] for s in (slots // pool.page_size, slots % pool.page_size))
    heads = jnp.arange(pool.num_kv_heads)[None, :, None]
    dims = jnp.arange(pool.head_dim)[None, None, :]

    def scatter(cache: jax.Array, new: jax.Array, scale: jax.Array | None, which) -> jax.Array:
        if is_quantized(cache.dtype):
            assert scale is not None
            per_token = scale[None] if scale.ndim == 1 else scale.at[page[:, 0, 0]].get(mode="clip")
            new = quantize(new, cache.dtype, per_token[..., None])
        index = token_index(layout, which, page, offset, heads, dims, cache.dtype)
        if (
            layout == "NHD"
        ):  # whole rows: XLA's scatter of [heads, dims] windows is much faster than of elements
            index = (page[:, 0, 0], offset[:, 0, 0])
        elif layout == "HND":
            index = (page[..., 0], heads[..., 0], offset[..., 0])
        return moved(lambda cache, new: cache.at[index].set(new, mode="drop"), cache, new.astype(cache.dtype))

    pools = scatter(key_cache, key, k_scale, "key"), scatter(value_cache, value, v_scale, "value")
    scales = tuple(x for x in (k_scale, v_scale) if x is not None and operands.grows)
    return (*pools, *scales)


def _rescaled(cache: jax.Array, pages: jax.Array, factors: jax.Array, layout: str, which: Which) -> jax.Array:
    """Page by page, since mostly none grows: a gather of all candidates would copy a prompt's pages."""
    order = jnp.argsort(pages < 0, stable=True)
    of_page = tuple(factors.shape[1] if dim == "kv_heads" else 1 for dim in DIMS[layout][which].split())

    def one(index: jax.Array, cache: jax.Array) -> jax.Array:
        at = order[index]
        page = jax.lax.dynamic_index_in_dim(cache, pages[at])
        page = quantize(page, cache.dtype, factors[at].reshape(of_page))
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=pages[at], axis=0)
        return moved(put, cache, page)

    return jax.lax.fori_loop(0, jnp.sum(pages >= 0), one, cache)
