"""Block-sparse attention: ragged prefill and decode over the blocks that a layout lists."""

from pallas_attn.ops.blocksparse_attention.api import blocksparse_attention
from pallas_attn.ops.blocksparse_attention.config import BlockSparseConfig, BlockSparseCudaConfig
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout

__all__ = ["BlockSparseConfig", "BlockSparseCudaConfig", "SparseLayout", "blocksparse_attention"]
