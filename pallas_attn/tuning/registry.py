"""The ops that can be tuned, by name."""

from pallas_attn.tuning.blocksparse_attention import BlockSparsePoint
from pallas_attn.tuning.flash_attention import FlashAttentionPoint
from pallas_attn.tuning.mla_decode import MLADecodePoint
from pallas_attn.tuning.paged_attention import PagedAttentionPoint
from pallas_attn.tuning.points import Point
from pallas_attn.tuning.ragged_attention import RaggedAttentionPoint
from pallas_attn.tuning.sparse_mla import SparseMLAPoint

OPS: dict[str, type[Point]] = {
    "paged_attention": PagedAttentionPoint,
    "ragged_paged_attention": RaggedAttentionPoint,
    "mla_decode": MLADecodePoint,
    "sparse_mla_decode": SparseMLAPoint,
    "flash_attention": FlashAttentionPoint,
    "blocksparse_attention": BlockSparsePoint,
}
"""A new op needs a `Point` and an entry here; command, file and timing know no op by name."""
