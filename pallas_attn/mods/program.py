"""A score_mod or mask_mod as a short list of elementwise steps: hashable, so that it can be a static argument of
kernels, and equal for two functions that do the same.

Captured arrays are not part of it: they are numbered and passed as operands.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCORE, BATCH, HEAD, QUERY, KEY = VARIABLES = tuple(range(5))
NAMES = ("score", "batch", "head", "q_idx", "kv_idx")


class Number(NamedTuple):
    """A constant, by its bits: two NaN are equal, and 0 is not -0."""

    bits: bytes
    dtype: str

    @classmethod
    def of(cls, value: Any, dtype: Any) -> "Number":
        return cls(np.asarray(value).astype(dtype).tobytes(), jnp.dtype(dtype).name)

    @property
    def value(self) -> Any:
        return np.frombuffer(self.bits, jnp.dtype(self.dtype))[0]


type Operand = int | Number
"""A slot or a constant. The first slots are the function's arguments, then comes one for each step."""


class Step(NamedTuple):
    name: str
    """One of `OPERATIONS`, or "read"."""
    inputs: tuple[Operand, ...]
    dtype: str
    """Dtype of the result."""
    capture: int | None = None
    """For "read": the number of the captured array; `inputs` are the index, which lies inside of it."""


class Capture(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]
    captures: tuple[Capture, ...] = ()

    @functools.cached_property
    def variables(self) -> tuple[frozenset[int], ...]:
        """The function's arguments that each slot depends on."""
        found = [frozenset({i}) for i in VARIABLES]
        for step in self.steps:
            found.append(functools.reduce(operator.or_, (found[i] for i in slots(step)), frozenset[int]()))
        return tuple(found)

    @functools.cached_property
    def used(self) -> frozenset[int]:
        """The arguments that any result depends on."""
        which = (self.variables[i] for i in self.results if not isinstance(i, Number))
        return functools.reduce(operator.or_, which, frozenset[int]())


def slots(step: Step) -> list[int]:
    return [i for i in step.inputs if not isinstance(i, Number)]


def moved(operand: Operand, here: Sequence[Operand]) -> Operand:
    return operand if isinstance(operand, Number) else here[operand]


class Builder:
    """Collects steps, without duplicates."""

    def __init__(self) -> None:
        self._steps: dict[Step, int] = {}

    def step(self, name: str, *inputs: Operand, dtype: Any, capture: int | None = None) -> Operand:
        new = Step(name, inputs, jnp.dtype(dtype).name, capture)
        if name != "read" and not slots(new):
            return _folded(new)
        return self._steps.setdefault(new, len(VARIABLES) + len(self._steps))

    def again(self, step: Step, here: Sequence[Operand]) -> Operand:
        """A step of another program, whose slots are `here` in this one."""
        inputs = (moved(one, here) for one in step.inputs)
        return self.step(step.name, *inputs, dtype=step.dtype, capture=step.capture)

    def dtype(self, operand: Operand) -> Any:
        if isinstance(operand, Number):
            return jnp.dtype(operand.dtype)
        if operand < len(VARIABLES):
            return jnp.dtype("float32" if operand == SCORE else "int32")
        return jnp.dtype(list(self._steps)[operand - len(VARIABLES)].dtype)

    def only(self, results: tuple[Operand, ...], captures: tuple[Capture, ...]) -> Program:
        """Only the steps that results need. Captured arrays keep their numbers."""
        steps, first = list(self._steps), len(VARIABLES)
        needed = {i for i in results if not isinstance(i, Number)}
        for i in reversed(range(len(steps))):
            if first + i in needed:
                needed.update(slots(steps[i]))
        kept = [i for i in range(len(steps)) if first + i in needed]
        place: dict[Operand, Operand] = {first + i: first + new for new, i in enumerate(kept)}
        renamed = (
            steps[i]._replace(inputs=tuple(place.get(one, one) for one in steps[i].inputs)) for i in kept
        )
        return Program(tuple(renamed), tuple(place.get(one, one) for one in results), captures)


@contextlib.contextmanager
def computed_now() -> Iterator[None]:
    """Operations on constants give constants, also where a caller traces for a mesh of devices that are not there."""
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def _folded(step: Step) -> Number:
    with computed_now():
        inputs = [jnp.asarray(one.value) for one in step.inputs if isinstance(one, Number)]
        return Number.of(np.asarray(apply(step, *inputs)), step.dtype)


OPERATIONS: dict[str, Any] = {
    "abs": jnp.abs,
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder,
    "neg": lax.neg,
    "sign": lax.sign,
    "min": lax.min,
    "max": lax.max,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "log": lax.log,
    "log1p": lax.log1p,
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "sin": lax.sin,
    "cos": lax.cos,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "select": lambda which, no, yes: lax.select_n(which, no, yes),
}
"""Of arrays of one shape. Both of the kernels' lowerings have them."""
CONVERSIONS = {"convert": lax.convert_element_type, "bitcast": lax.bitcast_convert_type}


def apply(step: Step, *inputs: Any) -> jax.Array:
    """A step but "read" on arrays that broadcast."""
    shape = jnp.broadcast_shapes(*(jnp.shape(one) for one in inputs))
    alike = [one if jnp.shape(one) == shape else jnp.broadcast_to(one, shape) for one in inputs]
    if step.name in CONVERSIONS:
        return CONVERSIONS[step.name](*alike, jnp.dtype(step.dtype))
    return OPERATIONS[step.name](*alike)
