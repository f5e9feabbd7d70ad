"""Simplifies a program for known numbers of sequences, heads, queries and keys.

It drops what follows from these: that a non-negative index does not count from the end, that an index lies inside, that
a bound beyond all tokens holds.
"""

import functools
from typing import Any

import numpy as np

from pallas_attn.mods import intervals
from pallas_attn.mods.program import VARIABLES, Builder, Number, Operand, Program, Step, computed_now


@functools.lru_cache(maxsize=1024)
def within(program: Program, lengths: tuple[tuple[int, int], ...]) -> Program:
    """`lengths`: (argument, number of values from 0 on)."""
    known = {which: intervals.Interval(np.int32(0), np.int32(size - 1)) for which, size in lengths}
    with computed_now():
        found = intervals.evaluate(program, [None] * len(program.captures), known)
        bounds = [tuple(np.asarray(x) for x in one) for one in found]
    build = Builder()
    here: list[Operand] = list(VARIABLES)

    def now(operand: Operand) -> Operand:
        return operand if isinstance(operand, Number) else here[operand]

    def bound(operand: Operand) -> tuple[Any, ...]:
        return (operand.value,) * 2 if isinstance(operand, Number) else bounds[operand]

    def same(step: Step) -> Operand | None:
        """The input that a step always returns, if any."""
        inputs = step.inputs
        if step.name in ("max", "min") and step.dtype == "int32":
            for one, other in (inputs, inputs[::-1]):
                own, beside = bound(one), bound(other)
                if own[0] >= beside[1] if step.name == "max" else own[1] <= beside[0]:
                    return now(one)
        if step.name == "select":
            which = bound(inputs[0])
            return now(inputs[2]) if which[0] else None if which[1] else now(inputs[1])
        if step.name in ("and", "or") and step.dtype == "bool":
            idle = step.name == "and"
            for one, other in (inputs, inputs[::-1]):
                if bound(other)[0] == bound(other)[1] == idle:
                    return now(one)
        return None

    for step, (low, high) in zip(program.steps, bounds[len(VARIABLES) :], strict=True):
        if step.dtype in ("bool", "int32") and low == high:
            here.append(Number.of(low, step.dtype))
        elif (one := same(step)) is not None:
            here.append(one)
        else:
            here.append(build.step(step.name, *map(now, step.inputs), dtype=step.dtype, capture=step.capture))
    return build.only(tuple(map(now, program.results)), program.captures)
