"""What an MLA cache holds for a token: 512 latent and 64 rotary elements, or the same in 656 bytes.

The 656 bytes are the format that FlashMLA and vLLM use for DeepSeek-V3.2:

    bytes     0 to 511  the latent elements in float8_e4m3fn
            512 to 527  four float32 scales, one for each group of 128 of them
            528 to 655  the rotary elements in bf16

An element is its e4m3 value times its group's scale. All numbers are little-endian. `ops/latent_cache/format.py`
converts in plain jnp; kernels read the bytes by `latent_tile`.
"""

from typing import Any, Literal

import jax.numpy as jnp

LATENT_DIM = 512
ROPE_DIM = 64
QUERY_DIM = LATENT_DIM + ROPE_DIM

GROUP = 128
NUM_GROUPS = LATENT_DIM // GROUP
SCALES_AT = LATENT_DIM
ROPE_AT = SCALES_AT + 4 * NUM_GROUPS
TOKEN_BYTES = ROPE_AT + 2 * ROPE_DIM
FP8 = jnp.float8_e4m3fn
BYTES = jnp.uint8

type Scales = Literal["exact", "power_of_two"]
SCALES = ("exact", "power_of_two")
# For groups that are (nearly) all zero. Its reciprocal is a normal number, too.
LEAST_SCALE = 2.0**-100


def token_width(dtype: Any) -> int:
    """Elements of a token in a pool of this dtype."""
    return TOKEN_BYTES if dtype == BYTES else QUERY_DIM
