"""FlashMLA's two functions under their own names: same arguments in the same order, same shapes, same numbers."""

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.device import current_device
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn.ops.mla_decode.api import check_call, mla_decode
from pallas_attn.ops.mla_decode.schedule import (
    FIXED_OVERHEAD_BLOCKS,
    MLASchedule,
    mla_schedule,
    num_sm_parts,
)

# mla_decode's names in FlashMLA's words, for messages.
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
}


def get_mla_metadata(
    cache_seqlens: jax.Array, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[jax.Array, jax.Array]:
    """What `flash_mla_with_kvcache` needs to know of a step's lengths; runs on the device, inside jit.

    Args:
        cache_seqlens: [batch_size] int32.
        num_heads_per_head_k: query rows per KV head, seq_len_q * num_heads_q // num_heads_k.
        num_heads_k: KV heads.

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
    parts = num_sm_parts(num_heads_per_head_k, num_heads_k, current_device().num_cores)
    return mla_schedule(cache_seqlens, num_heads=1, num_parts=parts, overhead_blocks=FIXED_OVERHEAD_BLOCKS)


def flash_mla_with_kvcache(
    q: jax.Array,
    k_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    head_dim_v: int,
    tile_scheduler_metadata: jax.Array,
    num_splits: jax.Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`mla_decode` with FlashMLA's signature.

    Args:
        q: [batch_size, seq_len_q, num_heads_q, 576].
        k_cache: [num_blocks, page_block_size, num_heads_k, 576].
        block_table: [batch_size, max_num_blocks_per_seq] int32.
        cache_seqlens: [batch_size] int32.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: from `get_mla_metadata` for these lengths.
        softmax_scale: factor of the logits; None means 576 ** -0.5.
        causal: whether query token i sees only the tokens up to its own.
        implementation: as in `mla_decode`.

    Returns:
        out [batch_size, seq_len_q, num_heads_q, 512] in q's dtype, softmax_lse [batch_size, num_heads_q, seq_len_q]
        float32 (natural logarithm). A row that sees no token has out 0 and lse +inf, as in the original.

    Raises:
        TypeError, ValueError: as in `mla_decode`.

    Source: FlashMLA (DeepSeek, 2025).
    """
    schedule = MLASchedule(tile_scheduler_metadata, num_splits)
    check = ArgumentChecker("flash_mla_with_kvcache", SPELLED)
    check_call(check, q, k_cache, block_table, cache_seqlens, schedule, scale=softmax_scale, causal=causal)
    check.count("head_dim_v", head_dim_v)
    if head_dim_v != LATENT_DIM:
        check.fail("head_dim_v", str(LATENT_DIM), str(head_dim_v))
    dispatch.check_name(check.function, "mla_decode", implementation)
    out, lse = mla_decode(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        schedule=schedule,
        scale=softmax_scale,
        causal=causal,
        return_lse=True,
        implementation=implementation,
    )
    return out, jnp.where(jnp.isneginf(lse), jnp.inf, lse).swapaxes(1, 2)
