"""Dense attention with gradients: forward and backward kernels that keep nothing of size queries x keys."""

from pallas_attn.ops.flash_attention.api import flash_attention
from pallas_attn.ops.flash_attention.config import (
    FlashAttentionConfig,
    FlashAttentionCudaConfig,
    FlashAttentionTiles,
)
from pallas_attn.ops.flash_attention.jax_nn import dot_product_attention

__all__ = [
    "FlashAttentionConfig",
    "FlashAttentionCudaConfig",
    "FlashAttentionTiles",
    "dot_product_attention",
    "flash_attention",
]
