"""Your own score and mask functions in the kernels, as PyTorch's FlexAttention has them (Dong et al., 2024).

`score_mod(score, batch, head, q_idx, kv_idx)` and `mask_mod(batch, head, q_idx, kv_idx)` are functions of scalars that
are traced once and worked out in whatever kernel serves; `block_mask` finds what need not be visited.
"""

from pallas_attn.mods.blocks import BlockMask, block_mask
from pallas_attn.mods.ready import (
    MaskMod,
    ScoreMod,
    alibi,
    and_masks,
    block_diffusion,
    causal,
    dilated,
    distance_table,
    documents,
    gate,
    neighborhood,
    not_mask,
    or_masks,
    prefix_lm,
    sinks_and_window,
    sliding_window,
    soft_cap,
    t5_table,
)

__all__ = [
    "BlockMask",
    "MaskMod",
    "ScoreMod",
    "alibi",
    "and_masks",
    "block_diffusion",
    "block_mask",
    "causal",
    "dilated",
    "distance_table",
    "documents",
    "gate",
    "neighborhood",
    "not_mask",
    "or_masks",
    "prefix_lm",
    "sinks_and_window",
    "sliding_window",
    "soft_cap",
    "t5_table",
]
