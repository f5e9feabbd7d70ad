"""Online softmax in base 2, the merging of split results, and the rule for rows with no visible key.

Kernels and references share these pure functions. A row's weights are exp2(factor * (logit - maximum)): the maximum is
subtracted before scaling, so that its own weight is exactly 1 whatever its size. Scaled first, a fused multiply-add
would subtract a rounded product from an exact one: for logits of 1e10 an error of some hundred powers of two. exp2 is
one instruction on the GPU. A row's maximum and the sum of its weights are kept apart: in one number, the log-sum-exp, a
large maximum would leave no digits for the sum.

The empty-row rule: a row that saw no key has out 0 and lse -inf. Its running maximum stays -inf, so every maximum goes
through `finite` before it is subtracted: (-inf) - (-inf) would be NaN.
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
    """Running state of some query rows: `acc` is the unnormalised output over the keys seen so far."""

    maximum: jax.Array  # [..., rows], in the logits' units: of products, or whatever was taken in
    total: jax.Array  # [..., rows]; with `late_sum` [..., rows, keys] until `join` or `finish`
    acc: Any  # [..., rows, head_dim], or a tuple of chunks of head_dim


class Lse(NamedTuple):
    """A log-sum-exp in two parts: scale * maximum + LN_2 * rest, where scale * logit is a natural logit. Both are -inf
    where no key was seen."""

    maximum: jax.Array
    rest: jax.Array

    def natural(self, scale: float = 1.0) -> jax.Array:
        return finite(self.maximum) * scale + self.rest * LN_2

    def following(self, natural: jax.Array) -> "Lse":
        """The same value with the derivative of `natural`, the form in which differentiated functions see it."""
        known = finite(natural)
        moved = (known - jax.lax.stop_gradient(known)) * LOG2_E
        maximum, rest = map(jax.lax.stop_gradient, self)
        return Lse(maximum, rest + jnp.where(jnp.isfinite(natural), moved, 0.0))


def start(
    rows: tuple[int, ...], head_dim: int | tuple[int, ...], *, late_sum: int | None = None
) -> OnlineSoftmax:
    """With a tuple of chunk sizes as `head_dim`, `acc` and `finish`'s `out` are tuples as well. With `late_sum`, the
    keys of every tile, weights are added up key by key and reduced over keys only at the end."""
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
    """Takes in a tile of logits [..., rows, keys], -inf where masked. `factor`, above 0, makes their differences base
    2; all tiles have the same, unless it is NaN. `exp2_below` computes weights from (factor, logits, maximum); None is
    right for logits that are not products (`triton.exp2_below`). `axis` is the keys': -1, or 0 for [keys, rows] and a
    `transposed` state. With a `rest` (base 2) each logit stands for several keys, by their maximum and `Lse.rest`.
    `counted` maps weights to what a late sum adds up; None: the weights.

    Returns the state with everything but the tile's values added, and the tile's weights; the caller adds `weights @
    values` to `acc`, in the way that its memory layout asks for. Without a state the tile is the first, and `acc` is
    None.
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
    """The state transposed, [keys, rows] and [head_dim, rows], or back."""
    return state._replace(total=state.total.T, acc=state.acc.T)


def finite_sink(sink: jax.Array) -> jax.Array:
    """Clips a sink that would overflow in base 2: beside either value no key has weight."""
    # Not `minimum`, by which Pallas on GPUs turns NaN into MOST_SINK.
    return jnp.where(sink > MOST_SINK, MOST_SINK, sink)


def natural(state: OnlineSoftmax, scale: jax.Array | float) -> OnlineSoftmax:
    """In natural units. The rounding shifts all logits of a row alike, by no more than float32's precision."""
    # The added 0 keeps the product from being fused with a subtraction.
    return state._replace(maximum=state.maximum * scale + np.float32(0))


def join(state: OnlineSoftmax, logit: jax.Array) -> OnlineSoftmax:
    """Adds a logit without a value to each row [..., rows] of a state in natural units; -inf changes nothing.

    Best after all keys: as the maximum from the start, it would make a narrow type round small weights to 0.
    """
    state, logit = _summed(state), finite_sink(logit)
    above = logit > state.maximum
    decay = jnp.exp2(jnp.where(above, state.maximum - logit, np.float32(0)) * LOG2_E)
    # Its weight is 1 where it becomes the maximum, also without any key.
    own = jnp.exp2(jnp.where(above, np.float32(0), logit - finite(state.maximum)) * LOG2_E)
    maximum = jnp.where(above, logit, state.maximum)
    return OnlineSoftmax(maximum, state.total * decay + own, _scale_rows(state.acc, decay))


def _summed(state: OnlineSoftmax) -> OnlineSoftmax:
    """The state with late sums reduced."""
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
    """As `finish`, with a natural logit without a value beside the keys. The maximum remains that of the keys, in the
    state's units, so that recomputed weights are the same."""
    keys = natural(_summed(state), scale)
    out, lse = finish(join(keys, logit))
    more = jnp.where(lse.maximum > keys.maximum, lse.maximum - finite(keys.maximum), np.float32(0)) * LOG2_E
    return out, Lse(state.maximum, lse.rest + more)


def resume(out: jax.Array, lse: Lse) -> OnlineSoftmax:
    """The inverse of `finish`."""
    total = jnp.exp2(lse.rest)
    return OnlineSoftmax(lse.maximum, total, _scale_rows(out, total))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def weights_again(logits: jax.Array, factor: float, lse: Lse) -> jax.Array:
    """Recomputes weights from logits [..., rows, keys] and their `lse`, in jnp, as kernels do in `weights.pairs`."""
    maximum, rest = (jnp.where(lse.rest == -jnp.inf, 0.0, part)[..., None] for part in lse)
    below = jnp.where(logits == maximum, 0.0, jnp.minimum(logits - maximum, 0.0))
    return jnp.exp2(factor * below - rest)


@weights_again.defjvp
def _moved_weights(factor: float, given: tuple[jax.Array, Lse], moved: tuple[jax.Array, Lse]):
    """The largest logit's weight has a derivative, too, though its difference is a constant 0."""
    weights, (logits, lse) = weights_again(given[0], factor, given[1]), moved
    return weights, weights * LN_2 * (factor * (logits - lse.maximum[..., None]) - lse.rest[..., None])


def poison(result: jax.Array, bad: jax.Array) -> jax.Array:
    """NaN where `bad`: a call that cannot be right must not look right."""
    # float32 rather than a Python float: the Triton lowering gives weakly typed scalars the predicate's dtype.
    return jnp.where(bad, np.float32(np.nan), result)
