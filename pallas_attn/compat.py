"""Functions of other libraries under their own names and with their own arguments, for code that comes from there.

They convert arguments and results, nothing else; no pool is copied. Arguments that only size another kernel's tiles are
not taken, and what has no counterpart here is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker, brief, is_number
from pallas_attn._tile import options
from pallas_attn._tile.quantization import QUANTIZED_DTYPES
from pallas_attn.ops.paged_attention import paged_attention as _paged_attention
from pallas_attn.ops.ragged_attention import call

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
    num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
    batch_size, num_heads, _ = q.shape
    check.multiple("q", num_heads, "num_kv_heads", num_kv_heads)
    if lengths is None:
        lengths = jnp.full(batch_size, block_tables.shape[1] * page_size, jnp.int32)
    check.array("lengths", lengths, ("batch_size",), [jnp.int32])
    for name, scales in (("k_scales_pages", k_scales_pages), ("v_scales_pages", v_scales_pages)):
        if scales is not None:
            check.fail(name, "None (scales here are one for a KV head)", "scales")
    _check_mask_value(check, mask_value)
    options.softcap(check, attn_logits_soft_cap)

    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    usable = (block_tables >= 0) & (block_tables < num_pages)
    # [batch_size, num_kv_heads, pages_per_sequence]; what is no page of this head is no page at all
    tables = jnp.where(usable[:, None], block_tables[:, None] + head * num_pages, -1)
    pool = (num_kv_heads * num_pages, page_size, 1, head_dim)
    out = _paged_attention(
        q.reshape(batch_size * num_kv_heads, num_heads // num_kv_heads, head_dim),
        k_pages.reshape(pool),
        v_pages.reshape(pool),
        tables.reshape(batch_size * num_kv_heads, -1),
        jnp.repeat(lengths, num_kv_heads),
        scale=1.0,
        softcap=attn_logits_soft_cap,
    )
    return out.reshape(q.shape)


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
    for name, array in (("query", q), ("key_cache", kv_pages), ("block_tables", page_indices)):
        check.non_empty(name, array)
    combined = check.dims["num_combined_kv_heads"]
    check.multiple("key_cache", combined, "keys and values", 2)
    check.multiple("query", check.dims["num_q_heads"], "num_kv_heads", combined // 2)
    if mask_value is not None:
        _check_mask_value(check, mask_value)
    out = call.run(
        check,
        {
            "query": q,
            "key_cache": kv_pages,
            "value_cache": kv_pages,
            "block_tables": page_indices,
            "seq_lens": kv_lens,
            "cu_q_lens": cu_q_lens,
            "num_seqs": num_seqs,
        },
        op="ragged_paged_attention",
        scale=sm_scale,
        softcap=soft_cap,
        sliding_window=sliding_window,
        k_scale=k_scale,
        v_scale=v_scale,
        layout="COMBINED",
    )
    assert isinstance(out, jax.Array)
    return out


def _check_mask_value(check: ArgumentChecker, value: Any) -> None:
    if not is_number(value):
        check.fail("mask_value", "a number", type(value).__name__, TypeError)
    if value != DEFAULT_MASK_VALUE:
        check.fail("mask_value", f"the default ({DEFAULT_MASK_VALUE})", brief(value))
