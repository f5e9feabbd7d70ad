"""`paged_attention`: signature, checks, dispatch."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_attn import _config, _dispatch
from pallas_attn._checks import ArgumentChecker, dtype_name
from pallas_attn._device import current_device
from pallas_attn._types import BlockTables, KVCache, Layout, Lse, Query, SeqLens
from pallas_attn.ops.kv_cache.layout import LAYOUTS, PoolShape, cache_dims, pool_shape
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig, heuristic
from pallas_attn.ops.paged_attention.kernel import paged_attention_pallas
from pallas_attn.ops.paged_attention.reference import paged_attention_xla

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Case:
    """The static facts of a call that decide which implementation can serve it."""

    num_seqs: int
    num_heads: int
    max_pages: int
    pool: PoolShape
    dtype: Any


def _pallas_supports(case: Case) -> str | None:
    if case.pool.head_dim > MAX_HEAD_DIM:
        return f"head_dim is at most {MAX_HEAD_DIM}, got {case.pool.head_dim}"
    return None


_dispatch.register(
    "paged_attention",
    {
        "pallas": _dispatch.Implementation(paged_attention_pallas, _pallas_supports),
        "xla": _dispatch.Implementation(paged_attention_xla),
        "interpret": _dispatch.Implementation(
            functools.partial(paged_attention_pallas, interpret=True), _pallas_supports
        ),
    },
)


def paged_attention(
    query: Query,
    key_cache: KVCache,
    value_cache: KVCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "NHD",
    implementation: str | None = None,
    config: PagedAttentionConfig | None = None,
) -> Query | tuple[Query, Lse]:
    """Attention of one new token per sequence over the sequence's paged keys and values.

    Works inside jit, scan, while_loop and shard_map; lengths and tables are never read by the host, and the caches
    are never copied. Softmax and accumulation are float32; the same inputs and config give the same bits.

    Args:
        query: [num_seqs, num_heads, head_dim], bf16, fp16 or float32.
        key_cache, value_cache: pools in query's dtype, of `layout`
            "NHD" [num_pages, page_size, num_kv_heads, head_dim] or
            "HND" [num_pages, num_kv_heads, page_size, head_dim].
            num_heads is a multiple of num_kv_heads; query head h uses KV head h // (num_heads / num_kv_heads).
            Any page_size; head_dim up to 512 on the GPU. Slots at or beyond a sequence's length may hold anything.
        block_tables: [num_seqs, max_pages] int32, a sequence's pages in order. Entries beyond its last page may
            hold anything.
        seq_lens: [num_seqs] int32, tokens in each sequence's pages, the newest (the query's own) included.
            A length of 0 gives out 0 and lse -inf.
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        return_lse: also return the natural log-sum-exp of the scaled logits.
        layout: order of a page's dimensions.
        implementation: None (pallas on an NVIDIA GPU, xla elsewhere), "pallas" (sm_80 or newer), "xla" (anywhere,
            for debugging and CPUs) or "interpret" (the Pallas kernel run in Python, slow).
        config: tile sizes for "pallas" and "interpret"; None takes the measured or the heuristic one.

    Returns:
        out [num_seqs, num_heads, head_dim] in query's dtype; with return_lse, also lse [num_seqs, num_heads] float32.
        A page id in use outside [0, num_pages), or a length that is negative or beyond the table, gives NaN in that
        sequence's rows; nothing out of bounds is read.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023);
    split-KV after Dao et al., "Flash-Decoding" (2023).
    """
    check = ArgumentChecker("paged_attention")
    check.one_of("layout", layout, LAYOUTS)
    check.array("query", query, ("num_seqs", "num_heads", "head_dim"), DTYPES)
    check.array("key_cache", key_cache, cache_dims(layout), [query.dtype])
    check.array("value_cache", value_cache, cache_dims(layout), [query.dtype])
    check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
    for name, array in (("query", query), ("key_cache", key_cache), ("block_tables", block_tables)):
        check.non_empty(name, array)
    check.multiple("query", query.shape[1], "num_kv_heads", check.dims["num_kv_heads"])
    check.positive_float("scale", scale)

    pool = pool_shape(key_cache, layout)
    case = Case(query.shape[0], query.shape[1], block_tables.shape[1], pool, query.dtype)
    name, fn = _dispatch.resolve("paged_attention", case, implementation)
    if name != "xla":
        fn = functools.partial(fn, config=_resolve_config(case, config))
    elif config is not None:
        raise ValueError(
            "paged_attention: argument 'config': expected None for implementation 'xla', got a config"
        )
    out, lse = fn(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale=float(pool.head_dim**-0.5 if scale is None else scale),
        layout=layout,
    )
    return (out, lse) if return_lse else out


def _resolve_config(case: Case, explicit: Any) -> PagedAttentionConfig:
    group = case.num_heads // case.pool.num_kv_heads
    key = dict(
        head_dim=case.pool.head_dim, group=group, page_size=case.pool.page_size, dtype=dtype_name(case.dtype)
    )
    return _config.resolve(
        "paged_attention",
        PagedAttentionConfig,
        explicit,
        key,
        lambda: heuristic(
            num_seqs=case.num_seqs,
            num_kv_heads=case.pool.num_kv_heads,
            group=group,
            head_dim=case.pool.head_dim,
            itemsize=jnp.dtype(case.dtype).itemsize,
            max_len=case.max_pages * case.pool.page_size,
            device=current_device(),
        ),
    )
