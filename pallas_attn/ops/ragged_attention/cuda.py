"""Prompts over pages on Hopper, and sequences that are decoded beside them: the CUDA kernel of csrc/attention. Of some
calls decoded sequences are left to the Pallas kernel's short launch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_attn._call import hopper_forward, hopper_widen
from pallas_attn._call.pools import is_quantized
from pallas_attn._tile import quantization, triton
from pallas_attn.mods.operands import refused_by_cuda
from pallas_attn.ops.ragged_attention import kernel
from pallas_attn.ops.ragged_attention.blocks import Ragged
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.operands import Operands

NARROW_HEADS = 64
"""For heads up to this width exponentials take as long as products, and Pallas' kernel is as fast."""
STANDBY_HEADS = 128
"""For heads up to this width warpgroups of the CUDA kernel stand by in tiles in which they have no rows."""


def unsupported(operands: Operands) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    if operands.value_cache is None:
        return "serves keys and values of their own, and these are latents"
    if operands.tree_mask is not None:
        return "has no tree_mask"
    if (reason := refused_by_cuda(operands.mods)) is not None:
        return reason
    if operands.layout == "PACKED":
        return "needs layout 'NHD' or 'HND', got 'PACKED'"
    dtype, sizes = operands.query.dtype, operands.sizes
    if operands.out_dtype != dtype:
        return f"needs outputs of query's dtype, {dtype.name}, got {operands.out_dtype.name}"
    dims = operands.pool.head_dim, operands.value_dim
    return hopper_forward.unsupported(dtype, *dims, sizes.group, sizes.num_seqs, operands.key_cache.dtype)


def is_slower(operands: Operands) -> bool:
    """Whether Pallas is known to be as fast, for narrow heads and where all sequences are decoded, or was not timed
    beside it, for 8-bit caches of wide heads or beside new tokens."""
    widest = max(operands.pool.head_dim, operands.value_dim)
    rare = widest > STANDBY_HEADS or operands.key is not None
    all_decode = operands.query.shape[0] <= operands.sizes.num_seqs
    return widest <= NARROW_HEADS or (rare and is_quantized(operands.key_cache.dtype)) or all_decode


def leaves_decoded(operands: Operands) -> bool:
    """Whether decoded sequences are left to Pallas. One launch for all takes less time, but for heads so wide that no
    warpgroup of the CUDA kernel stands by while another has the few rows of such a sequence, and for caches whose bytes
    it would convert for them."""
    wide = max(operands.pool.head_dim, operands.value_dim) > STANDBY_HEADS
    return wide or is_quantized(operands.key_cache.dtype)


def widened_tokens(operands: Operands, config: RaggedAttentionConfig) -> int:
    """For how many tokens of an 8-bit cache there is room in 16 bits (hopper_widen.py); 0: none is widened. Scales by
    page would have to be multiplied in, and new tokens beside pages copied."""
    by_page = any(map(quantization.is_by_page, (operands.k_scale, operands.v_scale)))
    if not is_quantized(operands.key_cache.dtype) or by_page or operands.key is not None:
        return 0
    sizes = operands.sizes
    return hopper_widen.room(
        config.widened_bytes,
        kv_heads=operands.pool.num_kv_heads,
        dims=operands.pool.head_dim + operands.value_dim,
        query_tokens=operands.query.shape[0],
        group=sizes.group,
        num_seqs=sizes.num_seqs,
        max_len=sizes.max_len,
    )


@functools.partial(jax.jit, static_argnames="config")
def ragged_attention_cuda(
    operands: Operands, *, config: RaggedAttentionConfig
) -> tuple[jax.Array, jax.Array]:
    """As `kernel.ragged_attention_pallas`, of what `unsupported` leaves."""
    rules, sizes, kept = operands.rules, operands.sizes, None
    everywhere = jnp.full(1, -1, jnp.int32)
    left = everywhere
    if operands.sliding_window is not None:
        left = operands.sliding_window - 1
    elif rules.sliding_window is not None:
        left = jnp.full(1, rules.sliding_window - 1, jnp.int32)
    ragged = Ragged(operands.query.shape[0], sizes.num_seqs, 1)
    num_seqs = ragged.num_of(operands.cu_q_lens, operands.num_seqs)[None]
    operands = dataclasses.replace(operands, num_seqs=num_seqs)
    assert operands.value_cache is not None
    new = None
    if operands.key is not None and operands.value is not None:
        new = operands.key[None], operands.value[None]
    if operands.out is not None and operands.lse is not None:
        kept = operands.out[None], operands.lse[None]
    short = config.short if leaves_decoded(operands) else None
    window = jnp.concatenate([left, jnp.zeros(1, jnp.int32) if operands.causal else everywhere])
    attend = functools.partial(
        hopper_forward.forward,
        operands.query[None],
        window=window,
        scale=jnp.full(1, operands.scale, jnp.float32),
        softcap=rules.softcap,
        sinks=operands.sinks,
        alibi_slopes=operands.alibi_slopes,
        key_scale=operands.k_scale,
        value_scale=operands.v_scale,
        ends_aligned=True,
    )
    sequences = hopper_forward.Sequences(
        q_bounds=operands.cu_q_lens,
        block_tables=operands.block_tables,
        seq_lens=operands.seq_lens,
        num_seqs=num_seqs,
        new=new,
    )
    heads_first = operands.layout == "HND"
    if (tokens := widened_tokens(operands, config)) > 0:
        rows = hopper_widen.widen(
            operands.key_cache,
            operands.value_cache,
            sequences,
            window=window,
            dtype=operands.query.dtype,
            tokens=tokens,
            query_tokens=operands.query.shape[0],
            group=sizes.group,
            heads_first=heads_first,
        )
        out, lse = attend(rows.key, rows.value, rows.sequences, key_heads_first=True, kept=kept)
        kept = out, lse
        sequences = dataclasses.replace(sequences, taken=rows.taken)
    out, lse = attend(
        operands.key_cache,
        operands.value_cache,
        sequences,
        key_heads_first=heads_first,
        skip_rows=max(short.block_q if short else 0, sizes.group if operands.skip_decode else 0),
        kept=kept,
    )
    operands = dataclasses.replace(operands, out=out[0], lse=lse[0])
    # A decoded sequence has one query; with drafts, more.
    if short is None or (operands.skip_decode and short.block_q < 2 * sizes.group):
        return out[0], lse[0]
    return kernel.ragged_attention_pallas(
        operands, config=config, only_short=True, lowering=triton.first_lowering()
    )
