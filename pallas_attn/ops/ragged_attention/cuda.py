"""Prompts over pages on Hopper: the CUDA kernel of csrc/attention for sequences of many query rows, beside the Pallas
kernel's launch for those that are decoded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import hopper_forward
from pallas_attn._tile import masking, triton
from pallas_attn._tile.layout import PoolShape
from pallas_attn._tile.quantization import is_quantized
from pallas_attn.ops.ragged_attention import kernel
from pallas_attn.ops.ragged_attention.blocks import Ragged
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.sources import Sources

NARROW_HEADS = 64
"""Of heads so wide or narrower, exponentials take as long as products, and Pallas' kernel is as fast."""


def unsupported(case: Any) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    if case.latent:
        return "serves keys and values of their own, and these are latents"
    if case.tree_elements:
        return "has no tree_mask"
    if case.layout == "PACKED":
        return "needs layout 'NHD' or 'HND', got 'PACKED'"
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    if out_dtype != case.dtype:
        return f"needs outputs of query's dtype, {jnp.dtype(case.dtype).name}, got {out_dtype.name}"
    return hopper_forward.unsupported(
        case.dtype, case.pool.head_dim, case.value_dim, case.group, case.num_seqs, case.cache_dtype
    )


def is_slower(case: Any) -> bool:
    """Whether Pallas is known to be as fast: where heads are narrow, where caches are of 8 bits, which are converted on
    their way, and where all sequences are decoded."""
    narrow = max(case.pool.head_dim, case.value_dim) <= NARROW_HEADS
    return narrow or is_quantized(case.cache_dtype) or case.num_tokens <= case.num_seqs


@functools.partial(
    jax.jit,
    static_argnames=(
        "pool", "value_dim", "scale", "layout", "rules", "causal", "skip_decode", "out_dtype", "config",
    ),
)  # fmt: skip
def ragged_attention_cuda(
    query: jax.Array,
    sources: Sources,
    lens: dict[str, jax.Array],
    extras: dict[str, jax.Array],
    kept: tuple[jax.Array, jax.Array] | None = None,
    *,
    pool: PoolShape,
    value_dim: int,
    scale: float,
    layout: str,
    rules: masking.Rules,
    causal: bool,
    config: RaggedAttentionConfig,
    skip_decode: bool = False,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As `kernel.ragged_attention_pallas`, of what `unsupported` leaves."""
    everywhere = jnp.full(1, -1, jnp.int32)
    left = everywhere
    if "sliding_window" in lens:
        left = lens["sliding_window"] - 1
    elif rules.sliding_window is not None:
        left = jnp.full(1, rules.sliding_window - 1, jnp.int32)
    ragged = Ragged(query.shape[0], sources.block_tables.shape[0], 1)
    lens = {**lens, "num_seqs": ragged.num_of(lens["cu_q_lens"], lens["num_seqs"])[None]}
    assert sources.value_cache is not None
    group = query.shape[1] // pool.num_kv_heads
    out, lse = hopper_forward.forward(
        query[None],
        sources.key_cache,
        sources.value_cache,
        hopper_forward.Sequences(
            q_bounds=lens["cu_q_lens"],
            block_tables=sources.block_tables,
            seq_lens=lens["seq_lens"],
            num_seqs=lens["num_seqs"],
            new=sources.new and (sources.new[0][None], sources.new[1][None]),
        ),
        window=jnp.concatenate([left, jnp.zeros(1, jnp.int32) if causal else everywhere]),
        scale=jnp.full(1, scale, jnp.float32),
        softcap=rules.softcap,
        sinks=extras.get("sinks"),
        alibi_slopes=extras.get("alibi_slopes"),
        key_scale=extras.get("k_scale"),
        value_scale=extras.get("v_scale"),
        ends_aligned=True,
        key_heads_first=layout == "HND",
        skip_rows=max(config.short.block_q if config.short else 0, group if skip_decode else 0),
        kept=kept and (kept[0][None], kept[1][None]),
    )
    done = out[0], lse[0]
    # What is decoded is one query; drafts are more.
    none_is_short = config.short is None or (skip_decode and config.short.block_q < 2 * group)
    if none_is_short:
        return done
    return kernel.ragged_attention_pallas(
        query, sources, lens, extras, done, pool=pool, value_dim=value_dim, scale=scale, layout=layout, rules=rules,
        causal=causal, config=config, skip_decode=skip_decode, only_short=True, lowering=triton.first_lowering(),
    )  # fmt: skip
