"""Primitives that are not steps of a program themselves: other spellings of steps, and the ways in which JAX reads an
element of an array. `tracer` is trace.py's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn.mods.program import Number, Operand

MOST_POWER = 16


class View(NamedTuple):
    """A captured array, indexed along some of its dimensions."""

    array: Any
    index: tuple[Operand | None, ...]
    dims: tuple[int, ...]
    """The array's remaining dimensions, which are not indexed yet."""
    inside: Operand | None = None
    """False where an index lies outside: there `fill` is read."""
    fill: Number | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if self.index[d] is not None else self.array.shape[d] for d in self.dims)


class Vector(NamedTuple):
    """A vector of a few scalars, a gather's index."""

    elements: tuple[Operand, ...]


class Array(NamedTuple):
    """Values that depend on no argument."""

    array: Any


def view(value: Array) -> View:
    rank = len(np.shape(value.array))
    return View(value.array, (None,) * rank, tuple(range(rank)))


def _viewed(value: Any) -> View:
    return view(value) if isinstance(value, Array) else value


RULES: dict[str, Callable[..., Any]] = {}


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(one: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, one))
        return one

    return register


@_rule("convert_element_type", "bitcast_convert_type")
def _(tracer: Any, equation, value):
    name = "convert" if equation.primitive.name == "convert_element_type" else "bitcast"
    if isinstance(value, Vector):
        dtype = equation.params["new_dtype"]
        return Vector(tuple(tracer.build.step(name, one, dtype=dtype) for one in value.elements))
    if not isinstance(value, View) or all(side == 1 for side in value.shape):
        scalar = tracer.scalar(value)
        if tracer.build.dtype(scalar) == equation.outvars[0].aval.dtype:
            return scalar
        value = scalar
    return tracer.step(name, equation, [value])


@_rule("select_n")
def _(tracer: Any, equation, which, *cases):
    which, found, dtype = tracer.scalar(which), tracer.scalar(cases[0]), equation.outvars[0].aval.dtype
    step = tracer.build.step
    kind = tracer.build.dtype(which)
    for i, case in enumerate(cases[1:], 1):
        here = which if kind == jnp.bool_ else step("ge", which, Number.of(i, kind), dtype="bool")
        found = step("select", here, found, tracer.scalar(case), dtype=dtype)
    return found


@_rule("clamp")
def _(tracer: Any, equation, least, value, most):
    dtype, step = equation.outvars[0].aval.dtype, tracer.build.step
    return step(
        "min", step("max", *map(tracer.scalar, (value, least)), dtype=dtype), tracer.scalar(most), dtype=dtype
    )


@_rule("add_any")
def _(tracer: Any, equation, left, right):
    return tracer.step("add", equation, [left, right])


@_rule("square")
def _(tracer: Any, equation, value):
    return tracer.step("mul", equation, [value, value])


@_rule("one_minus_square")
def _(tracer: Any, equation, value):
    dtype = equation.outvars[0].aval.dtype
    return tracer.step("sub", equation, [Number.of(1, dtype), tracer.step("mul", equation, [value, value])])


@_rule("integer_pow")
def _(tracer: Any, equation, value):
    exponent, dtype = equation.params["y"], equation.outvars[0].aval.dtype
    if abs(exponent) > MOST_POWER:
        tracer.refuse(f"powers of at most {MOST_POWER}", str(exponent))
    power = Number.of(1, dtype)
    for i in range(abs(exponent)):
        power = value if i == 0 else tracer.step("mul", equation, [power, value])
    return power if exponent >= 0 else tracer.step("div", equation, [Number.of(1, dtype), power])


@_rule("pow")
def _(tracer: Any, equation, base, exponent):
    if isinstance(exponent, Number) and exponent.value == 0.5:
        return tracer.step("sqrt", equation, [base])
    if not (isinstance(base, Number) and base.value > 0 and not tracer.is_integer(equation.invars[1])):
        tracer.refuse("powers of a number above 0, or whole powers", "the primitive 'pow'")
    factor = Number.of(np.log2(float(base.value)), equation.outvars[0].aval.dtype)
    return tracer.step("exp2", equation, [tracer.step("mul", equation, [exponent, factor])])


@_rule("is_finite")
def _(tracer: Any, equation, value):
    dtype = tracer.build.dtype(tracer.scalar(value))
    size = tracer.build.step("abs", tracer.scalar(value), dtype=dtype)
    return tracer.step("lt", equation, [size, Number.of(np.inf, dtype)])


