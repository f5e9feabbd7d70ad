"""The absorbed form: ragged attention over the latents themselves, which are keys and values to all heads."""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._call.op import Op
from pallas_attn._tile.latents import ROPE_DIM
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.mla_prefill.batch import Batch
from pallas_attn.ops.ragged_attention.operands import Operands


def attend(op: Op, batch: Batch, mine: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of the sequences `mine` [max_seqs]; 0 and -inf for others, whose pages are not read."""
    given = batch.operands
    nope, rope = given.query[..., :-ROPE_DIM], given.query[..., -ROPE_DIM:]
    in_latents = Operands(
        query=jnp.concatenate([_by_head("thn,hnc->thc", nope, given.key_up), rope], axis=-1),
        key_cache=given.latent_cache,
        block_tables=given.block_tables,
        seq_lens=jnp.where(mine, given.seq_lens, 0),
        cu_q_lens=given.cu_q_lens,
        num_seqs=given.num_seqs,
        layout="NHD",
        scale=given.scale,
        rules=Rules(),
        out_dtype=given.query.dtype,
    )
    # No CUDA kernel attends to latents in prompts; "cuda" applies to the other form.
    implementation = None if given.implementation == "cuda" else given.implementation
    out, lse = op.serve(in_latents, implementation=implementation)
    return _by_head("thc,hvc->thv", out, given.value_up), lse


def _by_head(dims: str, array: jax.Array, up: jax.Array) -> jax.Array:
    """The product in the array's dtype, rounded once: on a CPU, XLA would accumulate a batch of bf16 products in
    bf16."""
    product = functools.partial(jnp.einsum, dims, precision="highest")

    def widened(array: jax.Array, up: jax.Array) -> jax.Array:
        return product(array.astype(jnp.float32), up.astype(jnp.float32)).astype(array.dtype)

    return jax.lax.platform_dependent(array, up, cpu=widened, default=product)
