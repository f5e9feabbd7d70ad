"""`ragged_paged_attention`: signature, checks, dispatch."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import configs, dispatch, partition
from pallas_attn._call.checks import ArgumentChecker, dtype_name, fail, is_array
from pallas_attn._call.device import current_device
from pallas_attn._tile import options
from pallas_attn._tile.layout import DIMS, PoolCase, PoolShape, check_pools, key_pool_shape, pallas_reaches
from pallas_attn._tile.masking import Rules
from pallas_attn._tile.quantization import QUANTIZED_DTYPES
from pallas_attn._types import KVCache, Layout
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, heuristic
from pallas_attn.ops.ragged_attention.kernel import ragged_attention_pallas
from pallas_attn.ops.ragged_attention.reference import ragged_attention_xla

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Case:
    """The static facts of a call that decide which implementation and which config can serve it."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    max_pages: int
    pool: PoolShape
    """Of the keys."""
    value_dim: int
    dtype: Any
    cache_dtype: Any

    @property
    def group(self) -> int:
        return self.num_heads // self.pool.num_kv_heads


def _pallas_supports(case: Case) -> str | None:
    for name, dim in (("head_dim", case.pool.head_dim), ("value_dim", case.value_dim)):
        if dim > MAX_HEAD_DIM:
            return f"{name} is at most {MAX_HEAD_DIM}, got {dim}"
    larger = case.pool._replace(head_dim=max(case.pool.head_dim, case.value_dim))
    return pallas_reaches(PoolCase(larger, case.cache_dtype))


dispatch.register(
    "ragged_paged_attention",
    {
        "pallas": dispatch.Implementation(ragged_attention_pallas, _pallas_supports),
        "xla": dispatch.Implementation(ragged_attention_xla),
        "interpret": dispatch.Implementation(
            functools.partial(ragged_attention_pallas, interpret=True), _pallas_supports
        ),
    },
)


