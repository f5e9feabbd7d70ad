"""Functions of other libraries under their own names and with their own arguments, for code that comes from there.

They convert arguments and results, nothing else; no pool is copied. Arguments that only size another kernel's tiles are
not taken, and what has no counterpart here is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import options, partition
from pallas_attn._call.checks import ArgumentChecker, brief, is_number
from pallas_attn._call.operands import dims, operands, ready
from pallas_attn._call.pools import QUANTIZED_DTYPES
from pallas_attn._tile.layout import moved
from pallas_attn._types import Array
from pallas_attn.ops.paged_attention import paged_attention as _paged_attention
from pallas_attn.ops.ragged_attention import arguments
from pallas_attn.ops.ragged_attention.api import OP as RAGGED
from pallas_attn.ops.ragged_attention.blocks import Ragged

DEFAULT_MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    mask_value: float = DEFAULT_MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """`jax.experimental.pallas.ops.gpu.paged_attention.paged_attention`, which JAX has deprecated.

    Each KV head's pages, which lie apart there, are the pages of a sequence with one head here.

    Args:
        q: [batch_size, num_heads, head_dim]: bf16, fp16 or float32. Logits are q @ k as they are: scale q beforehand.
        k_pages, v_pages: [num_kv_heads, total_num_pages, page_size, head_dim] in q's dtype.
        block_tables: [batch_size, pages_per_sequence] int32.
        lengths: [batch_size] int32; None: every page of the tables is full.
        k_scales_pages, v_scales_pages: None; scales of single tokens have no counterpart here.
        mask_value: the default; masked logits are left out here, so a sequence of length 0 gives 0.
        attn_logits_soft_cap: as `softcap` of `pallas_attn.paged_attention`.

    Returns:
        [batch_size, num_heads, head_dim] in q's dtype.

    Raises:
        TypeError: an argument of the wrong dtype.
        ValueError: a wrong shape or value, or one without a counterpart.
    """
    check = ArgumentChecker("compat.paged_attention", {"softcap": "attn_logits_soft_cap"})
    check.array("q", q, ("batch_size", "num_heads", "head_dim"), options.DTYPES)
    pages = ("num_kv_heads", "total_num_pages", "page_size", "head_dim")
    check.array("k_pages", k_pages, pages, [q.dtype])
    check.array("v_pages", v_pages, pages, [q.dtype])
    check.array("block_tables", block_tables, ("batch_size", "pages_per_sequence"), [jnp.int32])
    for name, array in (("q", q), ("k_pages", k_pages), ("block_tables", block_tables)):
        check.non_empty(name, array)
    check.multiple("q", q.shape[1], "num_kv_heads", k_pages.shape[0])
    if lengths is None:
        lengths = jnp.full(q.shape[0], block_tables.shape[1] * k_pages.shape[2], jnp.int32)
    check.array("lengths", lengths, ("batch_size",), [jnp.int32])
    for name, scales in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scales is not None:
            check.fail(name, "None (scales here are one for a KV head)", "scales")
    _check_mask_value(check, mask_value)
    options.softcap(check, attn_logits_soft_cap)

    given = _ByHead(
        query=q, key_cache=k_pages, value_cache=v_pages, block_tables=block_tables, seq_lens=lengths
    )
    static = {"softcap": attn_logits_soft_cap}
    (out,) = partition.divide(
        check.function, _attend_by_head, ready(given), ("seqs heads dim",), static=static
    )
    return out


@operands
class _ByHead:
    query: Array = dims("seqs heads dim")
    key_cache: Array = dims("kv_heads pages slot dim")
    value_cache: Array = dims("kv_heads pages slot dim")
    block_tables: Array = dims("seqs columns")
    seq_lens: Array = dims("seqs")


def _attend_by_head(given: _ByHead, *, softcap: float | None) -> tuple[jax.Array]:
    """A pool that has its heads in front, as one of as many sequences for each of them."""
    query, block_tables = given.query, given.block_tables
    num_kv_heads, num_pages, page_size, head_dim = given.key_cache.shape
    batch_size, num_heads, _ = query.shape
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    usable = (block_tables >= 0) & (block_tables < num_pages)
    # [batch_size, num_kv_heads, pages_per_sequence]; what is no page of this head is no page at all
    tables = jnp.where(usable[:, None], block_tables[:, None] + head * num_pages, -1)
    pool = (num_kv_heads * num_pages, page_size, 1, head_dim)
    out = _paged_attention(
        query.reshape(batch_size * num_kv_heads, num_heads // num_kv_heads, head_dim),
        given.key_cache.reshape(pool),
        given.value_cache.reshape(pool),
        tables.reshape(batch_size * num_kv_heads, -1),
        jnp.repeat(given.seq_lens, num_kv_heads),
        scale=1.0,
        softcap=softcap,
    )
    return (out.reshape(query.shape),)


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> jax.Array:
    """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, on an NVIDIA GPU.

    Args:
        q: [max_num_batched_tokens, num_q_heads, head_dim]: bf16, fp16 or float32.
        kv_pages: [total_num_pages, page_size, num_combined_kv_heads, head_dim], in which keys and values take turns:
            head 2 * h holds the keys of KV head h, head 2 * h + 1 its values. In q's dtype, or quantised.
        kv_lens, page_indices, cu_q_lens, num_seqs: `seq_lens`, `block_tables`, `cu_q_lens` and `num_seqs` (here [1]) of
            `pallas_attn.ragged_paged_attention`.
        sm_scale: factor of the logits; the default is 1.
        sliding_window, k_scale, v_scale: as there. soft_cap: `softcap`.
        mask_value: the default or None; masked logits are left out here.

    Returns:
        [max_num_batched_tokens, num_q_heads, head_dim] in q's dtype; 0 behind the last sequence.

    Raises:
        TypeError: an argument of the wrong dtype.
        ValueError: a wrong shape or value, or one without a counterpart.
    """
    spelled = {
        "query": "q", "key_cache": "kv_pages", "seq_lens": "kv_lens", "block_tables": "page_indices",
        "scale": "sm_scale", "softcap": "soft_cap",
    }  # fmt: skip
    check = ArgumentChecker("compat.ragged_paged_attention", spelled)
    check.array("query", q, ("max_num_batched_tokens", "num_q_heads", "head_dim"), options.DTYPES)
    pages = ("total_num_pages", "page_size", "num_combined_kv_heads", "head_dim")
    check.array("key_cache", kv_pages, pages, [q.dtype, *QUANTIZED_DTYPES])
    check.array("block_tables", page_indices, ("max_num_seqs", "pages_per_seq"), [jnp.int32])
    check.array("seq_lens", kv_lens, ("max_num_seqs",), [jnp.int32])
    check.array("cu_q_lens", cu_q_lens, (check.dims["max_num_seqs"] + 1,), [jnp.int32])
    check.array("num_seqs", num_seqs, (1,), [jnp.int32])
    check.not_descending("cu_q_lens", cu_q_lens, num_seqs)
    for name, array in (("query", q), ("key_cache", kv_pages), ("block_tables", page_indices)):
        check.non_empty(name, array)
    combined = check.dims["num_combined_kv_heads"]
    check.multiple("key_cache", combined, "keys and values", 2)
    check.multiple("query", check.dims["num_q_heads"], "num_kv_heads", combined // 2)
    if mask_value is not None:
        _check_mask_value(check, mask_value)
    made = arguments.made(
        check,
        query=q,
        key_cache=kv_pages,
        value_cache=kv_pages,
        block_tables=page_indices,
        seq_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        scale=sm_scale,
        softcap=soft_cap,
        sliding_window=sliding_window,
        k_scale=k_scale,
        v_scale=v_scale,
        out_dtype=q.dtype,
        layout="COMBINED",
    )
    out, _ = RAGGED.serve(made, implementation=None)
    return out


def ragged_paged_attention_v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ragged_paged_attention` of tpu-inference (`kernels.ragged_paged_attention.v3`), on an NVIDIA GPU: writes the new
    tokens' keys and values, and attends to what the pages then hold.

    Args:
        queries: [max_num_tokens, num_q_heads, head_dim]: bf16, fp16 or float32.
        keys, values: [max_num_tokens, num_kv_heads, head_dim] in the cache's dtype.
        kv_cache: [total_num_pages, page_size, combined // packing, packing, padded_head_dim], in which keys and values
            take turns (head 2 * h holds the keys of KV head h, head 2 * h + 1 its values), head_dim is padded to a
            multiple of 128 and packing is how many elements 32 bits hold. In the queries' dtype, or fp8. It is read as
            it lies; donate it to the surrounding ``jax.jit``, or the write copies it.
        kv_lens: [max_num_seqs] int32, these tokens included.
        page_indices: [max_num_seqs * pages_per_seq] int32, row after row.
        cu_q_lens: [max_num_seqs + 1] int32; where a traced one descends no token is anyone's, and nothing is written.
        distribution: [3] int32, of which the last is the number of sequences; the kernel here needs no more.
        use_causal_mask: False: every query sees all of its sequence, window or not.
        update_kv_cache: False: the pages hold these tokens already; `keys` and `values` are not looked at.
        skip_kv_mask: False.
        sm_scale: factor of the logits; the default is 1.
        sliding_window, soft_cap: as in `pallas_attn.ragged_paged_attention`.
        out_dtype: None: float32 for float32 queries, else bf16.
        mask_value: None, or the default of the other function; masked logits are left out here.
        q_scale: None; queries are not quantised here.
        k_scale, v_scale: a stored element times it is a key's, or a value's.

    Returns:
        ([max_num_tokens, num_q_heads, head_dim] in out_dtype, 0 behind the last sequence; the updated cache).

    Raises:
        TypeError: an argument of the wrong dtype.
        ValueError: a wrong shape or value, or one without a counterpart.
    """
    spelled = {
        "query": "queries", "key": "keys", "value": "values", "key_cache": "kv_cache", "seq_lens": "kv_lens",
        "scale": "sm_scale", "softcap": "soft_cap",
    }  # fmt: skip
    check = ArgumentChecker("compat.ragged_paged_attention_v3", spelled)
    check.array("query", queries, ("max_num_tokens", "num_q_heads", "head_dim"), options.DTYPES)
    pages = ("total_num_pages", "page_size", "combined // packing", "packing", "padded_head_dim")
    check.array("key_cache", kv_cache, pages, [queries.dtype, *QUANTIZED_DTYPES])
    new = ("max_num_tokens", "num_kv_heads", "head_dim")
    check.array("key", keys, new, [kv_cache.dtype])
    check.array("value", values, new, [kv_cache.dtype])
    check.array("seq_lens", kv_lens, ("max_num_seqs",), [jnp.int32])
    check.array("page_indices", page_indices, ("max_num_seqs * pages_per_seq",), [jnp.int32])
    check.array("cu_q_lens", cu_q_lens, (check.dims["max_num_seqs"] + 1,), [jnp.int32])
    check.array("distribution", distribution, (3,), [jnp.int32])
    check.not_descending("cu_q_lens", cu_q_lens, distribution[2])
    for name, array in (("query", queries), ("key_cache", kv_cache), ("page_indices", page_indices)):
        check.non_empty(name, array)
    for name, value in (("use_causal_mask", use_causal_mask), ("update_kv_cache", update_kv_cache)):
        check.flag(name, value)
    if skip_kv_mask is not False:
        check.fail("skip_kv_mask", "False", repr(skip_kv_mask))
    if q_scale is not None:
        check.fail("q_scale", "None (queries are not quantised here)", brief(q_scale))
    if mask_value is not None:
        _check_mask_value(check, mask_value)
    for name, value in (("sm_scale", sm_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        check.positive_float(name, value, optional=name != "sm_scale")
    num_seqs, (num_heads, head_dim) = kv_lens.shape[0], queries.shape[1:]
    num_pages, page_size, parts, packing, padded = kv_cache.shape
    num_kv_heads, combined = keys.shape[1], parts * packing
    check.multiple("page_indices", page_indices.shape[0], "max_num_seqs", num_seqs)
    check.multiple("query", num_heads, "num_kv_heads", num_kv_heads)
    wanted = -(-2 * num_kv_heads // packing) * packing
    if packing != 4 // kv_cache.dtype.itemsize or combined != wanted or padded != -(-head_dim // 128) * 128:
        packing = 4 // kv_cache.dtype.itemsize
        shape = (-(-2 * num_kv_heads // packing), packing, -(-head_dim // 128) * 128)
        check.fail(
            "key_cache", f"pages of shape [page_size, {str(list(shape))[1:]}", str(list(kv_cache.shape))
        )

    tables = page_indices.reshape(num_seqs, -1)
    pool = kv_cache.reshape(num_pages, page_size, combined, padded)
    if update_kv_cache:
        counted = Ragged(queries.shape[0], num_seqs, 1).num_of(jnp.asarray(cu_q_lens), distribution[2:])
        pool = _with_new(pool, keys, values, kv_lens, tables, cu_q_lens, counted)
    # Heads that only fill up a word have queries of their own, which nobody looks at.
    group, pad = num_heads // num_kv_heads, combined // 2 - num_kv_heads
    made = arguments.made(
        check,
        query=jnp.pad(queries, ((0, 0), (0, pad * group), (0, padded - head_dim))),
        key_cache=pool,
        value_cache=pool,
        block_tables=tables,
        seq_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=distribution[2:],
        scale=sm_scale * (1.0 if k_scale is None else k_scale),
        softcap=soft_cap,
        sliding_window=sliding_window if use_causal_mask else None,
        causal=use_causal_mask,
        out_dtype=queries.dtype,
        layout="COMBINED",
    )
    out, _ = RAGGED.serve(made, implementation=None)
    if out_dtype is None:
        out_dtype = jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16
    out = out[:, :num_heads, :head_dim].astype(out_dtype)
    return out if v_scale is None else out * v_scale, pool.reshape(kv_cache.shape)


def _with_new(pool, keys, values, kv_lens, tables, cu_q_lens, num_seqs) -> jax.Array:
    """The pool [pages, page_size, combined, padded_head_dim] with the last tokens of each sequence in it; those of a
    page that is none go nowhere."""
    (num_pages, page_size, combined, padded), (num_tokens, num_kv_heads, head_dim) = pool.shape, keys.shape
    both = jnp.stack([keys, values], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    both = jnp.pad(both, ((0, 0), (0, combined - 2 * num_kv_heads), (0, padded - head_dim)))
    token, last = jnp.arange(num_tokens), kv_lens.shape[0] - 1
    ends = jnp.where(jnp.arange(kv_lens.shape[0]) < num_seqs, cu_q_lens[1:], cu_q_lens[num_seqs])
    row = jnp.minimum((token[:, None] >= ends).sum(axis=1), last)
    position = kv_lens[row] - (ends[row] - token)
    column = position // page_size
    page = tables[row, jnp.clip(column, 0, tables.shape[1] - 1)]
    owned = (token < cu_q_lens[num_seqs]) & (position >= 0) & (column < tables.shape[1])
    owned &= (page >= 0) & (page < num_pages)
    page = jnp.where(owned, page, num_pages)  # beyond the pool, which drops it
    at = page, position % page_size
    return moved(lambda pool, new: pool.at[at].set(new, mode="drop"), pool, both)


def _check_mask_value(check: ArgumentChecker, value: Any) -> None:
    if not is_number(value):
        check.fail("mask_value", "a number", type(value).__name__, TypeError)
    if value != DEFAULT_MASK_VALUE:
        check.fail("mask_value", f"the default ({DEFAULT_MASK_VALUE})", brief(value))
