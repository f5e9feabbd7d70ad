"""`write_kv`: signature, checks, dispatch."""

import functools

import jax.numpy as jnp

from pallas_attn import _dispatch
from pallas_attn._checks import ArgumentChecker
from pallas_attn._types import KVCache, Layout, NewKV, SlotMapping
from pallas_attn.ops.kv_cache.kernel import write_kv_pallas
from pallas_attn.ops.kv_cache.layout import LAYOUTS, cache_dims
from pallas_attn.ops.kv_cache.reference import write_kv_xla

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

_dispatch.register(
    "write_kv",
    {
        "pallas": _dispatch.Implementation(write_kv_pallas),
        "xla": _dispatch.Implementation(write_kv_xla),
        "interpret": _dispatch.Implementation(functools.partial(write_kv_pallas, interpret=True)),
    },
)


def write_kv(
    key: NewKV,
    value: NewKV,
    key_cache: KVCache,
    value_cache: KVCache,
    slot_mapping: SlotMapping,
    *,
    layout: Layout = "NHD",
    implementation: str | None = None,
) -> tuple[KVCache, KVCache]:
    """Writes new tokens' keys and values into their slots of a paged cache (vLLM's `reshape_and_cache`).

    The pools are updated in place when they are donated: call it under a `jax.jit` whose caches are in
    `donate_argnums` (or carried by a loop). Without donation XLA must copy both pools first.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], bf16, fp16 or float32; cast to the cache's dtype.
        key_cache, value_cache: pools of one dtype (bf16, fp16, float32), of `layout`
            "NHD" [num_pages, page_size, num_kv_heads, head_dim] or
            "HND" [num_pages, num_kv_heads, page_size, head_dim].
        slot_mapping: [num_tokens] int32; slot = page * page_size + offset. Tokens whose slot is negative (-1 by
            custom) or beyond the pool are skipped. Two tokens must not share a slot.
        layout: order of a page's dimensions.
        implementation: None (chosen), "pallas" (NVIDIA, sm_80 or newer), "xla" (anywhere) or "interpret".

    Returns:
        (key_cache, value_cache), updated.

    Raises:
        TypeError: an argument of the wrong dtype. ValueError: a wrong shape, or an implementation that cannot serve.
    """
    check = ArgumentChecker("write_kv")
    check.one_of("layout", layout, LAYOUTS)
    check.array("key_cache", key_cache, cache_dims(layout), DTYPES)
    check.array("value_cache", value_cache, cache_dims(layout), [key_cache.dtype])
    check.array("key", key, ("num_tokens", "num_kv_heads", "head_dim"), DTYPES)
    check.array("value", value, ("num_tokens", "num_kv_heads", "head_dim"), [key.dtype])
    check.array("slot_mapping", slot_mapping, ("num_tokens",), [jnp.int32])
    check.non_empty("key_cache", key_cache)
    _, fn = _dispatch.resolve("write_kv", None, implementation)
    if key.shape[0] == 0:
        return key_cache, value_cache
    return fn(key, value, key_cache, value_cache, slot_mapping, layout=layout)
