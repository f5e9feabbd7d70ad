"""Simplifies a program for known numbers of sequences, heads, queries and keys.

It drops what follows from these: that a non-negative index does not count from the end, that an index lies inside, that
a bound beyond all tokens holds. And distances that a score_mod makes floats of may be floats from the beginning.
"""

import collections
import functools
from typing import Any

import numpy as np

from pallas_attn.mods import intervals
from pallas_attn.mods.program import (
    KEY,
    QUERY,
    VARIABLES,
    Builder,
    Number,
    Operand,
    Program,
    Step,
    computed_now,
    moved,
    slots,
)

type Lengths = tuple[tuple[int, int], ...]
"""(argument, number of values from 0 on)"""

EXACT = 2**24
"""Integers up to this are float32 numbers, too."""
UNSIGNED = Number.of(2**31 - 1, "int32")
ALIKE = ("add", "sub", "neg", "abs", "min", "max")
"""Operations that give the same number of such integers and of such floats."""


def _bounds(program: Program, lengths: Lengths) -> list[tuple[np.ndarray, ...]]:
    known = {which: intervals.Interval(np.int32(0), np.int32(size - 1)) for which, size in lengths}
    with computed_now():
        found = intervals.evaluate(program, [None] * len(program.captures), known)
        return [tuple(np.asarray(x) for x in one) for one in found]


@functools.lru_cache(maxsize=1024)
def within(program: Program, lengths: Lengths) -> Program:
    bounds, build = _bounds(program, lengths), Builder()
    here: list[Operand] = list(VARIABLES)

    def now(operand: Operand) -> Operand:
        return moved(operand, here)

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
            here.append(build.again(step, here))
    return build.only(tuple(map(now, program.results)), program.captures)


@functools.lru_cache(maxsize=1024)
def in_floats(program: Program, lengths: Lengths) -> Program:
    """With integers of pairs that become float32, and nothing else, worked out in float32: so there is a conversion for
    each query and each key, not for each pair, and floats are added twice as fast. The bits are the same.

    It pays where a thread shares no integers between its pairs. Not for a mask_mod: bounds of integers are closer.
    """
    bounds, build, first = _bounds(program, lengths), Builder(), len(VARIABLES)
    here: list[Operand] = list(VARIABLES)
    uses = collections.Counter(i for step in program.steps for i in slots(step))
    uses.update(i for i in program.results if not isinstance(i, Number))

    def is_exact(operand: Operand) -> bool:
        if isinstance(operand, Number):
            return operand.dtype == "int32" and abs(int(operand.value)) <= EXACT
        low, high = bounds[operand]
        return low.dtype == np.int32 and bool(low >= -EXACT) and bool(high <= EXACT)

    def is_of_pairs(slot: int) -> bool:
        """Whether it is a step that may be done in floats instead."""
        if slot < first or uses[slot] > 1 or not {QUERY, KEY} <= program.variables[slot]:
            return False
        step = program.steps[slot - first]
        return step.name in ALIKE and all(map(is_exact, (slot, *step.inputs)))

    def as_float(operand: Operand) -> Operand:
        if isinstance(operand, Number):
            return Number.of(operand.value, "float32")
        if not is_of_pairs(operand):
            return build.step("convert", here[operand], dtype="float32")
        step = program.steps[operand - first]
        inputs = map(as_float, step.inputs)
        if step.name != "abs":
            return build.step(step.name, *inputs, dtype="float32")
        # Libdevice's function is an instruction, for it flushes what is denormal. Without a sign it is none.
        bits = build.step("bitcast", *inputs, dtype="int32")
        return build.step("bitcast", build.step("and", bits, UNSIGNED, dtype="int32"), dtype="float32")

    for step in program.steps:
        converts = (step.name, step.dtype) == ("convert", "float32") and slots(step)
        if converts and is_of_pairs(converts[0]):
            here.append(as_float(converts[0]))
        else:
            here.append(build.again(step, here))
    return build.only(tuple(moved(one, here) for one in program.results), program.captures)
