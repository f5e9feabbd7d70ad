"""A score_mod's derivatives, by JAX's own rules, as another program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn.mods.operands import is_float
from pallas_attn.mods.program import SCORE, VARIABLES, Builder, Number, Operand, Program, apply, moved
from pallas_attn.mods.trace import Tracer

ONE = Number.of(1.0, "float32")


class Read(NamedTuple):
    """A read of a captured array, in a score_mod, that may need a gradient."""

    capture: int
    index: tuple[Operand, ...]


class Derivatives(NamedTuple):
    program: Program
    """Results: the score, its derivative by the input score, and its derivatives by the elements that `reads` read."""
    reads: tuple[Read, ...]


@functools.lru_cache(maxsize=256)
def derivatives(program: Program) -> Derivatives:
    first = len(VARIABLES)
    reads = [slot for slot, step in enumerate(program.steps, first) if step.capture is not None]
    floats = [slot for slot in reads if is_float(program.steps[slot - first].dtype)]

    def score(given: dict[int, Any], others: dict[int, Any]) -> Any:
        values = {**given, **others}

        def value(one: Operand) -> Any:
            return jnp.asarray(one.value) if isinstance(one, Number) else values[one]

        for slot, step in enumerate(program.steps, first):
            if slot not in values:
                values[slot] = apply(step, *map(value, step.inputs))
        return value(program.results[0])

    def found(*slots: Any) -> tuple[Any, ...]:
        values = dict(zip((*VARIABLES, *reads), slots, strict=True))
        given = {slot: values.pop(slot) for slot in (SCORE, *floats)}
        result, pull = jax.vjp(lambda given: score(given, values), given)
        (by,) = pull(jnp.ones_like(result))
        return result, *(by[slot] for slot in (SCORE, *floats))

    kinds: list[Any] = (
        ["float32"] + ["int32"] * (first - 1) + [program.steps[slot - first].dtype for slot in reads]
    )
    closed = jax.make_jaxpr(found)(*(jax.ShapeDtypeStruct((), kind) for kind in kinds))
    tracer = Tracer("score_mod", "score_mod", closed.jaxpr)
    here: list[Operand] = list(VARIABLES)
    for step in program.steps:
        here.append(tracer.build.again(step, here))
    inputs = [*VARIABLES, *(here[slot] for slot in reads)]
    results = [tracer.scalar(one) for one in tracer.evaluate(closed, inputs)]
    index = [one for slot in floats for one in program.steps[slot - first].inputs]
    results += [moved(one, here) for one in index]
    whole = tracer.build.only(tuple(results), program.captures)
    found_by = 2 + len(floats)
    places = iter(whole.results[found_by:])
    of_reads = (program.steps[slot - first] for slot in floats)
    listed = tuple(Read(step.capture or 0, tuple(next(places) for _ in step.inputs)) for step in of_reads)
    return Derivatives(Program(whole.steps, whole.results[:found_by], whole.captures), listed)


def slope(program: Program) -> Program:
    """Results: the score, and its derivative by the input score unless that is 1."""
    whole = derivatives(program).program
    count = 1 if whole.results[1] == ONE else 2
    build = Builder()
    here: list[Operand] = list(VARIABLES)
    for step in whole.steps:
        here.append(build.again(step, here))
    return build.only(tuple(moved(one, here) for one in whole.results[:count]), whole.captures)
