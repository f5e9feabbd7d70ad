"""From a call's arguments to the operands of the ragged kernels: checks and normal forms."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import options
from pallas_attn._call.checks import ArgumentChecker, is_array, is_number, shown
from pallas_attn._call.operands import ready
from pallas_attn._call.pools import FP8_DTYPES, QUANTIZED_DTYPES, check_pools, key_pool_shape
from pallas_attn._tile.masking import Rules
from pallas_attn.mods.call import PagedSizes, as_window, over_pages
from pallas_attn.ops.ragged_attention.operands import Operands


def check_arrays(
    check: ArgumentChecker, query, key_cache, value_cache, block_tables, seq_lens, cu_q_lens, num_seqs, layout
) -> jax.Array:
    """Checks what every call has and binds its dimensions; returns num_seqs as int32 [1]."""
    check.array("query", query, ("total_tokens", "num_heads", "head_dim"), options.DTYPES)
    dtypes = [query.dtype, *QUANTIZED_DTYPES]
    pool = check_pools(check, key_cache, value_cache, layout, dtypes, value_dim="value_dim")
    counted = check_batch(check, query, block_tables, seq_lens, cu_q_lens, num_seqs)
    check.non_empty("value_cache", value_cache)
    check.multiple("query", check.dims["num_heads"], "num_kv_heads", pool.num_kv_heads)
    return counted


def check_batch(check: ArgumentChecker, query, block_tables, seq_lens, cu_q_lens, num_seqs) -> jax.Array:
    """Checks the query and its bounds; `query` may be empty. Returns num_seqs as int32 [1]."""
    check.array("block_tables", block_tables, ("max_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("max_seqs",), [jnp.int32])
    check.array("cu_q_lens", cu_q_lens, (check.dims["max_seqs"] + 1,), [jnp.int32])
    for name, array in (("query", query), ("block_tables", block_tables)):
        check.non_empty(name, array)
    counted = _num_seqs(check, num_seqs)
    check.not_descending("cu_q_lens", cu_q_lens, num_seqs)
    return counted


def _num_seqs(check: ArgumentChecker, num_seqs: Any) -> jax.Array:
    most = check.dims["max_seqs"]
    if is_array(num_seqs) and num_seqs.shape in ((), (1,)):
        check.dtype_among("num_seqs", num_seqs, [jnp.int32])
        return jnp.asarray(num_seqs).reshape(1)
    if is_array(num_seqs):
        check.fail("num_seqs", "an int32 scalar or an array [1]", f"shape {list(num_seqs.shape)}")
    if num_seqs is not None:
        check.int_within("num_seqs", num_seqs, 0, most)
    return jnp.full(1, most if num_seqs is None else num_seqs, jnp.int32)


def output_dtype(check: ArgumentChecker, query_dtype: Any, out_dtype: Any) -> Any:
    if out_dtype is not None:
        check.dtype("out_dtype", out_dtype, [query_dtype, *FP8_DTYPES])
    return jnp.dtype(query_dtype if out_dtype is None else out_dtype)


def made(
    check: ArgumentChecker,
    *,
    query: Any,
    key_cache: Any,
    layout: str,
    out_dtype: Any,
    scale: Any = None,
    softcap: Any = None,
    sliding_window: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    tree_mask: Any = None,
    query_positions: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: Any = True,
    out_scale: Any = None,
    return_lse: Any = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    **arrays: Any,
) -> Operands:
    """The operands from options, which are checked here, and `arrays`, which are checked already."""
    pool = key_pool_shape(key_cache, layout)
    check.positive_float("scale", scale)
    softcap = options.softcap(check, softcap)
    check.flag("causal", causal)
    check.flag("return_lse", return_lse)
    sliding_window, traced_window = options.window(check, sliding_window)
    k_scale, v_scale = options.scales(check, key_cache.dtype, pool, k_scale, v_scale)
    alibi_slopes = options.by_head(check, "alibi_slopes", alibi_slopes)
    sinks = options.by_head(check, "sinks", sinks)
    _check_tree(check, tree_mask, query_positions, causal)
    max_seqs, max_pages = arrays["block_tables"].shape
    sizes = PagedSizes(max_seqs, query.shape[1], max_pages, pool.page_size)
    mods, captured = over_pages(check, sizes, score_mod, mask_mod, query_positions, shared_seqs=False)
    if causal and tree_mask is None and traced_window is None:
        mods, sliding_window = as_window(mods, sliding_window)
    operands = Operands(
        query=query,
        key_cache=key_cache,
        **arrays,
        sliding_window=traced_window,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=None if tree_mask is None else tree_mask.astype(jnp.int8),
        query_positions=query_positions,
        out_scale=_output_scale(check, out_scale, out_dtype),
        captured=captured,
        mods=mods,
        layout=layout,
        scale=float(pool.head_dim**-0.5 if scale is None else scale),
        rules=Rules(sliding_window, softcap),
        causal=bool(causal),
        out_dtype=jnp.dtype(out_dtype),
    )
    return ready(operands)


def _output_scale(check: ArgumentChecker, scale: Any, dtype: Any) -> jax.Array | None:
    """float32 [1], for an fp8 output."""
    if scale is None:
        return None
    if dtype not in [jnp.dtype(d) for d in FP8_DTYPES]:
        check.fail("out_scale", f"None for an output of {dtype.name}", "a scale")
    if is_array(scale):
        check.array("out_scale", scale, (), [jnp.float32])
    elif not is_number(scale):
        check.fail("out_scale", "a number, a float32 scalar or None", shown(scale), TypeError)
    else:
        check.positive_float("out_scale", scale, optional=False)
    return jnp.asarray(scale, jnp.float32).reshape(1)


def _check_tree(check: ArgumentChecker, mask: Any, positions: Any, causal: Any) -> None:
    if mask is not None:
        check.array("tree_mask", mask, ("total_tokens", "max_tree"), [jnp.bool_])
        check.non_empty("tree_mask", mask)
        if not causal:
            check.fail("tree_mask", "None with causal=False", "an array")
    if positions is not None:
        check.array("query_positions", positions, ("total_tokens",), [jnp.int32])
        if mask is None:
            check.fail("query_positions", "None without 'tree_mask'", "an array")
