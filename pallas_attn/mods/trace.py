"""From a function of positions to a `Program` and the arrays that it captures.

The function is traced once, at scalars. What hangs on none of its arguments is worked out as it stands, outside, and
counts as captured; everything else must be elementwise, or read single elements of captured arrays.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from pallas_attn._call.checks import fail, shown
from pallas_attn.mods.program import (
    CONVERSIONS,
    NAMES,
    OPERATIONS,
    VARIABLES,
    Builder,
    Capture,
    Number,
    Operand,
    Program,
)

CAPTURED = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bfloat16", "float16", "float32")
CALLS = (
    *(
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    ),
    *("checkpoint", "remat", "remat2"),
)
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
WHOLE = ("floor_divide", "remainder")  # what jnp calls by these names is one step, of integers
SAME = (
    "copy",
    "copy_p",
    "stop_gradient",
    "reduce_precision",
    "optimization_barrier",
    "pvary",
    "pcast",
    "reshard",
)
MOST_POWER = 16

type Arrays = tuple[jax.Array, ...]


class Traced(NamedTuple):
    """A function, ready to be evaluated."""

    program: Program
    arrays: Arrays


class _View(NamedTuple):
    """A captured array of which the places along some dimensions are known."""

    array: Any
    index: tuple[Operand | None, ...]
    dims: tuple[int, ...]
    """Which of the array's dimensions are left; of those whose place is known one element is."""
    inside: Operand | None = None
    """False where a place lies outside, of which `fill` is read."""
    fill: Number | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if self.index[d] is not None else self.array.shape[d] for d in self.dims)


class _Vector(NamedTuple):
    """A few scalars in a row, which a gather takes for its place."""

    elements: tuple[Operand, ...]


class _Array(NamedTuple):
    """What hangs on no argument."""

    array: Any


def trace(function: str, argument: str, mod: Any) -> Traced:
    """`argument` of the public `function` is "score_mod" or "mask_mod" and says what kind of function it is."""
    names = NAMES if argument == "score_mod" else NAMES[1:]
    expected = f"a function of ({', '.join(names)})"
    if not callable(mod):
        fail(function, argument, expected, shown(mod), TypeError)
    try:
        inspect.signature(mod).bind(*names)
    except TypeError:
        fail(function, argument, expected, f"one of {inspect.signature(mod)}", TypeError)
    except ValueError:
        pass  # it has no signature to look at
    kinds = ["float32" if name == "score" else "int32" for name in names]
    closed, out = jax.make_jaxpr(mod, return_shape=True)(*(jax.ShapeDtypeStruct((), kind) for kind in kinds))
    wanted = "float32" if argument == "score_mod" else "bool"
    leaves = jax.tree.leaves(out)
    if len(leaves) != 1 or leaves[0].shape != () or leaves[0].dtype != wanted:
        got = " and ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves) or "nothing"
        fail(function, argument, f"a function that returns a {wanted} scalar", got, TypeError)
    return Tracer(function, argument, closed.jaxpr).run(closed, VARIABLES[-len(names) :])


