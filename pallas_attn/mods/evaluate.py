"""A program worked out over blocks: of scalars, of tokens of one side, of pairs.

Each value keeps the shape that it needs. What hangs on queries alone is one number a query; worked out before a loop
over keys, it is no part of the loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.mods.program import (
    KEY,
    QUERY,
    SCORE,
    VARIABLES,
    Number,
    Operand,
    Program,
    Step,
    apply,
    slots,
)

type Read = Callable[[int, list[Any]], Any]
"""(number of a captured array, places inside of it, which broadcast) -> elements."""
type Spread = Callable[[Any, frozenset[int], frozenset[int]], Any]
"""(value, the arguments that it hangs on, those that it meets) -> a value that broadcasts."""


def as_it_is(value: Any, own: frozenset[int], among: frozenset[int]) -> Any:
    return value


class Values:
    """What is known of a program's slots so far."""

    def __init__(
        self, program: Program, read: Read, spread: Spread = as_it_is, known: Mapping[int, Any] | None = None
    ):
        self.program, self._read, self._spread = program, read, spread
        self._known = dict(known or {})

    def given(self, known: Mapping[int, Any]) -> "Values":
        """With these arguments' values, and all steps that hang on known ones alone."""
        # Of jnp, where a user has 64-bit types on, numbers of tokens are wider.
        narrow = {which: one if which == SCORE else one.astype(jnp.int32) for which, one in known.items()}
        values = {**self._known, **narrow}
        for slot, step in enumerate(self.program.steps, len(VARIABLES)):
            if slot not in values and all(i in values for i in slots(step)):
                values[slot] = self._step(step, values)
        return Values(self.program, self._read, self._spread, values)

    def _step(self, step: Step, values: Mapping[int, Any]) -> Any:
        own = self.program.variables
        among = frozenset().union(*(own[i] for i in slots(step)))

        def value(one: Operand) -> Any:
            return one.value if isinstance(one, Number) else self._spread(values[one], own[one], among)

        inputs = [value(one) for one in step.inputs]
        if step.name != "read" or step.capture is None:
            return apply(step, *inputs)
        found = self._read(step.capture, inputs)
        return found != 0 if step.dtype == "bool" else found

    @property
    def results(self) -> list[Any]:
        """Each of the shape that it needs."""
        return [i.value if isinstance(i, Number) else self._known[i] for i in self.program.results]

    def result(self, index: int = 0, over: frozenset[int] = frozenset((QUERY, KEY))) -> Any:
        """One that meets values which hang on the arguments `over`."""
        operand = self.program.results[index]
        if isinstance(operand, Number):
            return operand.value
        return self._spread(self._known[operand], self.program.variables[operand], over)


def from_arrays(arrays: Sequence[jax.Array]) -> Read:
    def read(number: int, index: list[Any]) -> jax.Array:
        array = arrays[number]
        if not index:
            return array.reshape(())  # as it is, or `stored`
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        return array.at[tuple(jnp.broadcast_to(i, shape) for i in index)].get(mode="clip")

    return read


def stored(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """As kernels have them: bools are bytes, and a scalar is an array of one."""

    def one(array: jax.Array) -> jax.Array:
        array = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
        return array.reshape(1) if array.ndim == 0 else array

    return tuple(map(one, arrays))


def spread_tile(queries_first: bool, of_rows: frozenset[int] = frozenset({QUERY})) -> Spread:
    """Of a kernel's tile: values of rows or of keys have one dimension, of pairs two. Rows are told apart by the
    arguments `of_rows`."""
    rows, keys = (np.s_[:, None], np.s_[None, :])[:: 1 if queries_first else -1]

    def spread(value: Any, own: frozenset[int], among: frozenset[int]) -> Any:
        by_row, by_key = bool(own & of_rows), KEY in own
        of_pairs = SCORE in among or (KEY in among and among & of_rows)
        if SCORE in own or by_row == by_key or not of_pairs:
            return value
        return value[rows if by_row else keys]

    return spread


def evaluate(program: Program, arrays: Sequence[jax.Array], known: Mapping[int, Any]) -> list[Any]:
    """The results, of values that broadcast against each other."""
    return Values(program, from_arrays(arrays)).given(known).results
