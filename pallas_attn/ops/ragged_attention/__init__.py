from pallas_attn.ops.ragged_attention.api import ragged_paged_attention
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, RaggedTiles

__all__ = ["RaggedAttentionConfig", "RaggedTiles", "ragged_paged_attention"]
