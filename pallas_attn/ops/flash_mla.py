"""FlashMLA's functions under their own names: same arguments in the same order, same shapes, same numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.device import current_device
from pallas_attn._call.options import DTYPES
from pallas_attn._tile.latents import BYTES, LATENT_DIM
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.ops.mla_decode.api import check_call, mla_decode
from pallas_attn.ops.mla_decode.schedule import (
    FIXED_OVERHEAD_BLOCKS,
    MLASchedule,
    mla_schedule,
    num_sm_parts,
)
from pallas_attn.ops.sparse_mla.api import (
    check_decode,
    check_prefill,
    sparse_mla_decode,
    sparse_mla_prefill,
)

# mla_decode's argument names as FlashMLA calls them, for messages.
SPELLED = {
    "query": "q",
    "latent_cache": "k_cache",
    "block_tables": "block_table",
    "seq_lens": "cache_seqlens",
    "scale": "softmax_scale",
    "schedule": "tile_scheduler_metadata",
    "schedule.tile_scheduler_metadata": "tile_scheduler_metadata",
    "schedule.num_splits": "num_splits",
    "num_seqs": "batch_size",
    "q_len": "seq_len_q",
    "num_heads": "num_heads_q",
    "num_kv_heads": "num_heads_k",
    "num_pages": "num_blocks",
    "page_size": "page_block_size",
    "max_pages": "max_num_blocks_per_seq",
    "sinks": "attn_sink",
}
SPELLED_SPARSE = {
    "query": "q",
    "latents": "kv",
    "scale": "sm_scale",
    "sinks": "attn_sink",
    "num_tokens": "s_q",
    "num_kv_tokens": "s_kv",
    "num_heads": "h_q",
}


def get_mla_metadata(
    cache_seqlens: jax.Array,
    num_heads_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What `flash_mla_with_kvcache` needs to know of a step's lengths; runs on the device, inside jit.

    Args:
        cache_seqlens: [batch_size] int32.
        num_heads_per_head_k: query rows per KV head, seq_len_q * num_heads_q // num_heads_k.
        num_heads_k: KV heads.
        num_heads_q, is_fp8_kvcache, topk: of FlashMLA's function since it has sparse attention; ignored here, where fp8
            latents are scheduled as others, and ids need no metadata.

    Returns:
        tile_scheduler_metadata [num_sm_parts, 8] int32 and num_splits [batch_size + 1] int32, described in
        `MLASchedule`, which this pair is.

    Raises:
        TypeError, ValueError: cache_seqlens that are not an int32 vector with at least one entry; counts below 1.

    Source: FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("get_mla_metadata")
    check.array("cache_seqlens", cache_seqlens, ("batch_size",), [jnp.int32])
    check.non_empty("cache_seqlens", cache_seqlens)
    check.count("num_heads_per_head_k", num_heads_per_head_k)
    check.count("num_heads_k", num_heads_k)
    for name, count in (("num_heads_q", num_heads_q), ("topk", topk)):
        if count is not None:
            check.count(name, count)
    check.flag("is_fp8_kvcache", is_fp8_kvcache)
    parts = num_sm_parts(num_heads_per_head_k, num_heads_k, current_device().num_cores)
    return mla_schedule(cache_seqlens, num_heads=1, num_parts=parts, overhead_blocks=FIXED_OVERHEAD_BLOCKS)


def flash_mla_with_kvcache(
    q: jax.Array,
    k_cache: jax.Array,
    block_table: jax.Array | None,
    cache_seqlens: jax.Array | None,
    head_dim_v: int,
    tile_scheduler_metadata: jax.Array | None = None,
    num_splits: jax.Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    *,
    topk_length: jax.Array | None = None,
    implementation: ImplementationOrCuda | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`mla_decode`, or with `indices` `sparse_mla_decode`, with FlashMLA's signature.

    Args:
        q: [batch_size, seq_len_q, num_heads_q, 576]; bf16 with is_fp8_kvcache.
        k_cache: [num_blocks, page_block_size, num_heads_k, 576]; with is_fp8_kvcache [..., 656] uint8.
        block_table: [batch_size, max_num_blocks_per_seq] int32; with indices it is not used.
        cache_seqlens: [batch_size] int32; with indices it is not used.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: from `get_mla_metadata` for these lengths, or both None: then each call
            makes its own. With indices they are not used.
        softmax_scale: factor of the logits; None means 576 ** -0.5.
        causal: whether query token i sees only the tokens up to its own; False with indices.
        is_fp8_kvcache: whether k_cache is in the 656 bytes of `quantize_latents`.
        indices: [batch_size, seq_len_q, topk] int32, page * page_block_size + offset of the tokens that each query
            token attends to; -1 is skipped. Any topk.
        attn_sink: [num_heads_q] float32, with indices alone.
        topk_length: [batch_size] int32, with indices alone: how many of a sequence's ids count.
        implementation: as in `mla_decode`, or `sparse_mla_decode`.

    Returns:
        out [batch_size, seq_len_q, num_heads_q, 512] in q's dtype, softmax_lse [batch_size, num_heads_q, seq_len_q]
        float32 (natural logarithm). A row that sees no token has out 0 and lse +inf, as in the original; `merge_states`
        takes it, with its last two dimensions swapped, as [batch_size, seq_len_q, num_heads_q].

    Raises:
        TypeError, ValueError: as in `mla_decode`, or `sparse_mla_decode`.

    Source: FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("flash_mla_with_kvcache", SPELLED)
    check.count("head_dim_v", head_dim_v)
    if head_dim_v != LATENT_DIM:
        check.fail("head_dim_v", str(LATENT_DIM), str(head_dim_v))
    check.flag("is_fp8_kvcache", is_fp8_kvcache)
    if is_fp8_kvcache:
        check.dtype_among("query", q, [jnp.bfloat16])
    check.dtype_among("latent_cache", k_cache, [BYTES] if is_fp8_kvcache else DTYPES)
    if indices is None:
        for name, value in (("attn_sink", attn_sink), ("topk_length", topk_length)):
            if value is not None:
                check.fail(name, "None without indices", "an array")
        # None is an error here, which the check below reports.
        tables: Any = block_table
        lengths: Any = cache_seqlens
        metadata: Any = (tile_scheduler_metadata, num_splits)
        schedule = None if all(part is None for part in metadata) else MLASchedule(*metadata)
        check_call(check, q, k_cache, tables, lengths, schedule, scale=softmax_scale, causal=causal)
        dispatch.check_name(check.function, "mla_decode", implementation)
        out, lse = mla_decode(
            q,
            k_cache,
            tables,
            lengths,
            schedule=schedule,
            scale=softmax_scale,
            causal=causal,
            return_lse=True,
            implementation=implementation,
        )
    else:
        check.flag("causal", causal)
        if causal:
            check.fail("causal", "False with indices", "True")
        check_decode(check, q, k_cache, indices, "slots", None, topk_length, attn_sink, softmax_scale)
        dispatch.check_name(check.function, "sparse_mla_decode", implementation)
        out, lse = sparse_mla_decode(
            q,
            k_cache,
            indices,
            topk_length=topk_length,
            sinks=attn_sink,
            scale=softmax_scale,
            return_lse=True,
            implementation=implementation,
        )
    return out, jnp.where(jnp.isneginf(lse), jnp.inf, lse).swapaxes(1, 2)


def flash_mla_sparse_fwd(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    sm_scale: float,
    d_v: int = LATENT_DIM,
    attn_sink: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    *,
    implementation: ImplementationOrCuda | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`sparse_mla_prefill` with FlashMLA's signature.

    Args:
        q: [s_q, h_q, 576]. Any h_q.
        kv: [s_kv, 1, 576].
        indices: [s_q, 1, topk] int32; what is -1 or at least s_kv is skipped. Any topk.
        sm_scale: factor of the logits.
        d_v: 512.
        attn_sink: [h_q] float32 or None.
        topk_length: [s_q] int32 or None.
        implementation: as in `sparse_mla_prefill`.

    Returns:
        (out [s_q, h_q, 512] in q's dtype, max_logits [s_q, h_q], lse [s_q, h_q] float32), as `sparse_mla_prefill`; a
        row that sees no token has lse +inf and max_logits -inf; out and lse are what `merge_states` takes.

    Raises:
        TypeError, ValueError: as in `sparse_mla_prefill`.

    Source: FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("flash_mla_sparse_fwd", SPELLED_SPARSE)
    check.count("d_v", d_v)
    if d_v != LATENT_DIM:
        check.fail("d_v", str(LATENT_DIM), str(d_v))
    check_prefill(check, q, kv, indices, topk_length, attn_sink, sm_scale)
    dispatch.check_name(check.function, "sparse_mla_prefill", implementation)
    out, max_logits, lse = sparse_mla_prefill(
        q,
        kv,
        indices,
        topk_length=topk_length,
        sinks=attn_sink,
        scale=sm_scale,
        implementation=implementation,
    )
    return out, max_logits, jnp.where(jnp.isneginf(lse), jnp.inf, lse)
