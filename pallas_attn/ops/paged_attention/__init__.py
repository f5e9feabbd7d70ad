"""Decode attention over a paged KV cache: one query token per sequence (vLLM's PagedAttention v1 and v2)."""

from pallas_attn.ops.paged_attention.api import paged_attention
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig

__all__ = ["PagedAttentionConfig", "paged_attention"]
