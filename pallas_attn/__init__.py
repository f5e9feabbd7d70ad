"""Attention kernels for JAX on NVIDIA GPUs: paged, ragged, block-sparse, flash, MLA and sparse MLA.

Functions under other libraries' names and with their arguments: `compat` (JAX's `paged_attention` and
`ragged_paged_attention`, tpu-inference's `ragged_paged_attention_v3`), `dot_product_attention` (jax.nn's),
`flash_mla_with_kvcache`, `flash_mla_sparse_fwd` and `get_mla_metadata` (FlashMLA's).
"""

# Before the imports below, which take a second: if this is the program pallas-attn, Ctrl-C shall end it quietly.
from pallas_attn import _interrupt as _interrupt

# isort: split
from pallas_attn import compat, mods
from pallas_attn._call.dispatch import available_implementations, record_implementations
from pallas_attn._call.ffi import register as register_ffi_targets
from pallas_attn._tile.masking import LocalStride
from pallas_attn.mods import BlockMask, and_masks, block_mask, not_mask, or_masks
from pallas_attn.ops.blocksparse_attention import (
    BlockSparseConfig,
    BlockSparseCudaConfig,
    SparseLayout,
    blocksparse_attention,
)
from pallas_attn.ops.flash_attention import (
    FlashAttentionConfig,
    FlashAttentionCudaConfig,
    FlashAttentionTiles,
    dot_product_attention,
    flash_attention,
)
from pallas_attn.ops.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from pallas_attn.ops.kv_cache import (
    OutOfPagesError,
    PageAllocator,
    PagedKVCache,
    convert_layout,
    copy_pages,
    page_scales,
    write_kv,
)
from pallas_attn.ops.latent_cache import dequantize_latents, quantize_latents, write_latents
from pallas_attn.ops.mla_decode import (
    MLADecodeConfig,
    MLASchedule,
    PagedLatentCache,
    mla_decode,
    mla_schedule,
)
from pallas_attn.ops.mla_prefill import mla_prefill
from pallas_attn.ops.paged_attention import PagedAttentionConfig, paged_attention
from pallas_attn.ops.ragged_attention import (
    RaggedAttentionConfig,
    RaggedTiles,
    merge_states,
    prefix_prefill,
    ragged_paged_attention,
)
from pallas_attn.ops.sparse_mla import SparseMLAConfig, sparse_mla_decode, sparse_mla_prefill

__all__ = [
    "BlockMask",
    "BlockSparseConfig",
    "BlockSparseCudaConfig",
    "FlashAttentionConfig",
    "FlashAttentionCudaConfig",
    "FlashAttentionTiles",
    "LocalStride",
    "MLADecodeConfig",
    "MLASchedule",
    "OutOfPagesError",
    "PageAllocator",
    "PagedAttentionConfig",
    "PagedKVCache",
    "PagedLatentCache",
    "RaggedAttentionConfig",
    "RaggedTiles",
    "SparseLayout",
    "SparseMLAConfig",
    "and_masks",
    "available_implementations",
    "block_mask",
    "blocksparse_attention",
    "compat",
    "convert_layout",
    "copy_pages",
    "dequantize_latents",
    "dot_product_attention",
    "flash_attention",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "merge_states",
    "mla_decode",
    "mla_prefill",
    "mla_schedule",
    "mods",
    "not_mask",
    "or_masks",
    "page_scales",
    "paged_attention",
    "prefix_prefill",
    "quantize_latents",
    "ragged_paged_attention",
    "record_implementations",
    "register_ffi_targets",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "write_kv",
    "write_latents",
]
__version__ = "0.1.0"