def ragged_paged_attention(
    query: jax.Array,
    key_cache: KVCache,
    value_cache: KVCache,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    causal: bool = True,
    return_lse: bool = False,
    layout: Layout = "NHD",
    implementation: str | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's newest tokens, as many as each one has, over its paged keys and values.

    One call serves prompts, chunks of prompts, continued prompts and decoding, mixed in any way: the query tokens of
    all sequences lie end to end. Shapes are static, what they hold is not: how many sequences there are, and how many
    tokens each has, may change from call to call of one compiled function. Nothing is read by the host. Softmax and
    accumulation are float32; the same inputs and config give the same bits. All options combine. There are no
    gradients, but for "xla"'s.

    Args:
        query: [total_tokens, num_heads, head_dim], bf16, fp16 or float32; sequence i's newest tokens are
            query[cu_q_lens[i]:cu_q_lens[i + 1]], oldest first. Tokens behind the last sequence are padding and may
            hold anything; their out is 0 and their lse -inf.
        key_cache, value_cache: pools as of `paged_attention`, the new tokens' keys and values included, of `layout`
            "NHD", "HND" or "PACKED". num_heads is a multiple of num_kv_heads; values may be of another width than
            keys (value_dim), as in latent attention's 192 and 128. head_dim up to 256 on the GPU.
        block_tables: [max_seqs, max_pages] int32, a sequence's pages in order. Entries beyond its last page, and
            those of pages that no query sees (window), may hold anything.
        seq_lens: [max_seqs] int32, tokens in each sequence's pages, the new ones included. A query before the
            sequence's start (more query tokens than the length) has out 0 and lse -inf (with `sinks`, the head's sink,
            if the length is not 0).
        cu_q_lens: [max_seqs + 1] int32: where each sequence's query tokens begin, from 0, and where the last one's
            end; not decreasing, at most total_tokens. A sequence may have none.
        num_seqs: an int, an int32 scalar or an int32 array [1], which may be traced: how many sequences there are;
            rows of the tables and entries of the lengths behind them may hold anything. None: max_seqs.
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); a number above 0, or None.
        sliding_window: each query sees keys whose position is more than its own less `sliding_window`; an int >= 1, an
            int32 scalar that may be traced (below 1 it counts as 1), or None. Tiles outside are not read.
        alibi_slopes: [num_heads]; slope * (key position - query position) is added after the soft cap.
        sinks: [num_heads]; a logit without a value that joins each head's softmax (and its lse).
        k_scale, v_scale: for quantised caches, scalar or [num_kv_heads] float32 above 0: value = stored * scale; None
            is 1. Pallas multiplies fp8 keys with a bf16 query in fp16, where query elements beyond 65504 saturate.
        causal: whether a query sees no key behind its own position; False lets it see the whole sequence.
        return_lse: also return the natural log-sum-exp of the logits, to merge with other parts (`merge_states`).
        layout: order of a page's dimensions.
        implementation: None (pallas on an NVIDIA GPU, xla elsewhere), "pallas" (sm_80 or newer; e4m3 from sm_89),
            "xla" (anywhere, for debugging and CPUs) or "interpret" (the Pallas kernel run in Python, slow).
        config: tile sizes for "pallas" and "interpret"; None takes the measured or the heuristic one.

    Returns:
        out [total_tokens, num_heads, value_dim] in query's dtype; with return_lse, also lse [total_tokens, num_heads],
        float32. A page id in use outside [0, num_pages), or a length that is negative or beyond the table, gives NaN
        in the rows that would need it, at most in that sequence's; nothing out of bounds is read.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Sharded over a mesh, outside shard_map, a call is partitioned over heads. A pool that would have to move is a
    ValueError (see `paged_attention`).

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023);
    chunked prefill as in vLLM's Triton prefix_prefill; Dao, "FlashAttention-2" (2023).
    """
    check = ArgumentChecker("ragged_paged_attention")
    check.array("query", query, ("total_tokens", "num_heads", "head_dim"), options.DTYPES)
    pool = check_pools(
        check, key_cache, value_cache, layout, [query.dtype, *QUANTIZED_DTYPES], value_dim="value_dim"
    )
    check.array("block_tables", block_tables, ("max_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("max_seqs",), [jnp.int32])
    check.array("cu_q_lens", cu_q_lens, (check.dims["max_seqs"] + 1,), [jnp.int32])
    for name, array in (("query", query), ("block_tables", block_tables)):
        check.non_empty(name, array)
    check.multiple("query", check.dims["num_heads"], "num_kv_heads", pool.num_kv_heads)
    check.positive_float("scale", scale)
    check.positive_float("softcap", softcap)
    for name, value in (("causal", causal), ("return_lse", return_lse)):
        check.flag(name, value)
    static_window, operands = options.window(check, sliding_window)
    operands |= options.scales(check, key_cache.dtype, pool, k_scale, v_scale)
    operands |= options.by_head(check, alibi_slopes=alibi_slopes, sinks=sinks)
    operands = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "cu_q_lens": cu_q_lens,
        "num_seqs": _num_seqs(check, num_seqs),
        **operands,
    }
    name, fn = dispatch.resolve("ragged_paged_attention", _case(operands, layout), implementation)
    if name == "xla" and config is not None:
        fail(check.function, "config", "None for implementation 'xla'", "a config")
    configs.check_type(check.function, RaggedAttentionConfig, config)
    out, lse = partition.run(
        check.function,
        _attend,
        operands,
        {"query": "tokens heads dim", **{f"{which}_cache": dims for which, dims in DIMS[layout].items()},
         "block_tables": "rows columns", "seq_lens": "rows", "cu_q_lens": "bounds", "num_seqs": "one",
         **options.DIMS},
        ("tokens heads dim", "tokens heads"),
        static={
            "fn": fn,
            "tiled": name != "xla",
            "scale": float(pool.head_dim**-0.5 if scale is None else scale),
            "layout": layout,
            "rules": Rules(static_window, None if softcap is None else float(softcap), None),
            "causal": bool(causal),
            "config": config,
        },
        implementation=name,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _num_seqs(check: ArgumentChecker, num_seqs: Any) -> jax.Array:
    """int32 [1]"""
    most = check.dims["max_seqs"]
    if num_seqs is None:
        return jnp.full(1, most, jnp.int32)
    if is_array(num_seqs) and num_seqs.shape in ((), (1,)):
        check.dtype_among("num_seqs", num_seqs, [jnp.int32])
        return jnp.asarray(num_seqs).reshape(1)
    if is_array(num_seqs):
        check.fail("num_seqs", "an int32 scalar or an array [1]", f"shape {list(num_seqs.shape)}")
    check.int_within("num_seqs", num_seqs, 0, most)
    return jnp.full(1, num_seqs, jnp.int32)


def _case(operands: dict[str, jax.Array], layout: Layout) -> Case:
    query, tables = operands["query"], operands["block_tables"]
    pool = key_pool_shape(operands["key_cache"], layout)
    value_dim = operands["value_cache"].shape[2 if layout == "PACKED" else 3]
    return Case(
        query.shape[0], tables.shape[0], query.shape[1], tables.shape[1], pool, value_dim, query.dtype,
        operands["key_cache"].dtype,
    )  # fmt: skip


def _attend(
    operands: dict[str, jax.Array],
    *,
    fn,
    tiled: bool,
    layout: Layout,
    config: RaggedAttentionConfig | None,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the operands at hand: of the whole call, or of one device's share of the heads."""
    case = _case(operands, layout)
    if tiled:
        static["config"] = _resolve_config(case, config)
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_q_lens", "num_seqs")
    extras = {name: array for name, array in operands.items() if name not in names}
    arrays = (operands[name] for name in names)
    return fn(*arrays, extras, pool=case.pool, value_dim=case.value_dim, layout=layout, **static)


def _resolve_config(case: Case, explicit: RaggedAttentionConfig | None) -> RaggedAttentionConfig:
    facts = dict(
        num_tokens=case.num_tokens,
        num_seqs=case.num_seqs,
        num_kv_heads=case.pool.num_kv_heads,
        group=case.group,
        head_dim=case.pool.head_dim,
        value_dim=case.value_dim,
        max_len=case.max_pages * case.pool.page_size,
    )
    key = {**facts, "page_size": case.pool.page_size, "dtype": dtype_name(case.cache_dtype)}
    return configs.resolve(
        "ragged_paged_attention",
        RaggedAttentionConfig,
        explicit,
        key,
        functools.partial(
            heuristic,
            **facts,
            itemsize=jnp.dtype(case.cache_dtype).itemsize,
            query_itemsize=jnp.dtype(case.dtype).itemsize,
            device=current_device(),
        ),
    )
