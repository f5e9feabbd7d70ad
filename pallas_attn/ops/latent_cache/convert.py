"""`quantize_latents` and `dequantize_latents`: between elements and the 656 bytes of a token."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.options import DTYPES
from pallas_attn._tile.latents import BYTES, QUERY_DIM, SCALES, TOKEN_BYTES, Scales, token_width
from pallas_attn.ops.latent_cache.format import dequantized, quantized


def quantize_latents(latents: jax.Array, *, scales: Scales = "power_of_two") -> jax.Array:
    """Tokens of an MLA cache in the 656 bytes of FlashMLA's and vLLM's fp8 caches for DeepSeek-V3.2.

    Bytes 0 to 511 are the latent elements in float8_e4m3fn, 512 to 527 four float32 scales, one for each group of 128
    of them, and 528 to 655 the rotary elements in bf16, all little-endian. An element is off by at most 1/16 of itself,
    or, where that is more, by 2**-10 of its group's scale, which is at most 1/224 of the group's largest magnitude, or
    2**-100 where that is more.

    Args:
        latents: [..., 576] bf16, fp16 or float32, the 512 latent and then the 64 rotary elements: a whole pool
            [num_pages, page_size, 1, 576], or any other array of tokens.
        scales: "exact", a group's largest magnitude / 448, or "power_of_two", the next power of two, with which the
            latents that are read back are exact in bf16.

    Returns:
        [..., 656] uint8. A group with NaN or Inf gets the scale NaN.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, or unknown scales.

    Source: the cache format of FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("quantize_latents")
    _check_tokens(check, "latents", latents, QUERY_DIM, DTYPES)
    check.one_of("scales", scales, SCALES)
    return quantized(jnp.asarray(latents), scales)


def dequantize_latents(tokens: jax.Array, *, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Tokens of `quantize_latents`'s 656 bytes as elements.

    Args:
        tokens: [..., 656] uint8.
        dtype: bf16, fp16 or float32. Products of values and scales are rounded to float32 and then to it.

    Returns:
        [..., 576]: the 512 latent and then the 64 rotary elements.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, or a dtype that caches do not have.
    """
    check = ArgumentChecker("dequantize_latents")
    _check_tokens(check, "tokens", tokens, TOKEN_BYTES, [BYTES])
    check.dtype("dtype", dtype, DTYPES)
    return dequantized(jnp.asarray(tokens)).astype(dtype)


def check_pool(check: ArgumentChecker, name: str, pool: Any, dtypes: Any) -> None:
    """A pool of one of these dtypes, or of 656 bytes a token."""
    check.dtype_among(name, pool, (*dtypes, BYTES))
    shape = ("num_pages", "page_size", 1, token_width(pool.dtype))
    check.array(name, pool, shape, (*dtypes, BYTES))


def _check_tokens(check: ArgumentChecker, name: str, tokens: Any, width: int, dtypes: Any) -> None:
    check.dtype_among(name, tokens, dtypes)
    lead = [f"dim{i}" for i in range(max(len(tokens.shape) - 1, 0))]
    check.array(name, tokens, (*lead, width), dtypes)
