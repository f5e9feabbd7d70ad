"""Pools of MLA latents, plain and in fp8, for the workloads over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from costs import FP8_LATENT_BYTES, LATENT_DIM, MLA_DIM

from workloads.decode import PagedWorkload

# Tokens that a pool of fp8 latents repeats: primes, so that no two pages hold the same.
TOKENS, FEW_TOKENS = 6397, 13


class LatentWorkload(PagedWorkload):
    value_dim = LATENT_DIM
    num_caches = 1

    def cache_row(self, case: Any) -> tuple[int, Any]:
        return (
            (FP8_LATENT_BYTES, jnp.dtype(jnp.uint8))
            if getattr(case, "cache_dtype", None)
            else super().cache_row(case)
        )

    def block(self, pool: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
        if pool.dtype != jnp.uint8:
            return super().block(pool, seed)
        shape = (FEW_TOKENS if self.small else TOKENS, MLA_DIM)
        normal = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return self.library.quantize_latents(jnp.asarray(normal)).reshape(-1)
