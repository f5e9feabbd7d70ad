"""Attention weights worked out again, and the gradients of what they came from: what every backward kernel does.

With p the weights and dp the products of d_out and values, the gradient of a logit is ds = p * (dp - delta), where
delta, one number a query, is the sum of d_out * out less the gradient of the log-sum-exp.

A query's gradient is the sum of ds times keys. What its keys have in common counts times the sum of its ds, which
softmax makes 0, or little: large terms cancel. They no longer do where delta comes of an `out` that was rounded to 16
bits, nor where each ds is rounded. So delta is worked out from `out` with its lower bits (`low_bits`), and the sum of
what was rounded is compared with what it should be: the difference, times a mean of the keys, is taken back.
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


SUMS = 16
"""Columns of ones by which rows of a tile are summed: the least that a product has, and as many equal sums."""


def summed_as(dtype: jax.typing.DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """Of weights [queries, keys], rounded to `dtype` as the next product takes them: [queries, SUMS] numbers that add
    up to their sum."""

    def counted(weights: jax.Array) -> jax.Array:
        ones = jnp.full((weights.shape[1], SUMS), 1 / SUMS, dtype)
        return triton.dot(weights.astype(dtype), ones)

    return counted


def counted(given: Pairs, d_products: jax.Array) -> jax.Array:
    """[queries, SUMS], each the sum over keys of what stands for gradients of logits: `d_products` as the next product
    takes them, rounded. By a product too, which costs less than a sum across a tile's threads."""
    sums = triton.dot(d_products, jnp.ones((d_products.shape[1], SUMS), d_products.dtype))
    if given.d_products is given.d_logits:
        return sums
    return sums + jnp.sum(given.d_logits - given.d_products, axis=1)[:, None]


def excess(counted: jax.Array, total: jax.Array) -> jax.Array:
    """Of such sums over all tiles: what rounding made of the true `total`."""
    return jnp.sum(counted, axis=1) * (1 / SUMS) - total


def settled(total: jax.Array, excess: jax.Array, keys: jax.Array, number: jax.Array) -> jax.Array:
    """A sum of d_products times keys [queries, dim] less what the `excess` [queries] of d_products brought in: that
    times the mean of a `number` of keys, of which there are [some, dim], 0 where not among them."""
    mean = jnp.sum(keys.astype(jnp.float32), axis=0) * (1.0 / jnp.maximum(number, 1).astype(jnp.float32))
    return total - excess[:, None] * mean[None, :]


class Kept(NamedTuple):
    """What gradients need of the forward pass besides its results."""

    lse: softmax.Lse
    low: jax.Array | None
    """Lower bits of out, where rounding loses any."""


class OfQueries(NamedTuple):
    """What gradients need of each query, [...] of one shape."""

    delta: jax.Array
    total: jax.Array
    """The sum over keys of its logits' gradients."""
    d_sink: jax.Array
    """Of its sink's logit."""
    blind: jax.Array
    """It sees no key, and passes nothing on to queries, keys and values, were its cotangents NaN."""


def of_queries(
    product: jax.Array,
    lse: softmax.Lse,
    d_lse: jax.Array,
    sink: jax.Array | None = None,
    scale: float = 1.0,
) -> OfQueries:
    """`product`: d_out times `out`, summed; `d_lse`: of the natural one. A `sink`, natural, broadcasts; `scale` is that
    of the maximum, which is -inf of a query that saw no key, were there a sink."""
    nothing = lse.rest == -jnp.inf
    if sink is None:
        of_sink, blind = jnp.zeros_like(lse.rest), nothing
    else:
        # None has a weight above 1, which rounding makes of a large sink; of a row that saw nothing it has none.
        above = (sink - softmax.finite(lse.maximum) * scale) * softmax.LOG2_E - softmax.finite(lse.rest)
        of_sink = jnp.where(nothing, 0.0, jnp.exp2(jnp.minimum(above, 0.0)))
        blind = lse.maximum == -jnp.inf
    product, d_lse = jnp.where(blind, 0.0, product), jnp.where(nothing, 0.0, d_lse)
    delta = product - d_lse
    d_sink = jnp.where(nothing, 0.0, -of_sink * delta)
    total = product * of_sink + d_lse * (1.0 - of_sink)
    return OfQueries(jnp.where(blind, 0.0, delta), jnp.where(blind, 0.0, total), d_sink, blind)


def product(out: jax.Array, low: jax.Array | None, d_out: jax.Array) -> jax.Array:
    """[...] from [..., head_dim]; `low`: lower bits of `out`."""
    return jnp.sum(d_out.astype(jnp.float32) * low_bits.joined(out, low), axis=-1)
