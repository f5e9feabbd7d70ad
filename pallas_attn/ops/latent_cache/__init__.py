"""Writing MLA latents into a paged pool, and the conversion between elements and the 656 bytes of fp8 caches."""

from pallas_attn.ops.latent_cache.api import write_latents
from pallas_attn.ops.latent_cache.convert import dequantize_latents, quantize_latents

__all__ = ["dequantize_latents", "quantize_latents", "write_latents"]
