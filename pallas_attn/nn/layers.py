"""Parts of decoders besides attention."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.masking import ascending

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

# float32 weights mean float32 products (a GPU would take TF32 by default); bfloat16 weights are not affected.
PRECISION = jax.lax.Precision.HIGHEST


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, in float32, and scales: by the weight, or, `around_one`, by
    1 + the weight, before rounding (Gemma's)."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike, *, around_one: bool = False):
        self.weight = nnx.Param((jnp.zeros if around_one else jnp.ones)(size, dtype))
        self.eps, self.around_one = eps, around_one

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.around_one:
            return (normed * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[...]


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over the last axis, in float32, and scaled; no bias. The weight may have axes in front of
    that one: those of heads, each with its own."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(shape, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = jax.nn.standardize(x.astype(jnp.float32), epsilon=self.eps)
        return (normed * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def linear(
    in_size: int, out_size: int, dtype: DTypeLike, rngs: nnx.Rngs, *, bias: bool = False
) -> nnx.Linear:
    """A projection."""
    return nnx.Linear(
        in_size, out_size, use_bias=bias, dtype=dtype, param_dtype=dtype, precision=PRECISION, rngs=rngs
    )


def advanced(seq_lens: jax.Array, positions: jax.Array, cu_q_lens: jax.Array | None) -> jax.Array:
    """Lengths [num_seqs] after tokens at these positions, [num_seqs, n] or ragged, as the attention modules take
    them."""
    if cu_q_lens is None:
        return jnp.maximum(seq_lens, jnp.max(positions, axis=1) + 1)
    cu_q_lens = ascending(cu_q_lens)
    last = positions[jnp.clip(cu_q_lens[1:] - 1, 0, positions.shape[0] - 1)]
    return jnp.where(cu_q_lens[1:] > cu_q_lens[:-1], jnp.maximum(seq_lens, last + 1), seq_lens)
