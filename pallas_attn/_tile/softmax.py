"""Online softmax in base 2, the merging of split results, and the rule for rows with no visible key.

Kernels and references share these pure functions. Logits are scaled by log2(e) beforehand, so that exp2, which is
one instruction on the GPU, serves; `lse2` is base 2, and only `natural_lse` turns it into what users see.

The empty-row rule: a row that saw no key has out 0 and lse -inf. Its running maximum stays -inf, and every
subtraction of a maximum goes through `_finite`, because (-inf) - (-inf) would be NaN.
"""

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

    maximum: jax.Array  # [..., rows], base 2
    total: jax.Array  # [..., rows]; with `late_sum` [..., rows, keys] until `join` or `finish`
    acc: Any  # [..., rows, head_dim], or a tuple of chunks of head_dim


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


def _finite(maximum: jax.Array) -> jax.Array:
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def rescale(
    state: OnlineSoftmax | None,
    logits2: jax.Array,
    factor: jax.Array | float | None = None,
    *,
    axis: int = -1,
    exp2: Callable[[jax.Array], jax.Array] = jnp.exp2,
    exp2_scaled: Callable[[Any, jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[OnlineSoftmax, jax.Array]:
    """Takes in a tile of logits [..., rows, keys] (-inf where masked), yet to be multiplied by a `factor` above 0 if
    there is one: that costs nothing beside the subtraction of the maximum. `exp2` makes weights of them, or
    `exp2_scaled(factor, logits, offset)` at once. `axis` is the keys': -1, or 0 for [keys, rows] and a `turned` state.

    Returns the state with everything but the new tile's values added, and the tile's weights; the caller adds
    `weights @ values` to `acc`, in whatever way its memory layout wants. No state: the tile is the first, and `acc`
    is None.
    """
    new = jnp.max(logits2, axis=axis)
    new = new if factor is None else new * factor
    maximum = new if state is None else jnp.maximum(state.maximum, new)
    if exp2_scaled is not None:
        weights = exp2_scaled(
            1.0 if factor is None else factor, logits2, -jnp.expand_dims(_finite(maximum), axis)
        )
    else:
        scaled = logits2 if factor is None else factor * logits2
        weights = exp2(scaled - jnp.expand_dims(_finite(maximum), axis))
    if state is None:
        return OnlineSoftmax(maximum, jnp.sum(weights, axis=axis), None), weights
    decay = jnp.exp2(state.maximum - _finite(maximum))
    if state.total.ndim == weights.ndim:
        total = state.total * jnp.expand_dims(decay, axis) + weights
    else:
        total = state.total * decay + jnp.sum(weights, axis=axis)
    return OnlineSoftmax(maximum, total, _scale_rows(state.acc, decay, axis)), weights


def _scale_rows(acc: Any, factor: jax.Array, axis: int = -1) -> Any:
    return jax.tree.map(lambda chunk: chunk * jnp.expand_dims(factor, axis), acc)


def turned(state: OnlineSoftmax) -> OnlineSoftmax:
    """With rows last, [keys, rows] and [head_dim, rows]; or first, if they are last."""
    return state._replace(total=state.total.T, acc=state.acc.T)


def finite_sink(sink: jax.Array) -> jax.Array:
    """What would be infinite in base 2 as the largest that is not: beside either no key has weight."""
    # NaN stays NaN, of which Pallas' minimum for GPUs would make MOST_SINK.
    return jnp.where(sink > MOST_SINK, MOST_SINK, sink)


def sink2(sink: jax.Array) -> jax.Array:
    """A sink as `join` takes it."""
    return finite_sink(sink) * LOG2_E


def join(state: OnlineSoftmax, logit2: jax.Array) -> OnlineSoftmax:
    """Takes in a logit without a value for each row, [..., rows]; -inf changes nothing.

    Best behind all keys: were it the maximum from the start, keys far below it would have weights that a narrow
    type rounds to zero.
    """
    state = _summed(state)
    maximum = jnp.maximum(state.maximum, logit2)
    decay = jnp.exp2(state.maximum - _finite(maximum))
    # Where the logit is the maximum, 0 without subtracting: a compiler may fuse that with the product that the logit
    # is, which is not rounded then as in the maximum, and of large numbers the difference would be anything.
    above = jnp.where(logit2 > state.maximum, np.float32(0), logit2 - _finite(maximum))
    total = state.total * decay + jnp.exp2(above)
    return OnlineSoftmax(maximum, total, _scale_rows(state.acc, decay))


def _summed(state: OnlineSoftmax) -> OnlineSoftmax:
    """With late sums taken."""
    late = state.total.ndim > state.maximum.ndim
    return state._replace(total=jnp.sum(state.total, axis=-1)) if late else state


def finish(state: OnlineSoftmax) -> tuple[Any, jax.Array]:
    """(out [..., rows, head_dim], lse2 [..., rows]), float32."""
    total = _summed(state).total
    empty = total == 0.0
    out = _scale_rows(state.acc, 1.0 / jnp.where(empty, 1.0, total))
    lse2 = jnp.where(empty, -jnp.inf, _finite(state.maximum) + jnp.log2(jnp.where(empty, 1.0, total)))
    return out, lse2


def resume(out: jax.Array, lse2: jax.Array) -> OnlineSoftmax:
    """The state that `finish` gives (out, lse2) for."""
    return OnlineSoftmax(lse2, jnp.where(lse2 == -jnp.inf, 0.0, 1.0), out)


def poison(result: jax.Array, bad: jax.Array) -> jax.Array:
    """NaN where `bad`: a call that cannot be right must not look right."""
    # float32 rather than a Python float: the Triton lowering gives weakly typed scalars the predicate's dtype.
    return jnp.where(bad, np.float32(np.nan), result)


def natural_lse(lse2: jax.Array) -> jax.Array:
    return lse2 * LN_2
