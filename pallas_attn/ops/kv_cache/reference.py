"""`write_kv` in plain jnp: a scatter that drops the slots it must skip."""

import jax
import jax.numpy as jnp

from pallas_attn._tile.layout import PoolShape, token_index
from pallas_attn._tile.quantization import is_quantized, quantize


def write_kv_xla(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, *, pool: PoolShape, layout: str
) -> tuple[jax.Array, jax.Array]:
    num_slots = pool.num_pages * pool.page_size
    # Negative indices would wrap around, so slots to skip go past the end, where mode="drop" ignores them.
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
        return cache.at[index].set(new.astype(cache.dtype), mode="drop")

    return scatter(key_cache, key, k_scale, "key"), scatter(value_cache, value, v_scale, "value")
