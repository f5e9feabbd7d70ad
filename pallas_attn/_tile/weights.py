"""Recomputed attention weights and the gradients of logits: what every backward kernel does.

With p the weights and dp the products of d_out and values, the gradient of a logit is ds = p * (dp - delta), where
delta, one number a query, is the sum of d_out * out minus the gradient of the log-sum-exp.

A query's gradient is the sum of ds times keys. An offset that its keys share is multiplied by the sum of the query's
ds, which softmax makes (nearly) 0: large terms cancel. They no longer do if delta is computed from an `out` that was
rounded to 16 bits, or if each ds is rounded. So delta is computed from `out` with its lower bits (`low_bits`), and the
sum of the rounded ds is compared with its true value: the difference, times a mean of the keys, is subtracted.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import low_bits, softmax, triton


class Bent(NamedTuple):
    """`logits` times `scale` are natural logits."""

    logits: jax.Array
    scale: jax.Array | float
    slope: jax.Array | None
    """The soft cap's derivative; None is 1."""

    @property
    def factor(self) -> jax.Array | float:
        """Factor that makes differences of logits base 2."""
        return self.scale * softmax.LOG2_E


def bent(products: jax.Array, scale: float, softcap: float | None) -> Bent:
    """Scale and soft cap of products of queries and keys."""
    if softcap is None:
        return Bent(products, scale, None)
    within = jnp.tanh(products * (scale / softcap))
    return Bent(within, softcap, 1.0 - within * within)


class Pairs(NamedTuple):
    """For a tile of pairs: weights, gradients of logits, and those of the products before the soft cap."""

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
    """`lse`, with a finite maximum, and `delta` broadcast along keys; pairs not `seen` give 0 (None: all are)."""
    weights = triton.exp2(given.factor * triton.below(given.logits, lse.maximum) - lse.rest)
    slope = given.slope
    d_logits = weights * (d_weights - delta)
    if seen is not None:
        # Both are masked: what is not seen may be NaN.
        weights, d_logits = jnp.where(seen, weights, 0.0), jnp.where(seen, d_logits, 0.0)
        slope = None if slope is None else jnp.where(seen, slope, 0.0)
    return Pairs(weights, d_logits, d_logits if slope is None else d_logits * slope)


SUMS = 16
"""Columns of ones that a tile is multiplied by to sum its rows, the least a product may have; all give the same sum."""


def summed_as(dtype: jax.typing.DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """A function of weights [queries, keys] that rounds them to `dtype`, as the next product does, and returns
    [queries, SUMS] numbers that add up to their row sums."""

    def counted(weights: jax.Array) -> jax.Array:
        ones = jnp.full((weights.shape[1], SUMS), 1 / SUMS, dtype)
        return triton.dot(weights.astype(dtype), ones)

    return counted


def counted(given: Pairs, d_products: jax.Array) -> jax.Array:
    """[queries, SUMS], each the sum over keys of the gradients of logits as the next product takes them, rounded
    (`d_products`). Computed by a product, which is cheaper than a reduction across threads."""
    sums = triton.dot(d_products, jnp.ones((d_products.shape[1], SUMS), d_products.dtype))
    if given.d_products is given.d_logits:
        return sums
    return sums + jnp.sum(given.d_logits - given.d_products, axis=1)[:, None]


def excess(counted: jax.Array, total: jax.Array) -> jax.Array:
    """The error of such sums over all tiles against the true `total`."""
    return jnp.sum(counted, axis=1) * (1 / SUMS) - total


def settled(total: jax.Array, excess: jax.Array, keys: jax.Array, number: jax.Array) -> jax.Array:
    """A sum of d_products times keys [queries, dim], corrected for the `excess` [queries] of d_products: minus it times
    the mean of a sample of `number` keys [some, dim], which are 0 beyond those."""
    mean = jnp.sum(keys.astype(jnp.float32), axis=0) * (1.0 / jnp.maximum(number, 1).astype(jnp.float32))
    return total - excess[:, None] * mean[None, :]


class Kept(NamedTuple):
    """What gradients need from the forward pass besides its results."""

    lse: softmax.Lse
    low: jax.Array | None
    """Lower bits of out, if rounding loses any."""


class OfQueries(NamedTuple):
    """What gradients need for each query; all of one shape."""

    delta: jax.Array
    total: jax.Array
    """The sum over keys of its logits' gradients."""
    d_sink: jax.Array
    """Gradient of its sink's logit."""


def are_blind(lse: softmax.Lse, *, has_sink: bool = False) -> jax.Array:
    """Which queries see no key: queries, keys and values get no gradient from these, even if their cotangents are
    NaN."""
    return (lse.maximum if has_sink else lse.rest) == -jnp.inf


def of_seeing(d_out: jax.Array, blind: jax.Array) -> jax.Array:
    """d_out [..., head_dim] with 0 for queries that are `blind`. Of this, not of what was given, their `product` is to
    be: then XLA reads it, writes this and sums in one kernel."""
    return jnp.where(blind[..., None], 0, d_out)


def of_queries(
    product: jax.Array,
    lse: softmax.Lse,
    d_lse: jax.Array,
    sink: jax.Array | None = None,
    scale: float = 1.0,
) -> OfQueries:
    """`product`: the sum of d_out * out; `d_lse`: the gradient of the natural lse. A `sink`, in natural units,
    broadcasts; `scale` makes the maximum natural, which is -inf for a query that saw no key, even with a sink."""
    nothing, blind = lse.rest == -jnp.inf, are_blind(lse, has_sink=sink is not None)
    if sink is None:
        of_sink = jnp.zeros_like(lse.rest)
    else:
        # The minimum: rounding could give a large sink a weight above 1. In a row that saw nothing its weight is 0.
        above = (sink - softmax.finite(lse.maximum) * scale) * softmax.LOG2_E - softmax.finite(lse.rest)
        of_sink = jnp.where(nothing, 0.0, jnp.exp2(jnp.minimum(above, 0.0)))
    product, d_lse = jnp.where(blind, 0.0, product), jnp.where(nothing, 0.0, d_lse)
    delta = product - d_lse
    d_sink = jnp.where(nothing, 0.0, -of_sink * delta)
    total = product * of_sink + d_lse * (1.0 - of_sink)
    return OfQueries(jnp.where(blind, 0.0, delta), jnp.where(blind, 0.0, total), d_sink)


def product(out: jax.Array, low: jax.Array | None, d_out: jax.Array) -> jax.Array:
    """[...] from [..., head_dim]; `low`: lower bits of `out`."""
    return jnp.sum(d_out.astype(jnp.float32) * low_bits.joined(out, low), axis=-1)
