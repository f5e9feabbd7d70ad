"""`write_kv` in plain jnp: a scatter that drops the slots it must skip."""

import jax
import jax.numpy as jnp

from pallas_attn.ops.kv_cache.layout import pool_shape


def write_kv_xla(
    key, value, key_cache, value_cache, slot_mapping, *, layout: str
) -> tuple[jax.Array, jax.Array]:
    pool = pool_shape(key_cache, layout)
    num_slots = pool.num_pages * pool.page_size
    # Negative indices would wrap around, so slots to skip go past the end, where mode="drop" ignores them.
    slots = jnp.where(slot_mapping < 0, num_slots, slot_mapping)
    page, offset = slots // pool.page_size, slots % pool.page_size

    def scatter(cache: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(cache.dtype)
        if layout == "NHD":
            return cache.at[page, offset].set(new, mode="drop")
        heads = jnp.arange(pool.num_kv_heads)
        return cache.at[page[:, None], heads[None, :], offset[:, None]].set(new, mode="drop")

    return scatter(key_cache, key), scatter(value_cache, value)
