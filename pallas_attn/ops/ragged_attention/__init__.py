from pallas_attn.ops.ragged_attention.api import ragged_paged_attention
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig, RaggedTiles
from pallas_attn.ops.ragged_attention.prefix import prefix_prefill
from pallas_attn.ops.ragged_attention.states import merge_states

__all__ = ["RaggedAttentionConfig", "RaggedTiles", "merge_states", "prefix_prefill", "ragged_paged_attention"]
