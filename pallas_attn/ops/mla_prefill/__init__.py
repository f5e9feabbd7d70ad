"""Ragged attention of MLA's queries over paged latents."""

from pallas_attn.ops.mla_prefill.api import mla_prefill

__all__ = ["mla_prefill"]
