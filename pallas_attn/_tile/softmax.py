"""Online softmax in base 2, the merging of split results, and the rule for rows with no visible key.

Kernels and references share these pure functions. A row's weights are exp2(factor * (logit - maximum)): the maximum is
taken off before anything is scaled, so that its own weight is 1 whatever its size. The other way round, what is taken
off is a rounded product, and a fused multiply-add leaves the rounding: of logits of 1e10 some hundred powers of two.
exp2 serves because it is one instruction on the GPU. What is kept of a row is its maximum and, apart from it, the sum
of its weights: in one number, the log-sum-exp, a large maximum would leave no digits for the sum.

The empty-row rule: a row that saw no key has out 0 and lse -inf. Its running maximum stays -inf, and every
subtraction of a maximum goes through `_finite`, because (-inf) - (-inf) would be NaN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
MOST_SINK = np.float32(2.3e38)  # times LOG2_E it is finite


class OnlineSoftmax(NamedTuple):
    """Running state of some query rows: `acc` is the unnormalised output of the keys seen so far."""

    maximum: jax.Array  # [..., rows], in the logits' units: of products, or whatever was taken in
    total: jax.Array  # [..., rows]; with `late_sum` [..., rows, keys] until `join` or `finish`
    acc: Any  # [..., rows, head_dim], or a tuple of chunks of head_dim


class Lse(NamedTuple):
    """A log-sum-exp in two parts: scale * maximum + LN_2 * rest, with the scale that makes natural logits of what the
    maximum is of. Both are -inf where nothing was seen."""

    maximum: jax.Array
    rest: jax.Array

    def natural(self, scale: float = 1.0) -> jax.Array:
        return finite(self.maximum) * scale + self.rest * LN_2

    def following(self, natural: jax.Array) -> "Lse":
        """Itself, with the derivative of `natural`, as which it is known to functions that are differentiated."""
        known = finite(natural)
        moved = (known - jax.lax.stop_gradient(known)) * LOG2_E
        maximum, rest = map(jax.lax.stop_gradient, self)
        return Lse(maximum, rest + jnp.where(jnp.isfinite(natural), moved, 0.0))


def start(
    rows: tuple[int, ...], head_dim: int | tuple[int, ...], *, late_sum: int | None = None
) -> OnlineSoftmax:
    """`head_dim` may be the sizes of chunks, of which `acc` and `finish`'s `out` are then tuples.
    `late_sum` keys in every tile: their weights are added key by key, and over keys only at the end."""
    return OnlineSoftmax(
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows if late_sum is None else (*rows, late_sum), jnp.float32),
        jax.tree.map(lambda size: jnp.zeros((*rows, size), jnp.float32), head_dim),
    )


def finite(maximum: jax.Array) -> jax.Array:
    """A maximum to subtract."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def rescale(
    state: OnlineSoftmax | None,
    logits: jax.Array,
    factor: jax.Array | float = LOG2_E,
    *,
    rest: jax.Array | None = None,
    axis: int = -1,
    exp2_below: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None,
    counted: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[OnlineSoftmax, jax.Array]:
    """Takes in a tile of logits [..., rows, keys], -inf where masked. Their differences times `factor`, above 0, are
    base 2; it is the same for all tiles, unless it is NaN. `exp2_below` makes weights of (factor, logits, maximum);
    None serves for logits that are no products (`triton.exp2_below`). `axis` is the keys': -1, or 0 for [keys, rows]
    and a `transposed` state. With a `rest`, base 2, each stands for several keys: their maximum and their `Lse.rest`.
    `counted` makes of weights what a late sum adds up; None is themselves.

    Returns the state with everything but the new tile's values added, and the tile's weights; the caller adds
    `weights @ values` to `acc`, in whatever way its memory layout wants. No state: the tile is the first, and `acc`
    is None.
    """
    new = jnp.max(logits, axis=axis)
    maximum = new if state is None else jnp.maximum(state.maximum, new)
    top = finite(maximum)
    weights = (exp2_below or _exp2_below)(factor, logits, jnp.expand_dims(top, axis))
    weights = weights if rest is None else weights * jnp.exp2(rest)
    if state is None:
        return OnlineSoftmax(maximum, jnp.sum(weights, axis=axis), None), weights
    decay = jnp.exp2(factor * (state.maximum - top))
    if state.total.ndim == weights.ndim:
        total = state.total * jnp.expand_dims(decay, axis) + (counted or (lambda w: w))(weights)
    else:
        total = state.total * decay + jnp.sum(weights, axis=axis)
    return OnlineSoftmax(maximum, total, _scale_rows(state.acc, decay, axis)), weights


def _exp2_below(factor: Any, logits: jax.Array, top: jax.Array) -> jax.Array:
    return jnp.exp2(factor * (logits - top))


