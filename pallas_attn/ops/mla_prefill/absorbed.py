"""The absorbed form: ragged attention over the latents themselves, which are keys and values to all heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile.latents import ROPE_DIM
from pallas_attn.ops.mla_prefill.batch import Batch
from pallas_attn.ops.ragged_attention import call


def attend(
    check: ArgumentChecker,
    batch: Batch,
    latent_cache: jax.Array,
    mine: jax.Array,
    *,
    key_up: jax.Array,
    value_up: jax.Array,
    scale: float,
    implementation: Any,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the sequences `mine` [max_seqs]; 0 and -inf for others, whose pages are not read."""
    query = batch.operands["query"]
    nope, rope = query[..., :-ROPE_DIM], query[..., -ROPE_DIM:]
    in_latents = _by_head("thn,hnc->thc", nope, key_up)
    seen = {
        **batch.operands,
        "query": jnp.concatenate([in_latents, rope], axis=-1),
        "key_cache": latent_cache,
        "seq_lens": jnp.where(mine, batch.operands["seq_lens"], 0),
    }
    out, lse = call.run(
        check,
        seen,
        op="mla_prefill",
        layout="NHD",
        scale=scale,
        return_lse=True,
        # No CUDA kernel attends to latents in prompts; who asks for it means the other form.
        implementation=None if implementation == "cuda" else implementation,
    )
    return _by_head("thc,hvc->thv", out, value_up), lse


def _by_head(dims: str, array: jax.Array, up: jax.Array) -> jax.Array:
    """Their product in the array's dtype, rounded once: on a CPU, XLA would add up a batch of bf16 products in bf16."""
    product = functools.partial(jnp.einsum, dims, precision="highest")

    def widened(array: jax.Array, up: jax.Array) -> jax.Array:
        return product(array.astype(jnp.float32), up.astype(jnp.float32)).astype(array.dtype)

    return jax.lax.platform_dependent(array, up, cpu=widened, default=product)
