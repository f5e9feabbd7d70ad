"""Multi-head latent attention in which every query token names the tokens it attends to (DeepSeek-V3.2)."""

from pallas_attn.ops.sparse_mla.api import sparse_mla_decode, sparse_mla_prefill
from pallas_attn.ops.sparse_mla.config import SparseMLAConfig

__all__ = ["SparseMLAConfig", "sparse_mla_decode", "sparse_mla_prefill"]
