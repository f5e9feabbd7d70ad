"""Flax modules over the ops: NNX here, their Linen twins in `pallas_attn.nn.linen`."""

from .paged_attention import PagedAttention as PagedAttention

__all__ = ["PagedAttention"]
