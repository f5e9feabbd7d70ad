"""`write_kv`: signature, checks, dispatch."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch, options
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.op import Op
from pallas_attn._call.operands import dims_of, ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import QUANTIZED_DTYPES, check_pools, reaches
from pallas_attn._tile import triton
from pallas_attn._types import Implementation, KVCache, Layout, NewKV, SlotMapping
from pallas_attn.ops.kv_cache.kernel import write_kv_pallas
from pallas_attn.ops.kv_cache.operands import Operands
from pallas_attn.ops.kv_cache.reference import write_kv_xla


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    return reaches(operands.pool, operands.key_cache.dtype, lowering)


def _results(operands: Operands) -> tuple[str, ...]:
    said = dict(dims_of(operands))
    return tuple(said[name] for name in operands.written)


OP = Op(
    name="write_kv",
    implementations={
        **triton.implementations(write_kv_pallas, _supports, takes_config=False),
        "xla": dispatch.Implementation(write_kv_xla, takes_config=False),
    },
    results=_results,
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
    implementation: Implementation | None = None,
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
        slot_mapping: [num_tokens] int32; slot = page * page_size + offset. Tokens whose slot is negative (usually -1)
            or beyond the pool are skipped. Two tokens must not share a slot.
        k_scale, v_scale: for the 8-bit dtypes only, float32 above 0: stored is value / scale, saturated to the format's
            range. A scalar, [num_kv_heads], or [num_pages, num_kv_heads], one for each page and head, made beforehand
            by `page_scales` from these same tokens. None means 1.
        layout: order of a page's dimensions.
        implementation: None (chosen), "pallas" or "triton" (NVIDIA, sm_80 or newer; e4m3 from sm_89), "xla" (anywhere)
            or "interpret".

    Returns:
        (key_cache, value_cache), updated.

    Raises:
        TypeError: an argument of the wrong dtype.
        ValueError: a wrong shape or scale, or an implementation that cannot serve.
    """
    pools = key_cache, value_cache
    updated = write(
        *(key, value, *pools, slot_mapping, k_scale, v_scale), layout=layout, implementation=implementation
    )
    return updated[0], updated[1]


def write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    layout: Layout,
    implementation: Implementation | None,
    grows: bool = False,
) -> tuple[jax.Array, ...]:
    """`write_kv`; if `grows`, the scales are those of pages, which first become what `growing_scales` says, with what
    the pages hold: (key_cache, value_cache, k_scale, v_scale)."""
    check = ArgumentChecker("write_kv")
    pool = check_pools(check, key_cache, value_cache, layout, (*DTYPES, *QUANTIZED_DTYPES))
    check.array("key", key, ("num_tokens", "num_kv_heads", "head_dim"), DTYPES)
    check.array("value", value, ("num_tokens", "num_kv_heads", "head_dim"), [key.dtype])
    check.array("slot_mapping", slot_mapping, ("num_tokens",), [jnp.int32])
    k_scale, v_scale = options.scales(check, key_cache.dtype, pool, k_scale, v_scale)
    given = Operands(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        layout=layout,
        grows=grows,
    )
    given = ready(given)
    if key.shape[0] == 0:
        dispatch.check_name("write_kv", "write_kv", implementation)
        return tuple(getattr(given, name) for name in given.written)
    return OP.serve(given, implementation=implementation)
