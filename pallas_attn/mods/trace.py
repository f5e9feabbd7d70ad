"""From a function of positions to a `Program` and the arrays that it captures.

The function is traced once, with scalars. Values that depend on none of its arguments are computed outside and count as
captured; everything else must be elementwise, or read single elements of captured arrays.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from pallas_attn._call import sharding
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
from pallas_attn.mods.rules import RULES, Array, Vector, View, view

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
WHOLE = ("floor_divide", "remainder")  # jnp's functions of these names are single steps on integers
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

type Arrays = tuple[jax.Array, ...]


class Traced(NamedTuple):
    """A traced function, ready to be evaluated."""

    program: Program
    arrays: Arrays


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
        # Any of their elements may be read anywhere.
        arrays = tuple(sharding.whole(jnp.asarray(array), np.ndim(array)) for array in self.arrays)
        shapes = tuple(Capture(array.shape, jnp.dtype(array.dtype).name) for array in arrays)
        return Traced(self.build.only((found,), shapes), arrays)

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(Array, closed.consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return values[atom]
            aval: Any = atom.aval
            return Number.of(atom.val, aval.dtype) if np.ndim(atom.val) == 0 else Array(atom.val)

        for equation in jaxpr.eqns:
            found = self.equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "broadcast_in_dim" and isinstance(inputs[0], Number) and params["shape"] == (1,):
            return [Vector((inputs[0],))]
        numbers = bool(inputs) and all(isinstance(one, Number) for one in inputs)
        if all(isinstance(one, Array | Number) for one in inputs) and not (
            numbers and self._is_step(equation)
        ):
            return self._outside(equation, inputs)
        if name in CALLS:
            if params.get("name") in WHOLE and all(self.is_integer(var) for var in equation.invars):
                return [self.step(params["name"], equation, [self.as_dtype(one, equation) for one in inputs])]
            inner = next(params[key] for key in INNER if key in params)
            return self.evaluate(ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner, inputs)
        if name in SAME:
            return inputs
        if name in RULES:
            return [RULES[name](self, equation, *inputs)]
        if name not in OPERATIONS and name not in CONVERSIONS:
            self.refuse("elementwise operations of positions", f"the primitive {name!r}")
        return [self.step(name, equation, inputs)]

    def _is_step(self, equation: Any) -> bool:
        """Whether an equation of constants gives a constant, which is then compiled in."""
        return all(var.aval.shape == () for var in (*equation.invars, *equation.outvars))

    def as_dtype(self, value: Any, equation: Any) -> Operand:
        """In the result's dtype: Python numbers are 64 bits wide where such types are enabled."""
        operand, dtype = self.scalar(value), equation.outvars[0].aval.dtype
        if isinstance(operand, Number):
            return Number.of(operand.value, dtype)
        return (
            operand
            if self.build.dtype(operand) == dtype
            else self.build.step("convert", operand, dtype=dtype)
        )

    def is_integer(self, atom: Any) -> bool:
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
        return [Array(one) for one in jaxpr_as_fun(ClosedJaxpr(alone, ()))(*by_variable.values())]

    def scalar(self, value: Any) -> Operand:
        """A slot or a number, of a value of one element."""
        if isinstance(value, int | Number):
            return value
        if isinstance(value, Vector) and len(value.elements) == 1:
            return value.elements[0]
        if isinstance(value, Array):
            value = view(value)
        if not isinstance(value, View) or any(side != 1 for side in value.shape):
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
        """int32, clipped into the array."""
        if self.build.dtype(place) != jnp.int32:
            place = self.build.step("convert", place, dtype="int32")
        place = self.build.step("max", place, Number.of(0, "int32"), dtype="int32")
        return self.build.step("min", place, Number.of(size - 1, "int32"), dtype="int32")

    def step(self, name: str, equation: Any, inputs: list[Any]) -> Operand:
        (out,) = equation.outvars
        if jnp.dtype(out.aval.dtype).itemsize > 4:
            self.refuse("numbers of at most 32 bits", f"{out.aval.dtype}", TypeError)
        if out.aval.shape != ():
            self.refuse(
                "single elements of captured arrays", f"{name!r} of an array of shape {list(out.aval.shape)}"
            )
        return self.build.step(name, *map(self.scalar, inputs), dtype=out.aval.dtype)
