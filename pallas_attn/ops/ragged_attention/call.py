"""What the public functions of ragged attention have in common: checks, dispatch, the way to the kernel."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import configs, dispatch, partition
from pallas_attn._call.checks import ArgumentChecker, dtype_name, fail, is_array, is_number, shown
from pallas_attn._call.device import current_device
from pallas_attn._tile import options, quantization, triton
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn._tile.layout import DIMS, SCALE_DIMS, check_pools, handles, key_pool_shape
from pallas_attn._tile.masking import Rules
from pallas_attn._tile.problem import PagedCall
from pallas_attn._tile.quantization import FP8_DTYPES, QUANTIZED_DTYPES
from pallas_attn.ops.ragged_attention import cuda
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, heuristic
from pallas_attn.ops.ragged_attention.kernel import ragged_attention_pallas
from pallas_attn.ops.ragged_attention.reference import ragged_attention_xla
from pallas_attn.ops.ragged_attention.sources import Sources

MAX_HEAD_DIM = 256
LENS = ("seq_lens", "cu_q_lens", "num_seqs", "sliding_window")
ARRAYS = ("query", "key", "value", "key_cache", "value_cache", "block_tables", "out", "lse")


@dataclass(frozen=True, kw_only=True)
class Case(PagedCall):
    """What decides which implementation and which config can serve a call; `pool` is the keys'."""

    layout: str
    num_tokens: int
    value_dim: int
    dtype: Any
    cache_dtype: Any
    pool_elements: int
    """Of the larger pool."""
    tree_elements: int = 0
    """Of the mask."""
    out_dtype: Any = None
    """None: as `dtype`."""
    latent: bool = False
    """Keys are latents, whose first elements are values."""


def _supports(case: Case, lowering: triton.Lowering) -> str | None:
    for name, dim in () if case.latent else (("head_dim", case.pool.head_dim), ("value_dim", case.value_dim)):
        if dim > MAX_HEAD_DIM:
            return f"{name} is at most {MAX_HEAD_DIM}, got {dim}"
    out_elements = case.num_tokens * case.num_heads * case.value_dim
    return (
        handles("pools", case.pool_elements, case.cache_dtype, lowering)
        or handles("outputs", out_elements, case.out_dtype or case.dtype, lowering)
        or handles("tree masks", case.tree_elements, jnp.int8, lowering)
    )


def register(function: str) -> None:
    hopper = dispatch.Implementation(cuda.ragged_attention_cuda, cuda.unsupported, cuda.is_slower)
    dispatch.register(
        function,
        {
            "cuda": hopper,
            **triton.implementations(ragged_attention_pallas, _supports),
            "xla": dispatch.Implementation(functools.partial(ragged_attention_xla, function=function)),
        },
    )


def check_arrays(
    check: ArgumentChecker,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    layout: str,
) -> dict[str, jax.Array]:
    """The operands that every call has; binds their dimensions."""
    check.array("query", query, ("total_tokens", "num_heads", "head_dim"), options.DTYPES)
    dtypes = [query.dtype, *QUANTIZED_DTYPES]
    pool = check_pools(check, key_cache, value_cache, layout, dtypes, value_dim="value_dim")
    batch = check_batch(check, query, block_tables, seq_lens, cu_q_lens, num_seqs)
    check.non_empty("value_cache", value_cache)
    check.multiple("query", check.dims["num_heads"], "num_kv_heads", pool.num_kv_heads)
    return {**batch, "key_cache": key_cache, "value_cache": value_cache}


