"""The range of a program's results over a block, by interval arithmetic: never too narrow, as narrow as is cheap.

Each value has a least and a largest, for all blocks at once: unlike a block's corners, they bound everything in between
(Moore, "Interval Analysis", 1966). NaN is an unknown bound: no comparison with it holds, so it decides nothing.

Kernels may round differently in the last bits, so bounds of floating-point results are widened by more than that. Where
an integer's bound would wrap around, all numbers of the type are possible.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_attn.mods.program import SCORE, VARIABLES, Number, Operand, Program, Step, apply

APART = 2.0**-18
"""Relative widening of floating-point bounds, above the error of kernels' functions."""
NEAR = 1 - 2.0**-20
"""Beyond this part of its type's largest an integer counts as overflowed: the check is in float32, which is no more
exact."""
FINEST = 4096
"""The most elements of a captured array with bounds of their own; in longer arrays several share them."""


class Interval(NamedTuple):
    """Both may be the same object: then the whole block has this value."""

    low: Any
    high: Any

    @property
    def is_exact(self) -> bool:
        return self.low is self.high


def exactly(value: Any) -> Interval:
    return Interval(value, value)


def evaluate(
    program: Program,
    arrays: Sequence[jax.Array | None],
    known: Mapping[int, Interval],
    blocks: Mapping[int, int] | None = None,
) -> list[Interval]:
    """The interval of each slot, given those of the arguments; bounds broadcast against each other.

    arrays: the captured ones; nothing is known of None.
    blocks: arguments whose i-th interval is [i * size, (i + 1) * size), clipped to the tokens.
    """
    values = [known.get(i, _anything("float32" if i == SCORE else "int32")) for i in VARIABLES]

    def value(one: Operand) -> Interval:
        return exactly(one.value) if isinstance(one, Number) else values[one]

    for step in program.steps:
        inputs = [value(one) for one in step.inputs]
        if step.capture is None:
            values.append(_step(step, inputs))
        elif (array := arrays[step.capture]) is None:
            values.append(_anything(step.dtype))
        else:
            values.append(_read(step, inputs, array, values, blocks or {}))
    return values


def _step(step: Step, inputs: list[Interval]) -> Interval:
    if not _is_float(step.dtype) and all(one.is_exact and not _is_float(_dtype(one)) for one in inputs):
        return exactly(apply(step, *(one.low for one in inputs)))
    found = _RULES[step.name](jnp.dtype(step.dtype), *inputs)
    return _ordered(found) if _is_float(step.dtype) else found


def _dtype(one: Interval) -> Any:
    return jnp.result_type(one.low)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _anything(dtype: Any) -> Interval:
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return Interval(np.False_, np.True_)
    if _is_float(dtype):
        return Interval(np.asarray(np.nan, dtype), np.asarray(np.nan, dtype))
    return Interval(np.asarray(jnp.iinfo(dtype).min, dtype), np.asarray(jnp.iinfo(dtype).max, dtype))


def _where(known: Any, found: Interval, dtype: Any) -> Interval:
    """`found` where `known`, and unbounded elsewhere."""
    return Interval(
        *(jnp.where(known, one, other) for one, other in zip(found, _anything(dtype), strict=True))
    )


def _ordered(found: Interval) -> Interval:
    """Unknown where both bounds are infinite, as of infinity minus infinity, or one is NaN."""
    low, high = found
    known = ~(jnp.isnan(low) | jnp.isnan(high) | ((low == -jnp.inf) & (high == jnp.inf)))
    return Interval(jnp.where(known, low, np.nan), jnp.where(known, high, np.nan))


def _apart(low: Any, high: Any) -> Interval:
    dtype = jnp.result_type(low)
    part = np.asarray(max(APART, 4 * float(jnp.finfo(dtype).eps)), dtype)
    least = np.asarray(jnp.finfo(dtype).tiny, dtype)  # the GPU may flush smaller numbers

    def moved(x: Any, way: int) -> Any:
        return jnp.where(jnp.isfinite(x), x + way * (jnp.abs(x) * part + least), x)

    return Interval(moved(low, -1), moved(high, 1))


