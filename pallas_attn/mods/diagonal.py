"""Masks that are a band along the diagonal, such as causal ones and windows: told by their steps, so that kernels serve
them as the band, whose bounds they compute, and ask nobody.

Of a step it is known how it hangs on where the query and the key are: as a sum of these and a constant, or, if it is a
comparison, between which bounds the distance of the two has to be.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from pallas_attn._tile.band import Band
from pallas_attn.mods.program import KEY, QUERY, VARIABLES, Builder, Number, Operand, Program, Step, moved
from pallas_attn.mods.ready import MaskMod

TRUE = Number.of(True, "bool")
LARGEST = 2**29
"""Of a constant: of positions below 2^30 no sum overflows."""


class Sum(NamedTuple):
    """query * QUERY + key * KEY + constant"""

    query: int
    key: int
    constant: int


class Bounds(NamedTuple):
    """Of KEY - QUERY; None is no bound."""

    least: int | None = None
    most: int | None = None


def mod_of(band: Band) -> MaskMod:
    """The other way round."""
    return lambda batch, head, query, key: functools.reduce(operator.and_, band.visible(query, key))


def band_of(program: Program) -> Band | None:
    """The band that a mask is, or None."""
    found: list[Sum | Bounds | None] = [None] * len(VARIABLES)
    found[QUERY], found[KEY] = Sum(1, 0, 0), Sum(0, 1, 0)

    def value(operand: Operand) -> Sum | Bounds | None:
        if not isinstance(operand, Number):
            return found[operand]
        if (constant := constant_sum(operand)) is not None:
            return constant
        return Bounds() if operand.dtype == "bool" and operand.value else None

    for step in program.steps:
        found.append(_result(step, [value(one) for one in step.inputs]))
    bounds = value(program.results[0])
    return _band(*bounds) if isinstance(bounds, Bounds) else None


def holds_diagonal(program: Program) -> bool:
    """Whether a mask, by its steps, lets each query see the key at its own place. It may where this is False."""
    build = Builder()
    here: list[Operand] = list(VARIABLES)
    sums: list[Sum | None] = [None] * len(VARIABLES)
    here[KEY], sums[QUERY], sums[KEY] = QUERY, Sum(1, 0, 0), Sum(1, 0, 0)
    for step in program.steps:
        inputs = [moved(one, here) for one in step.inputs]
        places = zip(inputs, step.inputs, strict=True)
        own = [constant_sum(i) if isinstance(i, Number) else sums[cast(int, j)] for i, j in places]
        exact = not any(jnp.issubdtype(build.dtype(one), jnp.floating) for one in inputs)
        sums.append(sum_of(step.name, own))
        match sums[-1]:
            case Sum(0, 0, constant):
                known = Number.of(constant, "int32")
            case _:
                known = _on_diagonal(step.name, inputs, own, exact)
        here.append(build.again(step, here) if known is None else known)
    return moved(program.results[0], here) == TRUE


def _on_diagonal(name: str, inputs: list[Operand], sums: list[Sum | None], exact: bool) -> Operand | None:
    """What a step gives, if it is a constant or one of its inputs. `exact`: these are no floats, which may be NaN."""
    match name, sums:
        case (("le" | "lt" | "ge" | "gt" | "eq" | "ne"), [Sum() as one, Sum() as other]) if (
            one.query == other.query
        ):
            return Number.of(getattr(operator, name)(one.constant, other.constant), "bool")
    match name, inputs:
        case (("eq" | "le" | "ge"), [one, other]) if one == other and exact:
            return TRUE
        case "or", [one, other] if TRUE in (one, other):
            return TRUE
        case "and", [one, other] if TRUE in (one, other):
            return other if one == TRUE else one
    return None


def _result(step: Step, inputs: list[Sum | Bounds | None]) -> Sum | Bounds | None:
    match step.name, inputs:
        case (("le" | "lt" | "ge" | "gt"), [Sum() as one, Sum() as other]):
            if step.name[0] == "g":
                one, other = other, one
            return _at_most(_sum(one, other, -1), 1 if step.name[1] == "t" else 0)
        case "and", [Bounds() as one, Bounds() as other]:
            return Bounds(_limit(max, one.least, other.least), _limit(min, one.most, other.most))
    return sum_of(step.name, inputs)


def constant_sum(number: Number) -> Sum | None:
    fits = number.dtype == "int32" and abs(int(number.value)) <= LARGEST
    return Sum(0, 0, int(number.value)) if fits else None


def sum_of(name: str, inputs: Sequence[Any]) -> Sum | None:
    """What an operation makes of sums; None of others."""
    match name, inputs:
        case "neg", [Sum() as one]:
            return _sum(Sum(0, 0, 0), one, -1)
        case "add", [Sum() as one, Sum() as other]:
            return _sum(one, other, 1)
        case "sub", [Sum() as one, Sum() as other]:
            return _sum(one, other, -1)
    return None


def _sum(one: Sum, other: Sum, sign: int) -> Sum | None:
    total = Sum(*(a + sign * b for a, b in zip(one, other, strict=True)))
    fits = abs(total.query) <= 1 and abs(total.key) <= 1 and abs(total.constant) <= LARGEST
    return total if fits else None


def _at_most(total: Sum | None, apart: int) -> Bounds | None:
    """Where `total` + `apart` is at most 0."""
    match total:
        case Sum(-1, 1, constant):
            return Bounds(most=-constant - apart)
        case Sum(1, -1, constant):
            return Bounds(least=constant + apart)
    return None


def _limit(choose: Callable[[list[int]], int], *bounds: int | None) -> int | None:
    known = [one for one in bounds if one is not None]
    return choose(known) if known else None


def _band(least: int | None, most: int | None) -> Band | None:
    """None where it is empty."""
    if least is not None and most is not None and least > most:
        return None
    at = 0
    if least is not None and least > 0:
        at = least
    if most is not None and most < 0:
        at = most
    return Band(None if least is None else at - least, None if most is None else most - at, at)
