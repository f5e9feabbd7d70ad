"""`write_kv`: signature, checks, dispatch."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn import _dispatch
from pallas_attn._checks import ArgumentChecker
from pallas_attn._device import current_device
from pallas_attn._quantization import QUANTIZED_DTYPES, per_head_scale
from pallas_attn._types import KVCache, Layout, NewKV, SlotMapping
from pallas_attn.ops.kv_cache.kernel import write_kv_pallas
from pallas_attn.ops.kv_cache.layout import PoolShape, check_pools
from pallas_attn.ops.kv_cache.reference import write_kv_xla

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class PoolCase(NamedTuple):
    """The static facts of a pool that decide which implementation can serve it."""

    pool: PoolShape
    cache_dtype: Any


def pallas_reaches(case: PoolCase) -> str | None:
    """Why Triton cannot handle a pool on this device, or None."""
    cache_dtype = case.cache_dtype
    elements = math.prod(case.pool)
    if jnp.dtype(cache_dtype).itemsize == 1 and 2**31 <= elements <= 2**32:
        # The lowering switches to 64-bit offsets above 2**32 bytes; between, they overflow.
        return f"8-bit pools of 2**31 to 2**32 elements overflow Pallas-Triton's offsets, got {elements} elements"
    capability = current_device().compute_capability
    if cache_dtype == jnp.float8_e4m3fn and capability is not None and capability < 89:
        return (
            f"float8_e4m3fn needs sm_89 or newer, the device is sm_{capability} (float8_e5m2 and int8 work)"
        )
    return None


_dispatch.register(
    "write_kv",
    {
        "pallas": _dispatch.Implementation(write_kv_pallas, pallas_reaches),
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
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    layout: Layout = "NHD",
    implementation: str | None = None,
) -> tuple[KVCache, KVCache]:
    """Writes new tokens' keys and values into their slots of a paged cache (vLLM's `reshape_and_cache`).

    The pools are updated in place when they are donated: call it under a `jax.jit` whose caches are in
    `donate_argnums` (or carried by a loop). Without donation XLA must copy both pools first.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], bf16, fp16 or float32; cast to the cache's dtype.
        key_cache, value_cache: pools of one dtype (bf16, fp16, float32, float8_e4m3fn, float8_e5m2, int8), of `layout`
            "NHD" [num_pages, page_size, num_kv_heads, head_dim],
            "HND" [num_pages, num_kv_heads, page_size, head_dim], or
            "PACKED" keys [num_pages, num_kv_heads, head_dim/x, page_size, x] with x = 16 / itemsize, and values
            [num_pages, num_kv_heads, head_dim, page_size].
        slot_mapping: [num_tokens] int32; slot = page * page_size + offset. Tokens whose slot is negative (-1 by
            custom) or beyond the pool are skipped. Two tokens must not share a slot.
        k_scale, v_scale: for the 8-bit dtypes only: scalar or [num_kv_heads] float32 above 0; stored is
            value / scale, saturated to the format's range. None means 1.
        layout: order of a page's dimensions.
        implementation: None (chosen), "pallas" (NVIDIA, sm_80 or newer; e4m3 from sm_89), "xla" (anywhere) or
            "interpret".

    Returns:
        (key_cache, value_cache), updated.

    Raises:
        TypeError: an argument of the wrong dtype. ValueError: a wrong shape or scale, or an implementation that
        cannot serve.
    """
    check = ArgumentChecker("write_kv")
    pool = check_pools(check, key_cache, value_cache, layout, (*DTYPES, *QUANTIZED_DTYPES))
    check.array("key", key, ("num_tokens", "num_kv_heads", "head_dim"), DTYPES)
    check.array("value", value, ("num_tokens", "num_kv_heads", "head_dim"), [key.dtype])
    check.array("slot_mapping", slot_mapping, ("num_tokens",), [jnp.int32])
    scales = (
        per_head_scale("write_kv", name, scale, key_cache.dtype, pool.num_kv_heads)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    _, fn = _dispatch.resolve("write_kv", PoolCase(pool, key_cache.dtype), implementation)
    # Outside jit they may be numpy's.
    key, value, key_cache, value_cache, slot_mapping = map(
        jnp.asarray, (key, value, key_cache, value_cache, slot_mapping)
    )
    if key.shape[0] == 0:
        return key_cache, value_cache
    return fn(key, value, key_cache, value_cache, slot_mapping, *scales, pool=pool, layout=layout)