def _corners(fn: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    found = [fn(*jnp.broadcast_arrays(x, y)) for x in a for y in b]
    low = high = found[0]
    for one in found[1:]:
        low, high = jnp.minimum(low, one), jnp.maximum(high, one)
    return Interval(low, high)


def _estimate(one: Interval) -> Interval:
    return Interval(*(jnp.asarray(x).astype(jnp.float32) for x in one))


def _fitting(dtype: Any, found: Interval, estimate: Interval) -> Interval:
    """Integer bounds where the estimates show that none wrapped around."""
    info = jnp.iinfo(dtype)
    known = (estimate.high < info.max * NEAR) & (estimate.low > (info.min * NEAR if info.min else -0.5))
    return _where(known, found, dtype)


_RULES: dict[str, Callable[..., Interval]] = {}


def _rule(*names: str) -> Callable[[Callable[..., Interval]], Callable[..., Interval]]:
    def register(one: Callable[..., Interval]) -> Callable[..., Interval]:
        _RULES.update(dict.fromkeys(names, one))
        return one

    return register


def _calculated(fn: Callable[[Any, Any], Any], of_bounds: Callable[..., Interval]) -> Callable[..., Interval]:
    def rule(dtype: Any, a: Interval, b: Interval) -> Interval:
        found = of_bounds(fn, a, b)
        if _is_float(dtype):
            return _apart(*found)
        return _fitting(dtype, found, of_bounds(fn, _estimate(a), _estimate(b)))

    return rule


_RULES["add"] = _calculated(jnp.add, lambda fn, a, b: Interval(fn(a.low, b.low), fn(a.high, b.high)))
_RULES["sub"] = _calculated(jnp.subtract, lambda fn, a, b: Interval(fn(a.low, b.high), fn(a.high, b.low)))
_RULES["mul"] = _calculated(jnp.multiply, _corners)


@_rule("div")
def _(dtype, a, b):
    if _is_float(dtype):
        quotient = _corners(jnp.divide, a, b)
        return _where((b.low > 0) | (b.high < 0), _apart(*quotient), dtype)
    return _where(b.low > 0, _corners(lax.div, a, _above(b)), dtype)


def _above(b: Interval) -> Interval:
    """Divisors, as far as they are above 0."""
    return Interval(jnp.maximum(b.low, 1), jnp.maximum(b.high, 1))


@_rule("floor_divide")
def _(dtype, a, b):
    return _where(b.low > 0, _corners(jnp.floor_divide, a, _above(b)), dtype)


@_rule("remainder")
def _(dtype, a, b):
    by = _above(b)
    same = jnp.floor_divide(a.low, by.low) == jnp.floor_divide(a.high, by.low)
    same &= by.low == by.high
    within = (jnp.remainder(x, by.low) for x in a)
    found = Interval(*(jnp.where(same, x, y) for x, y in zip(within, (0, by.high - 1), strict=True)))
    return _where(b.low > 0, found, dtype)


@_rule("rem")
def _(dtype, a, b):
    """Of a sign as the dividend's."""
    if _is_float(dtype):
        return _anything(dtype)
    most = _above(b).high - 1
    unsigned = _RULES["remainder"](dtype, a, b)
    signed = Interval(jnp.where(a.low < 0, -most, 0), jnp.where(a.high > 0, most, 0))
    found = Interval(*(jnp.where(a.low >= 0, x, y) for x, y in zip(unsigned, signed, strict=True)))
    return _where(b.low > 0, found, dtype)


@_rule("neg")
def _(dtype, a):
    found = Interval(-a.high, -a.low)
    return found if _is_float(dtype) else _fitting(dtype, found, Interval(*(-x for x in _estimate(a)[::-1])))


@_rule("abs")
def _(dtype, a):
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return a
    found = Interval(jnp.maximum(jnp.maximum(a.low, -a.high), 0), jnp.maximum(-a.low, a.high))
    return found if _is_float(dtype) else _where(a.low > jnp.iinfo(dtype).min, found, dtype)


@_rule("min")
def _(dtype, a, b):
    return Interval(jnp.minimum(a.low, b.low), jnp.minimum(a.high, b.high))


@_rule("max")
def _(dtype, a, b):
    return Interval(jnp.maximum(a.low, b.low), jnp.maximum(a.high, b.high))


for _name, _fn in {"floor": jnp.floor, "ceil": jnp.ceil, "sign": jnp.sign}.items():
    _RULES[_name] = lambda dtype, a, fn=_fn: Interval(fn(a.low), fn(a.high))
for _name, _fn in {
    "sqrt": jnp.sqrt, "exp": jnp.exp, "exp2": jnp.exp2, "log": jnp.log, "log1p": jnp.log1p,
    "tanh": jnp.tanh, "logistic": jax.nn.sigmoid,
}.items():  # fmt: skip
    _RULES[_name] = lambda dtype, a, fn=_fn: _apart(fn(a.low), fn(a.high))


@_rule("rsqrt")
def _(dtype, a):
    return _where(a.low >= 0, _apart(lax.rsqrt(jnp.asarray(a.high)), lax.rsqrt(jnp.asarray(a.low))), dtype)


@_rule("sin", "cos")
def _(dtype, a):
    ends = jnp.ones_like(a.low)
    return _where(jnp.isfinite(a.low) & jnp.isfinite(a.high), _apart(-ends, ends), dtype)


@_rule("lt")
def _(dtype, a, b):
    return Interval(jnp.less(a.high, b.low), ~jnp.greater_equal(a.low, b.high))


@_rule("le")
def _(dtype, a, b):
    return Interval(jnp.less_equal(a.high, b.low), ~jnp.greater(a.low, b.high))


@_rule("gt")
def _(dtype, a, b):
    return _RULES["lt"](dtype, b, a)


@_rule("ge")
def _(dtype, a, b):
    return _RULES["le"](dtype, b, a)


@_rule("eq")
def _(dtype, a, b):
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Interval(same, ~(jnp.less(a.high, b.low) | jnp.less(b.high, a.low)))


@_rule("ne")
def _(dtype, a, b):
    same = _RULES["eq"](dtype, a, b)
    return Interval(~same.high, ~same.low)


@_rule("not")
def _(dtype, a):
    return Interval(jnp.invert(a.high), jnp.invert(a.low))


@_rule("and")
def _(dtype, a, b):
    if dtype == jnp.bool_:
        return Interval(a.low & b.low, a.high & b.high)
    # A number that is not negative keeps some of its bits; a mask of the lowest is a remainder.
    for mask, of in ((b, a), (a, b)):
        if mask.is_exact and jnp.ndim(mask.low) == 0 and not isinstance(mask.low, Tracer):
            size = int(mask.low) + 1
            if size > 0 and size & (size - 1) == 0 and size - 1 < jnp.iinfo(dtype).max:
                return _RULES["remainder"](dtype, of, exactly(np.asarray(size, dtype)))
    least = jnp.zeros_like(a.low + b.low)
    most = jnp.where(a.low < 0, b.high, jnp.where(b.low < 0, a.high, jnp.minimum(a.high, b.high)))
    return _where((a.low >= 0) | (b.low >= 0), Interval(least, most), dtype)


@_rule("or")
def _(dtype, a, b):
    return Interval(a.low | b.low, a.high | b.high) if dtype == jnp.bool_ else _anything(dtype)


@_rule("xor")
def _(dtype, a, b):
    return _RULES["ne"](dtype, a, b) if dtype == jnp.bool_ else _anything(dtype)


def _shifts(b: Interval, dtype: Any) -> tuple[Any, Interval]:
    most = 8 * jnp.dtype(dtype).itemsize - 1
    return (b.low >= 0) & (b.high <= most), Interval(*(jnp.clip(x, 0, most) for x in b))


@_rule("shift_right_arithmetic", "shift_right_logical")
def _(dtype, a, b):
    fits, by = _shifts(b, dtype)
    return _where(fits & (a.low >= 0), _corners(jnp.right_shift, a, by), dtype)


@_rule("shift_left")
def _(dtype, a, b):
    fits, by = _shifts(b, dtype)
    estimate = _corners(lambda x, y: x * jnp.exp2(y), _estimate(a), _estimate(by))
    found = _fitting(dtype, _corners(jnp.left_shift, a, by), estimate)
    return _where(fits, found, dtype)


@_rule("select")
def _(dtype, which, no, yes):
    def chosen(no: Any, yes: Any, either: Any) -> Any:
        return jnp.where(which.low, yes, jnp.where(which.high, either, no))

    lowest, highest = jnp.minimum(no.low, yes.low), jnp.maximum(no.high, yes.high)
    return Interval(chosen(no.low, yes.low, lowest), chosen(no.high, yes.high, highest))


@_rule("bitcast")
def _(dtype, a):
    return _anything(dtype)


@_rule("convert")
def _(dtype, a):
    given = _dtype(a)
    if dtype == jnp.bool_:
        return _RULES["ne"](dtype, a, exactly(np.zeros((), given)))
    converted = Interval(*(jnp.asarray(x).astype(dtype) for x in a))
    if given == jnp.bool_:
        return converted
    if _is_float(dtype):
        narrower = _is_float(given) and jnp.finfo(given).bits > jnp.finfo(dtype).bits
        return _apart(*converted) if narrower else converted
    estimate = _estimate(a)
    if (
        not _is_float(given)
        and jnp.iinfo(given).min >= jnp.iinfo(dtype).min
        and (jnp.iinfo(given).max <= jnp.iinfo(dtype).max)
    ):
        return converted
    return _fitting(dtype, converted, Interval(jnp.floor(estimate.low), jnp.ceil(estimate.high)))


def _read(
    step: Step, index: list[Interval], array: jax.Array, values: list[Interval], blocks: Mapping[int, int]
) -> Interval:
    if step.dtype == "bool":
        array = array.astype(jnp.int8)
    ranged = [axis for axis, place in enumerate(index) if not place.is_exact]
    inside = [
        Interval(*(jnp.clip(x, 0, size - 1) for x in i)) for i, size in zip(index, array.shape, strict=True)
    ]
    exact = {axis: inside[axis].low for axis in range(array.ndim) if axis not in ranged}
    if not ranged:
        found = exactly(array[tuple(exact.values())])
    elif len(ranged) > 1:
        whole = (jnp.min(array, axis=ranged), jnp.max(array, axis=ranged))
        found = Interval(*(one[tuple(exact.values())] for one in whole))
    else:
        (axis,) = ranged
        along, places = jnp.moveaxis(array, axis, 0), tuple(exact.values())
        argument = step.inputs[axis]
        if isinstance(argument, int) and argument in blocks:
            found = _of_blocks(along, places, blocks[argument], values[argument])
        else:
            found = _of_ranges(along, places, inside[axis])
    if step.dtype != "bool":
        return found
    return exactly(found.low != 0) if found.is_exact else Interval(found.low != 0, found.high != 0)


def _of_blocks(array: jax.Array, places: tuple[Any, ...], size: int, known: Interval) -> Interval:
    """Bounds of a captured array at indices that are blocks, as in `known`. Beyond the end the last element counts."""
    count = max(known.low.shape)
    missing = max(count * size - array.shape[0], 0)
    array = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], mode="edge")[: count * size]
    parts = array.reshape(count, size, *array.shape[1:])
    which = jnp.arange(count).reshape(known.low.shape)
    return Interval(*(fn(parts, axis=1)[(which, *places)] for fn in (jnp.min, jnp.max)))


def _of_ranges(array: jax.Array, places: tuple[Any, ...], of: Interval) -> Interval:
    """Bounds over any ranges along the first dimension: two overlapping ranges, each a power of two long, cover one."""
    shared = 1 << max(-(-array.shape[0] // FINEST) - 1, 0).bit_length()
    count = -(-array.shape[0] // shared)
    padded = jnp.pad(array, [(0, count * shared - array.shape[0]), *[(0, 0)] * (array.ndim - 1)], mode="edge")
    parts = padded.reshape(count, shared, *array.shape[1:])
    first, last = (x // shared for x in of)
    level = jnp.sum((last - first + 1)[..., None] >= 2 ** np.arange(1, count.bit_length()), axis=-1)
    found = []
    for within, between in ((jnp.min, jnp.minimum), (jnp.max, jnp.maximum)):
        levels = [within(parts, axis=1)]
        for i in range(count.bit_length() - 1):
            # The last elements have no partner; no range of this length begins there.
            partner = jnp.roll(levels[-1], -(2**i), axis=0)
            levels.append(between(levels[-1], partner))
        table = jnp.stack(levels)
        ends = (table[(level, place, *places)] for place in (first, last - 2**level + 1))
        found.append(between(*ends))
    return Interval(*found)