class Tracer:
    def __init__(self, function: str, argument: str, jaxpr: Any):
        self.function, self.argument, self.jaxpr = function, argument, jaxpr
        self.build = Builder()
        self.arrays: list[Any] = []
        self.numbers: dict[int, int] = {}

    def refuse(self, expected: str, got: str, error: type[Exception] = ValueError) -> NoReturn:
        fail(self.function, self.argument, expected, got, error)

    def run(self, closed: ClosedJaxpr, arguments: Sequence[int]) -> Traced:
        (result,) = self.evaluate(closed, arguments)
        found = self.scalar(result)
        arrays = tuple(jnp.asarray(array) for array in self.arrays)
        shapes = tuple(Capture(array.shape, jnp.dtype(array.dtype).name) for array in arrays)
        return Traced(self.build.only((found,), shapes), arrays)

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_Array, closed.consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return values[atom]
            aval: Any = atom.aval
            return Number.of(atom.val, aval.dtype) if np.ndim(atom.val) == 0 else _Array(atom.val)

        for equation in jaxpr.eqns:
            found = self.equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "broadcast_in_dim" and isinstance(inputs[0], Number) and params["shape"] == (1,):
            return [_Vector((inputs[0],))]
        numbers = bool(inputs) and all(isinstance(one, Number) for one in inputs)
        if all(isinstance(one, _Array | Number) for one in inputs) and not (
            numbers and self._is_step(equation)
        ):
            return self._outside(equation, inputs)
        if name in CALLS:
            if params.get("name") in WHOLE and all(self._is_integer(var) for var in equation.invars):
                return [self._step(params["name"], equation, inputs)]
            inner = next(params[key] for key in INNER if key in params)
            return self.evaluate(ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner, inputs)
        if name in SAME:
            return inputs
        if name in _RULES:
            return [_RULES[name](self, equation, *inputs)]
        if name not in OPERATIONS and name not in CONVERSIONS:
            self.refuse("elementwise operations of positions", f"the primitive {name!r}")
        return [self._step(name, equation, inputs)]

    def _is_step(self, equation: Any) -> bool:
        """Of numbers alone: whether it gives a number again, which is then compiled in."""
        return all(var.aval.shape == () for var in (*equation.invars, *equation.outvars))

    def _is_integer(self, atom: Any) -> bool:
        return jnp.issubdtype(atom.aval.dtype, jnp.integer)

    def _outside(self, equation: Any, inputs: list[Any]) -> list[Any]:
        variables = [atom for atom in equation.invars if not isinstance(atom, Literal)]
        given = [
            one.value if isinstance(one, Number) else one.array
            for one, atom in zip(inputs, equation.invars, strict=True)
            if not isinstance(atom, Literal)
        ]
        alone = self.jaxpr.replace(
            constvars=[],
            invars=list(dict.fromkeys(variables)),
            outvars=list(equation.outvars),
            eqns=[equation],
            effects=equation.effects,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        by_variable = dict(zip(variables, given, strict=True))
        return [_Array(one) for one in jaxpr_as_fun(ClosedJaxpr(alone, ()))(*by_variable.values())]

    def scalar(self, value: Any) -> Operand:
        """A slot or a number, of a value of one element."""
        if isinstance(value, int | Number):
            return value
        if isinstance(value, _Vector) and len(value.elements) == 1:
            return value.elements[0]
        if isinstance(value, _Array):
            value = _view(value)
        if not isinstance(value, _View) or any(side != 1 for side in value.shape):
            self.refuse(
                "single elements of captured arrays",
                "a captured array that is worked on as a whole, or in slices",
            )
        index = [Number.of(0, "int32") if i is None else i for i in value.index]
        found = self.read(value.array, index)
        if value.inside is None or value.fill is None:
            return found
        return self.build.step("select", value.inside, value.fill, found, dtype=value.fill.dtype)

    def read(self, array: Any, index: list[Operand]) -> Operand:
        number = self.numbers.get(id(array))
        if number is None:
            dtype = jnp.dtype(array.dtype).name
            if dtype not in CAPTURED:
                self.refuse(f"captured arrays of {', '.join(CAPTURED)}", dtype, TypeError)
            if 0 in array.shape:
                self.refuse("captured arrays without empty dimensions", f"shape {list(array.shape)}")
            number = self.numbers[id(array)] = len(self.arrays)
            self.arrays.append(array)
        inside = [self.inside(i, size) for i, size in zip(index, array.shape, strict=True)]
        return self.build.step("read", *inside, dtype=array.dtype, capture=number)

    def inside(self, place: Operand, size: int) -> Operand:
        """int32, and moved inside where it is not."""
        if self.build.dtype(place) != jnp.int32:
            place = self.build.step("convert", place, dtype="int32")
        place = self.build.step("max", place, Number.of(0, "int32"), dtype="int32")
        return self.build.step("min", place, Number.of(size - 1, "int32"), dtype="int32")

    def _step(self, name: str, equation: Any, inputs: list[Any]) -> Operand:
        (out,) = equation.outvars
        if jnp.dtype(out.aval.dtype).itemsize > 4:
            self.refuse("numbers of at most 32 bits", f"{out.aval.dtype}", TypeError)
        if out.aval.shape != ():
            self.refuse(
                "single elements of captured arrays", f"{name!r} of an array of shape {list(out.aval.shape)}"
            )
        return self.build.step(name, *map(self.scalar, inputs), dtype=out.aval.dtype)


def _view(value: _Array) -> _View:
    rank = len(np.shape(value.array))
    return _View(value.array, (None,) * rank, tuple(range(rank)))


_RULES: dict[str, Callable[..., Any]] = {}


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(one: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(names, one))
        return one

    return register


@_rule("convert_element_type", "bitcast_convert_type")
def _(tracer: Tracer, equation, value):
    name = "convert" if equation.primitive.name == "convert_element_type" else "bitcast"
    if isinstance(value, _Vector):
        dtype = equation.params["new_dtype"]
        return _Vector(tuple(tracer.build.step(name, one, dtype=dtype) for one in value.elements))
    if not isinstance(value, _View) or all(side == 1 for side in value.shape):
        scalar = tracer.scalar(value)
        if tracer.build.dtype(scalar) == equation.outvars[0].aval.dtype:
            return scalar
        value = scalar
    return tracer._step(name, equation, [value])


@_rule("select_n")
def _(tracer: Tracer, equation, which, *cases):
    which, found, dtype = tracer.scalar(which), tracer.scalar(cases[0]), equation.outvars[0].aval.dtype
    step = tracer.build.step
    kind = tracer.build.dtype(which)
    for i, case in enumerate(cases[1:], 1):
        here = which if kind == jnp.bool_ else step("ge", which, Number.of(i, kind), dtype="bool")
        found = step("select", here, found, tracer.scalar(case), dtype=dtype)
    return found


@_rule("clamp")
def _(tracer: Tracer, equation, least, value, most):
    dtype, step = equation.outvars[0].aval.dtype, tracer.build.step
    return step(
        "min", step("max", *map(tracer.scalar, (value, least)), dtype=dtype), tracer.scalar(most), dtype=dtype
    )


@_rule("add_any")
def _(tracer: Tracer, equation, left, right):
    return tracer._step("add", equation, [left, right])


@_rule("square")
def _(tracer: Tracer, equation, value):
    return tracer._step("mul", equation, [value, value])


@_rule("one_minus_square")
def _(tracer: Tracer, equation, value):
    dtype = equation.outvars[0].aval.dtype
    return tracer._step("sub", equation, [Number.of(1, dtype), tracer._step("mul", equation, [value, value])])


@_rule("integer_pow")
def _(tracer: Tracer, equation, value):
    exponent, dtype = equation.params["y"], equation.outvars[0].aval.dtype
    if abs(exponent) > MOST_POWER:
        tracer.refuse(f"powers of at most {MOST_POWER}", str(exponent))
    power = Number.of(1, dtype)
    for i in range(abs(exponent)):
        power = value if i == 0 else tracer._step("mul", equation, [power, value])
    return power if exponent >= 0 else tracer._step("div", equation, [Number.of(1, dtype), power])


@_rule("pow")
def _(tracer: Tracer, equation, base, exponent):
    if isinstance(exponent, Number) and exponent.value == 0.5:
        return tracer._step("sqrt", equation, [base])
    if not (isinstance(base, Number) and base.value > 0 and not tracer._is_integer(equation.invars[1])):
        tracer.refuse("powers of a number above 0, or whole powers", "the primitive 'pow'")
    factor = Number.of(np.log2(float(base.value)), equation.outvars[0].aval.dtype)
    return tracer._step("exp2", equation, [tracer._step("mul", equation, [exponent, factor])])


@_rule("is_finite")
def _(tracer: Tracer, equation, value):
    dtype = tracer.build.dtype(tracer.scalar(value))
    size = tracer.build.step("abs", tracer.scalar(value), dtype=dtype)
    return tracer._step("lt", equation, [size, Number.of(np.inf, dtype)])


@_rule("reduce_sum")
def _(tracer: Tracer, equation, value):
    """What derivatives have of scalars where there is a mesh."""
    if equation.invars[0].aval.shape != ():
        tracer.refuse("elementwise operations of positions", "the primitive 'reduce_sum'")
    return value


@_rule("cond")
def _(tracer: Tracer, equation, which, *operands):
    """Both branches, and a choice: they are elementwise."""
    branches = equation.params["branches"]
    if len(equation.outvars) != 1:
        tracer.refuse("a lax.cond that returns one scalar", str(len(equation.outvars)))
    found = [tracer.evaluate(branch, operands)[0] for branch in branches]
    return _RULES["select_n"](tracer, equation, which, *found)


@_rule("broadcast_in_dim", "reshape", "expand_dims")
def _(tracer: Tracer, equation, value, *_):
    shape = equation.outvars[0].aval.shape
    if isinstance(value, _Vector) and shape == (len(value.elements),):
        return value
    if isinstance(value, _View) and shape == value.shape:
        return value
    if any(side != 1 for side in shape):
        tracer.refuse("single elements of captured arrays", f"an array of shape {list(shape)}")
    scalar = tracer.scalar(value)
    return scalar if shape == () else _Vector((scalar,))


@_rule("concatenate")
def _(tracer: Tracer, equation, *parts):
    return _Vector(tuple(one for part in parts for one in _elements(tracer, part)))


def _elements(tracer: Tracer, value: Any) -> tuple[Operand, ...]:
    if isinstance(value, _Vector):
        return value.elements
    if isinstance(value, _Array) and np.ndim(value.array) == 1:
        one = _view(value)
        places = (Number.of(i, "int32") for i in range(one.shape[0]))
        return tuple(tracer.scalar(one._replace(index=(place,))) for place in places)
    return (tracer.scalar(value),)


@_rule("squeeze")
def _(tracer: Tracer, equation, value):
    gone = equation.params["dimensions"]
    if isinstance(value, _Vector):
        return tracer.scalar(value)
    value = _view(value) if isinstance(value, _Array) else value
    left = tuple(d for i, d in enumerate(value.dims) if i not in gone)
    index = tuple(
        Number.of(0, "int32") if place is None and d in value.dims and d not in left else place
        for d, place in enumerate(value.index)
    )
    value = value._replace(dims=left, index=index)
    return value if left else tracer.scalar(value)


@_rule("dynamic_slice")
def _(tracer: Tracer, equation, value, *starts):
    sizes = equation.params["slice_sizes"]
    return _placed(tracer, value, {i: tracer.scalar(start) for i, start in enumerate(starts)}, sizes)


@_rule("gather")
def _(tracer: Tracer, equation, value, places):
    params = equation.params
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims or isinstance(value, int | Number | _Vector):
        tracer.refuse("single elements of captured arrays", "a gather of several")
    value = _view(value) if isinstance(value, _Array) else value
    starts = dict(zip(numbers.start_index_map, _elements(tracer, places), strict=True))
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
    found = _placed(tracer, value._replace(inside=inside, fill=fill), starts, params["slice_sizes"])
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


def _placed(tracer: Tracer, value: Any, starts: dict[int, Operand], sizes: Sequence[int]) -> _View:
    if isinstance(value, int | Number | _Vector):
        tracer.refuse("single elements of captured arrays", "a slice of positions")
    value = _view(value) if isinstance(value, _Array) else value
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
