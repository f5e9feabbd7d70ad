"""Score functions that are ALiBi: told by their steps, as bands are (diagonal.py), so that kernels that know of slopes,
and cannot ask a function, serve them.

Of a step it is known that it hangs on the head alone; or how it hangs on where query and key are; or that it is a slope
of the head times their distance, and whether the score is added.
"""

import functools
from typing import NamedTuple

from pallas_attn._tile.band import Band
from pallas_attn.mods.diagonal import Sum, constant_sum, sum_of
from pallas_attn.mods.program import (
    HEAD,
    KEY,
    QUERY,
    SCORE,
    VARIABLES,
    Builder,
    Number,
    Operand,
    Program,
    Step,
)


class OfHead(NamedTuple):
    """A slot of the program of slopes, or a constant."""

    operand: Operand


class Tilted(NamedTuple):
    """scores * SCORE + slope * (KEY - QUERY - the band's offset)"""

    scores: int
    slope: Operand
    """Of the program of slopes."""


type Known = OfHead | Sum | Tilted | None

FLAT, RISING, FALLING = (Number.of(x, "float32") for x in (0, 1, -1))


@functools.lru_cache(maxsize=256)
def slopes_of(program: Program, band: Band) -> Program | None:
    """Of a score_mod under a band: the slopes that make it `score + slope * (kv_idx - q_idx - offset)` wherever a key
    is seen, as a program that asks for nothing but the head; None if there are none."""
    build = Builder()
    found: list[Known] = [None] * len(VARIABLES)
    found[SCORE], found[HEAD] = Tilted(1, FLAT), OfHead(HEAD)
    found[QUERY], found[KEY] = Sum(1, 0, 0), Sum(0, 1, 0)
    for step in program.steps:
        inputs = [OfHead(one) if isinstance(one, Number) else found[one] for one in step.inputs]
        found.append(_result(build, band, step, inputs))
    result = program.results[0]
    match None if isinstance(result, Number) else found[result]:
        case Tilted(1, slope):
            return build.only((slope,), program.captures)
    return None


def _result(build: Builder, band: Band, step: Step, inputs: list[Known]) -> Known:
    of_heads = [one.operand for one in inputs if isinstance(one, OfHead)]
    if len(of_heads) == len(inputs):
        return OfHead(build.step(step.name, *of_heads, dtype=step.dtype, capture=step.capture))
    if step.dtype == "int32":
        sums = [_as_sum(one) for one in inputs]
        if step.name == "abs" and (only := sums[0]) is not None:
            return _absolute(only, band)
        return sum_of(step.name, sums)
    if step.dtype != "float32":
        return None
    match step.name, inputs:
        case "convert", [Sum(-1, 1, constant)] if constant == -band.offset:
            return Tilted(0, RISING)
        case "convert", [Sum(1, -1, constant)] if constant == band.offset:
            return Tilted(0, FALLING)
        case "neg", [Tilted(0, slope)]:
            return Tilted(0, build.step("neg", slope, dtype="float32"))
        case "mul", ([Tilted(0, slope), OfHead(factor)] | [OfHead(factor), Tilted(0, slope)]):
            return Tilted(0, build.step("mul", slope, factor, dtype="float32"))
        case (("add" | "sub"), [Tilted() as one, Tilted() as other]):
            scores = one.scores + other.scores * (1 if step.name == "add" else -1)
            slope = build.step(step.name, one.slope, other.slope, dtype="float32")
            return Tilted(scores, slope) if scores in (0, 1) else None
    return None


def _as_sum(known: Known) -> Sum | None:
    match known:
        case Sum():
            return known
        case OfHead(Number() as number):
            return constant_sum(number)
    return None


def _absolute(distance: Sum, band: Band) -> Sum | None:
    """Of a distance that has one sign wherever a key is seen."""
    match distance:
        case Sum(-1, 1, constant):
            least, most = _between(band, constant)
        case Sum(1, -1, constant):
            most, least = (None if one is None else -one for one in _between(band, -constant))
        case _:
            return None
    if least is not None and least >= 0:
        return distance
    return sum_of("neg", [distance]) if most is not None and most <= 0 else None


def _between(band: Band, more: int) -> tuple[int | None, int | None]:
    """The least and the most of KEY - QUERY + `more`."""
    at = band.offset + more
    return None if band.left is None else at - band.left, None if band.right is None else at + band.right
