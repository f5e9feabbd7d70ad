"""Attention weights worked out again, and the gradients of what they came from: what every backward kernel does.

With p the weights and dp the products of d_out and values, the gradient of a logit is ds = p * (dp - delta), where
delta, one number a query, is the sum of d_out * out less the gradient of the log-sum-exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import softmax, triton


class Bent(NamedTuple):
    """`logits` times `factor` are base-2 logits."""

    logits: jax.Array
    factor: float
    slope: jax.Array | None
    """The soft cap's derivative; None is 1."""


def bent(products: jax.Array, scale: float, softcap: float | None) -> Bent:
    """Scale and soft cap of products of queries and keys."""
    if softcap is None:
        return Bent(products, scale * softmax.LOG2_E, None)
    within = jnp.tanh(products * (scale / softcap))
    return Bent(within, softcap * softmax.LOG2_E, 1.0 - within * within)


class Pairs(NamedTuple):
    """Of a tile of pairs: weights, gradients of logits and, where the soft cap bends them, of what it was given."""

    weights: jax.Array
    d_logits: jax.Array
    d_products: jax.Array


def pairs(
    logits: jax.Array,
    factor: jax.Array | float,
    slope: jax.Array | None,
    lse2: jax.Array,
    delta: jax.Array,
    d_weights: jax.Array,
    seen: jax.Array | None,
) -> Pairs:
    """`lse2` and `delta` broadcast along keys; pairs that are not `seen` count for nothing, None is that all are."""
    weights = triton.exp2_scaled(factor, logits, -lse2)
    d_logits = weights * (d_weights - delta)
    if seen is not None:
        # All of them: what is not seen may be NaN.
        weights, d_logits = jnp.where(seen, weights, 0.0), jnp.where(seen, d_logits, 0.0)
        slope = None if slope is None else jnp.where(seen, slope, 0.0)
    return Pairs(weights, d_logits, d_logits if slope is None else d_logits * slope)


def delta(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """[...] from [..., head_dim] and [...]; a query whose lse is -inf has delta of no consequence."""
    return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