def check_batch(
    check: ArgumentChecker, query: Any, block_tables: Any, seq_lens: Any, cu_q_lens: Any, num_seqs: Any
) -> dict[str, jax.Array]:
    """The operands that say what each sequence asks; `query` is checked but for being empty."""
    check.array("block_tables", block_tables, ("max_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("max_seqs",), [jnp.int32])
    check.array("cu_q_lens", cu_q_lens, (check.dims["max_seqs"] + 1,), [jnp.int32])
    for name, array in (("query", query), ("block_tables", block_tables)):
        check.non_empty(name, array)
    counted = _num_seqs(check, num_seqs)
    check.not_descending("cu_q_lens", cu_q_lens, num_seqs)
    # Outside jit they may be numpy's.
    return {
        "query": jnp.asarray(query),
        "block_tables": jnp.asarray(block_tables),
        "seq_lens": jnp.asarray(seq_lens),
        "cu_q_lens": jnp.asarray(cu_q_lens),
        "num_seqs": counted,
    }


def _num_seqs(check: ArgumentChecker, num_seqs: Any) -> jax.Array:
    """int32 [1]"""
    most = check.dims["max_seqs"]
    if is_array(num_seqs) and num_seqs.shape in ((), (1,)):
        check.dtype_among("num_seqs", num_seqs, [jnp.int32])
        return jnp.asarray(num_seqs).reshape(1)
    if is_array(num_seqs):
        check.fail("num_seqs", "an int32 scalar or an array [1]", f"shape {list(num_seqs.shape)}")
    if num_seqs is not None:
        check.int_within("num_seqs", num_seqs, 0, most)
    return jnp.full(1, most if num_seqs is None else num_seqs, jnp.int32)


def run(
    check: ArgumentChecker,
    operands: dict[str, jax.Array],
    *,
    layout: str,
    op: str = "",
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
    return_lse: Any = False,
    implementation: Any = None,
    config: Any = None,
    **static: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Checks what else every call has and makes it; `static` goes to the implementation as it is.

    op: whose implementations serve, where that is not the function that is called.
    """
    function, op = check.function, op or check.function
    check.positive_float("scale", scale)
    softcap = options.softcap(check, softcap)
    check.flag("causal", causal)
    check.flag("return_lse", return_lse)
    key_cache = operands["key_cache"]
    window, traced_window = options.window(check, sliding_window)
    k_scale, v_scale = options.scales(
        check, key_cache.dtype, key_pool_shape(key_cache, layout), k_scale, v_scale
    )
    options_given = {
        "sliding_window": traced_window,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "alibi_slopes": options.by_head(check, "alibi_slopes", alibi_slopes),
        "sinks": options.by_head(check, "sinks", sinks),
        **_tree(check, tree_mask, query_positions, causal),
    }
    operands = operands | {name: array for name, array in options_given.items() if array is not None}
    case = _case(operands, layout, static.get("out_dtype"))
    name, fn = dispatch.resolve(op, case, implementation, operands)
    if name == "xla" and config is not None:
        fail(function, "config", "None for implementation 'xla'", "a config")
    configs.check_type(function, RaggedAttentionConfig, config)
    by_token = "tokens kv_heads dim"
    out, lse = partition.run(
        function,
        _attend,
        operands,
        {"query": "tokens heads dim", "key": by_token, "value": by_token, "out": "tokens heads dim",
         "lse": "tokens heads", **{f"{which}_cache": dims for which, dims in DIMS[layout].items()},
         "block_tables": "rows columns", "seq_lens": "rows", "cu_q_lens": "bounds", "num_seqs": "one",
         "out_scale": "one", "tree_mask": "tokens newest", "query_positions": "tokens",
         "alibi_slopes": "heads", "sinks": "heads", "sliding_window": "one",
         **{name: SCALE_DIMS[operands[name].ndim - 1] for name in ("k_scale", "v_scale") if name in operands}},
        ("tokens heads dim", "tokens heads"),
        static={
            "op": op,
            "fn": fn,
            "tiled": name != "xla",
            "scale": float(case.pool.head_dim**-0.5 if scale is None else scale),
            "layout": layout,
            "rules": Rules(window, softcap, None),
            "causal": bool(causal),
            "config": config,
            **static,
        },
        implementation=name,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def output_dtype(check: ArgumentChecker, query_dtype: Any, out_dtype: Any) -> Any:
    if out_dtype is not None:
        check.dtype("out_dtype", out_dtype, [query_dtype, *FP8_DTYPES])
    return jnp.dtype(query_dtype if out_dtype is None else out_dtype)


def output_scale(check: ArgumentChecker, scale: Any, dtype: Any) -> dict[str, jax.Array]:
    """float32 [1], for an fp8 output."""
    if scale is None:
        return {}
    if dtype not in [jnp.dtype(d) for d in FP8_DTYPES]:
        check.fail("out_scale", f"None for an output of {dtype.name}", "a scale")
    if is_array(scale):
        check.array("out_scale", scale, (), [jnp.float32])
    elif not is_number(scale):
        check.fail("out_scale", "a number, a float32 scalar or None", shown(scale), TypeError)
    else:
        check.positive_float("out_scale", scale, optional=False)
    return {"out_scale": jnp.asarray(scale, jnp.float32).reshape(1)}


def _tree(check: ArgumentChecker, mask: Any, positions: Any, causal: Any) -> dict[str, jax.Array]:
    """As the kernel takes them."""
    found = {}
    if mask is not None:
        check.array("tree_mask", mask, ("total_tokens", "max_tree"), [jnp.bool_])
        check.non_empty("tree_mask", mask)
        if not causal:
            check.fail("tree_mask", "None with causal=False", "an array")
        found["tree_mask"] = mask.astype(jnp.int8)
    if positions is not None:
        check.array("query_positions", positions, ("total_tokens",), [jnp.int32])
        if mask is None:
            check.fail("query_positions", "None without 'tree_mask'", "an array")
        found["query_positions"] = positions
    return found


def _case(operands: dict[str, jax.Array], layout: str, out_dtype: Any = None) -> Case:
    query, tables, values = (operands.get(name) for name in ("query", "block_tables", "value_cache"))
    assert query is not None
    assert tables is not None
    return Case(
        layout=layout,
        num_tokens=query.shape[0],
        num_seqs=tables.shape[0],
        num_heads=query.shape[1],
        max_pages=tables.shape[1],
        pool=key_pool_shape(operands["key_cache"], layout),
        value_dim=LATENT_DIM if values is None else values.shape[2 if layout == "PACKED" else 3],
        dtype=query.dtype,
        cache_dtype=operands["key_cache"].dtype,
        pool_elements=max(operands["key_cache"].size, 0 if values is None else values.size),
        latent=values is None,
        tree_elements=operands["tree_mask"].size if "tree_mask" in operands else 0,
        out_dtype=out_dtype,
    )


def _attend(
    operands: dict[str, jax.Array],
    *,
    op: str,
    fn,
    tiled: bool,
    layout: str,
    config: RaggedAttentionConfig | None,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the operands at hand: of the whole call, or of one device's share of the heads."""
    case = _case(operands, layout)
    if tiled:
        facts = {
            "page_scales": any(
                quantization.is_by_page(operands.get(name)) for name in ("k_scale", "v_scale")
            ),
            "tree": "tree_mask" in operands,
            "new_apart": "key" in operands,
        }
        static["config"] = _resolve_config(op, case, layout, config, **facts)
    new = (operands["key"], operands["value"]) if "key" in operands else None
    sources = Sources(operands["key_cache"], operands.get("value_cache"), operands["block_tables"], new)
    lens = {name: operands[name] for name in LENS if name in operands}
    extras = {name: array for name, array in operands.items() if name not in (*LENS, *ARRAYS)}
    kept = (operands["out"], operands["lse"]) if "out" in operands else None
    return fn(
        operands["query"], sources, lens, extras, kept, pool=case.pool, value_dim=case.value_dim, layout=layout,
        **static,
    )  # fmt: skip


def _resolve_config(
    op: str, case: Case, layout: str, explicit: RaggedAttentionConfig | None, **more: bool
) -> RaggedAttentionConfig:
    facts = dict(
        num_tokens=case.num_tokens,
        num_seqs=case.num_seqs,
        num_kv_heads=case.pool.num_kv_heads,
        group=case.group,
        head_dim=case.pool.head_dim,
        value_dim=case.value_dim,
        max_len=case.max_len,
        latent=case.latent,
    )
    key = {
        **facts,
        "page_size": case.pool.page_size,
        "dtype": dtype_name(case.cache_dtype),
        "query_itemsize": jnp.dtype(case.dtype).itemsize,
        "layout": layout,
        "streams": case.streams,
        # Of a sequence on the average; what each one asks for nobody knows when a call is compiled.
        "rows": -(-case.num_tokens // case.num_seqs) * case.group,
    }
    return configs.resolve(
        op,
        RaggedAttentionConfig,
        explicit,
        key,
        functools.partial(
            heuristic,
            **facts,
            itemsize=jnp.dtype(case.cache_dtype).itemsize,
            query_itemsize=jnp.dtype(case.dtype).itemsize,
            device=current_device(),
            **more,
        ),
    )