def _scale_rows(acc: Any, factor: jax.Array, axis: int = -1) -> Any:
    return jax.tree.map(lambda chunk: chunk * jnp.expand_dims(factor, axis), acc)


def transposed(state: OnlineSoftmax) -> OnlineSoftmax:
    """With rows last, [keys, rows] and [head_dim, rows]; or first, if they are last."""
    return state._replace(total=state.total.T, acc=state.acc.T)


def finite_sink(sink: jax.Array) -> jax.Array:
    """What would be infinite in base 2 as the largest that is not: beside either no key has weight."""
    # NaN stays NaN, of which Pallas' minimum for GPUs would make MOST_SINK.
    return jnp.where(sink > MOST_SINK, MOST_SINK, sink)


def natural(state: OnlineSoftmax, scale: jax.Array | float) -> OnlineSoftmax:
    """In natural units. What is rounded here is all of a row's logits alike, within what float32 has of them."""
    # With the 0 that is added this product is nothing to fuse a subtraction with.
    return state._replace(maximum=state.maximum * scale + np.float32(0))


def join(state: OnlineSoftmax, logit: jax.Array) -> OnlineSoftmax:
    """Takes in a logit without a value for each row, [..., rows], into a state in natural units; -inf changes nothing.

    Best behind all keys: were it the maximum from the start, keys far below it would have weights that a narrow
    type rounds to zero.
    """
    state, logit = _summed(state), finite_sink(logit)
    above = logit > state.maximum
    decay = jnp.exp2(jnp.where(above, state.maximum - logit, np.float32(0)) * LOG2_E)
    # Its weight is 1 where it becomes the maximum, beside nothing too.
    own = jnp.exp2(jnp.where(above, np.float32(0), logit - finite(state.maximum)) * LOG2_E)
    maximum = jnp.where(above, logit, state.maximum)
    return OnlineSoftmax(maximum, state.total * decay + own, _scale_rows(state.acc, decay))


def _summed(state: OnlineSoftmax) -> OnlineSoftmax:
    """With late sums taken."""
    late = state.total.ndim > state.maximum.ndim
    return state._replace(total=jnp.sum(state.total, axis=-1)) if late else state


def finish(state: OnlineSoftmax) -> tuple[Any, Lse]:
    """(out [..., rows, head_dim], lse [..., rows]), float32, the maximum in the state's units."""
    total = _summed(state).total
    empty = total == 0.0
    out = _scale_rows(state.acc, 1.0 / jnp.where(empty, 1.0, total))
    rest = jnp.where(empty, -jnp.inf, jnp.log2(jnp.where(empty, 1.0, total)))
    return out, Lse(jnp.where(empty, -jnp.inf, state.maximum), rest)


def finish_beside(state: OnlineSoftmax, scale: float, logit: jax.Array) -> tuple[Any, Lse]:
    """As `finish`, with a natural logit that has no value beside the keys. The maximum stays one of the keys, in the
    state's units, so that their weights are worked out from it again as they were."""
    keys = natural(_summed(state), scale)
    out, lse = finish(join(keys, logit))
    more = jnp.where(lse.maximum > keys.maximum, lse.maximum - finite(keys.maximum), np.float32(0)) * LOG2_E
    return out, Lse(state.maximum, lse.rest + more)


def resume(out: jax.Array, lse: Lse) -> OnlineSoftmax:
    """The state that `finish` gives (out, lse) for."""
    total = jnp.exp2(lse.rest)
    return OnlineSoftmax(lse.maximum, total, _scale_rows(out, total))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def weights_again(logits: jax.Array, factor: float, lse: Lse) -> jax.Array:
    """Of logits [..., rows, keys] whose `lse` is known, in jnp: what kernels do in `weights.pairs`."""
    maximum, rest = (jnp.where(lse.rest == -jnp.inf, 0.0, part)[..., None] for part in lse)
    below = jnp.where(logits == maximum, 0.0, jnp.minimum(logits - maximum, 0.0))
    return jnp.exp2(factor * below - rest)


@weights_again.defjvp
def _moved_weights(factor: float, given: tuple[jax.Array, Lse], moved: tuple[jax.Array, Lse]):
    """The largest logit's has a derivative, too, though nothing is left of it."""
    weights, (logits, lse) = weights_again(given[0], factor, given[1]), moved
    return weights, weights * LN_2 * (factor * (logits - lse.maximum[..., None]) - lse.rest[..., None])


def poison(result: jax.Array, bad: jax.Array) -> jax.Array:
    """NaN where `bad`: a call that cannot be right must not look right."""
    # float32 rather than a Python float: the Triton lowering gives weakly typed scalars the predicate's dtype.
    return jnp.where(bad, np.float32(np.nan), result)