@_rule("reduce_sum")
def _(tracer: Any, equation, value):
    """Derivatives of scalars have this inside a mesh."""
    if equation.invars[0].aval.shape != ():
        tracer.refuse("elementwise operations of positions", "the primitive 'reduce_sum'")
    return value


@_rule("cond")
def _(tracer: Any, equation, which, *operands):
    """Both branches, and a choice: they are elementwise."""
    branches = equation.params["branches"]
    if len(equation.outvars) != 1:
        tracer.refuse("a lax.cond that returns one scalar", str(len(equation.outvars)))
    found = [tracer.evaluate(branch, operands)[0] for branch in branches]
    return RULES["select_n"](tracer, equation, which, *found)


@_rule("broadcast_in_dim", "reshape", "expand_dims")
def _(tracer: Any, equation, value, *_):
    shape = equation.outvars[0].aval.shape
    if isinstance(value, Vector) and shape == (len(value.elements),):
        return value
    if isinstance(value, View) and shape == value.shape:
        return value
    if any(side != 1 for side in shape):
        tracer.refuse("single elements of captured arrays", f"an array of shape {list(shape)}")
    scalar = tracer.scalar(value)
    return scalar if shape == () else Vector((scalar,))


@_rule("concatenate")
def _(tracer: Any, equation, *parts):
    return Vector(tuple(one for part in parts for one in elements(tracer, part)))


def elements(tracer: Any, value: Any) -> tuple[Operand, ...]:
    if isinstance(value, Vector):
        return value.elements
    if isinstance(value, Array) and np.ndim(value.array) == 1:
        one = view(value)
        places = (Number.of(i, "int32") for i in range(one.shape[0]))
        return tuple(tracer.scalar(one._replace(index=(place,))) for place in places)
    return (tracer.scalar(value),)


@_rule("squeeze")
def _(tracer: Any, equation, value):
    gone = equation.params["dimensions"]
    if isinstance(value, Vector):
        return tracer.scalar(value)
    value = _viewed(value)
    left = tuple(d for i, d in enumerate(value.dims) if i not in gone)
    index = tuple(
        Number.of(0, "int32") if place is None and d in value.dims and d not in left else place
        for d, place in enumerate(value.index)
    )
    value = value._replace(dims=left, index=index)
    return value if left else tracer.scalar(value)


@_rule("dynamic_slice")
def _(tracer: Any, equation, value, *starts):
    sizes = equation.params["slice_sizes"]
    return placed(tracer, value, {i: tracer.scalar(start) for i, start in enumerate(starts)}, sizes)


@_rule("gather")
def _(tracer: Any, equation, value, places):
    params = equation.params
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims or isinstance(value, int | Number | Vector):
        tracer.refuse("single elements of captured arrays", "a gather of several")
    value = _viewed(value)
    starts = dict(zip(numbers.start_index_map, elements(tracer, places), strict=True))
    step, inside = tracer.build.step, value.inside
    fills = "FILL" in str(params["mode"])
    if fills:
        for i, start in starts.items():
            dtype, most = tracer.build.dtype(start), value.shape[i] - params["slice_sizes"][i]
            checks = (
                step("ge", start, Number.of(0, dtype), dtype="bool"),
                step("le", start, Number.of(most, dtype), dtype="bool"),
            )
            for check in checks:
                inside = check if inside is None else step("and", inside, check, dtype="bool")
    fill = (
        Number.of(_fill(params["fill_value"], value.array.dtype), value.array.dtype) if fills else value.fill
    )
    found = placed(tracer, value._replace(inside=inside, fill=fill), starts, params["slice_sizes"])
    left = tuple(d for i, d in enumerate(found.dims) if i not in numbers.collapsed_slice_dims)
    found = found._replace(dims=left)
    return found if left else tracer.scalar(found)


def _fill(given: Any, dtype: Any) -> Any:
    """What jnp fills with."""
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == jnp.bool_:
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


def placed(tracer: Any, value: Any, starts: dict[int, Operand], sizes: Sequence[int]) -> View:
    if isinstance(value, int | Number | Vector):
        tracer.refuse("single elements of captured arrays", "a slice of positions")
    value = _viewed(value)
    index = list(value.index)
    for i, start in starts.items():
        if sizes[i] == value.shape[i]:
            if sizes[i] == 1 and index[value.dims[i]] is None:
                index[value.dims[i]] = Number.of(0, "int32")
            continue
        if sizes[i] != 1:
            got = f"a slice of {sizes[i]} of {value.shape[i]}"
            tracer.refuse("single elements of captured arrays", got)
        index[value.dims[i]] = start
    return value._replace(index=tuple(index))
