"""Attention weights worked out again, and the gradients of what they came from: what every backward kernel does.

With p the weights and dp the products of d_out and values, the gradient of a logit is ds = p * (dp - delta), where
delta, one number a query, is the sum of d_out * out less the gradient of the log-sum-exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import softmax, triton


class Bent(NamedTuple):
    """`logits` times `scale` are natural logits."""

    logits: jax.Array
    scale: jax.Array | float
    slope: jax.Array | None
    """The soft cap's derivative; None is 1."""

    @property
    def factor(self) -> jax.Array | float:
        """What makes their differences base 2."""
        return self.scale * softmax.LOG2_E


def bent(products: jax.Array, scale: float, softcap: float | None) -> Bent:
    """Scale and soft cap of products of queries and keys."""
    if softcap is None:
        return Bent(products, scale, None)
    within = jnp.tanh(products * (scale / softcap))
    return Bent(within, softcap, 1.0 - within * within)


class Pairs(NamedTuple):
    """Of a tile of pairs: weights, gradients of logits and, where the soft cap bends them, of what it was given."""

    weights: jax.Array
    d_logits: jax.Array
    d_products: jax.Array


def pairs(
    given: Bent,
    lse: softmax.Lse,
    delta: jax.Array,
    d_weights: jax.Array,
    seen: jax.Array | None,
) -> Pairs:
    """`lse`, with a finite maximum of the logits, and `delta` broadcast along keys; pairs that are not `seen` count for
    nothing, None is that all are."""
    weights = triton.exp2(given.factor * triton.below(given.logits, lse.maximum) - lse.rest)
    slope = given.slope
    d_logits = weights * (d_weights - delta)
    if seen is not None:
        # All of them: what is not seen may be NaN.
        weights, d_logits = jnp.where(seen, weights, 0.0), jnp.where(seen, d_logits, 0.0)
        slope = None if slope is None else jnp.where(seen, slope, 0.0)
    return Pairs(weights, d_logits, d_logits if slope is None else d_logits * slope)


def delta(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """[...] from [..., head_dim] and [...]; a query whose lse is -inf has delta of no consequence."""
    return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
