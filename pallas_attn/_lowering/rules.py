"""The rules that translate primitives, and the translation of a jaxpr from top to bottom."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from pallas_attn._lowering.text import Value, Writer

Rule = Callable[..., "Value | Sequence[Value]"]
_RULES: dict[str, Rule] = {}


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Registers `rule(kernel, equation, *operands)`, which writes the equation and returns what it defines."""

    def register(one: Rule) -> Rule:
        _RULES.update(dict.fromkeys(primitives, one))
        return one

    return register


class Refused(NotImplementedError):
    """An error that names the kernel and the primitive."""


class Kernel:
    """A kernel being written: its lines, and the pointers and grid indices that come before them."""

    def __init__(
        self, name: str, writer: Writer, pointers: Sequence[Value], program: Sequence[Value]
    ) -> None:
        self.name, self.write, self.pointers, self.program = name, writer, pointers, program
        self.loops = 0  # around what is being written

    @contextlib.contextmanager
    def in_a_loop(self) -> Iterator[None]:
        self.loops += 1
        yield
        self.loops -= 1

    def run(self, closed: ClosedJaxpr, operands: Sequence[Value]) -> list[Value]:
        """Writes the jaxpr's equations; its results."""
        jaxpr = closed.jaxpr
        values: dict[Var, Value] = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, array in zip(jaxpr.constvars, closed.consts, strict=True):
            values[variable] = self.number(array)

        def read(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return values[atom]
            aval: Any = atom.aval
            return self.number(atom.val, aval.dtype)

        for equation in jaxpr.eqns:
            defined = self._write(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, defined, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def number(self, array: Any, dtype: Any = None) -> Value:
        if getattr(array, "shape", ()) != ():
            raise Refused(f"{self.name}: an array of constants {list(array.shape)} in a kernel, not a number")
        return self.write.constant(array, array.dtype if dtype is None else dtype)

    def _write(self, equation: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        name = equation.primitive.name
        if name not in _RULES:
            raise Refused(f"{self.name}: no rule writes the primitive {name!r} as Triton IR")
        try:
            defined = _RULES[name](self, equation, *operands)
        except Refused:  # already reported by an inner equation
            raise
        except NotImplementedError as error:
            raise Refused(f"{self.name}: the primitive {name!r}: {error}") from error
        return [defined] if isinstance(defined, Value) else defined
