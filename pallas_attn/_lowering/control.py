"""Loops, branches, and calls, which are inlined."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from pallas_attn._lowering.arithmetic import SHORTER, binary
from pallas_attn._lowering.rules import Kernel, rule
from pallas_attn._lowering.text import Value


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, ()) if isinstance(jaxpr, Jaxpr) else jaxpr


@rule("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")
def _(kernel: Kernel, equation, *operands):
    shorter = SHORTER.get(equation.params.get("name"))
    if shorter is not None and (written := shorter(kernel.write, *operands)) is not None:
        return written
    inner = next(
        equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params
    )
    return kernel.run(_closed(inner), operands)


def _types(values: Sequence[Value]) -> str:
    return ", ".join(value.type for value in values)


def _yield(kernel: Kernel, values: Sequence[Value]) -> None:
    if values:
        kernel.write.line(f"scf.yield {', '.join(v.name for v in values)} : {_types(values)}")


@rule("cond")
def _(kernel: Kernel, equation, index, *operands):
    return _choose(kernel, index, 0, equation.params["branches"], operands, equation.outvars)


def _choose(kernel: Kernel, index: Value, first: int, branches, operands, outvars) -> Sequence[Value]:
    """Branches numbered from `first` on, as a tree of two-way branches; the last one also serves larger numbers."""
    write = kernel.write
    if len(branches) == 1:
        return kernel.run(_closed(branches[0]), operands)
    like = [Value("", var.aval.shape, var.aval.dtype) for var in outvars]
    here = index
    if not index.is_bool:
        last = write.constant(first, index.dtype)
        here = write.elementwise("arith.cmpi sgt,", index, last, dtype=jnp.dtype("bool"))
    arrow = f" -> ({_types(like)})" if like else ""
    results = write.fresh() if like else ""
    defines = f"{results}:{len(like)} = " if like else ""
    write.line(f"{defines}scf.if {here.name}{arrow} {{")
    with write.indented():
        _yield(kernel, _choose(kernel, index, first + 1, branches[1:], operands, outvars))
    write.line("} else {")
    with write.indented():
        _yield(kernel, kernel.run(_closed(branches[0]), operands))
    write.line("}")
    return [Value(f"{results}#{i}", one.shape, one.dtype) for i, one in enumerate(like)]


@rule("while")
def _(kernel: Kernel, equation, *operands):
    params = equation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
    carry, body = operands[num_cond + num_body :], params["body_jaxpr"]
    counts = num_cond == 0 and _counts(params["cond_jaxpr"].jaxpr, body.jaxpr, num_body)
    if counts and carry[0].is_signed:  # scf.for treats every integer as signed
        return _counted(kernel, body, body_consts, carry)
    return _while(kernel, params["cond_jaxpr"], cond_consts, body, body_consts, carry)


def _counts(cond: Jaxpr, body: Jaxpr, num_consts: int) -> bool:
    """Whether a while loop is lax.fori_loop's with bounds known at run time only.

    Its carry starts with a counter that grows by one up to a constant end, and the condition compares just these.
    """
    if len(cond.eqns) != 1 or len(cond.invars) < 2:
        return False
    compares, (i, end, *_) = cond.eqns[0], body.invars[num_consts:]
    if compares.primitive.name != "lt" or list(compares.invars) != list(cond.invars[:2]):
        return False
    if list(compares.outvars) != list(cond.outvars) or body.outvars[1] is not end:
        return False
    steps = [equation for equation in body.eqns if body.outvars[0] in equation.outvars]
    if len(steps) != 1 or steps[0].primitive.name != "add":
        return False
    one = [atom.val for atom in steps[0].invars if isinstance(atom, Literal)]
    return any(atom is i for atom in steps[0].invars) and [int(number) for number in one] == [1]


def _counted(kernel: Kernel, body: ClosedJaxpr, consts, carry) -> Sequence[Value]:
    """scf.for, which Triton pipelines."""
    start, end, *state = carry

    def step(i: Value, state: Sequence[Value]) -> Sequence[Value]:
        return kernel.run(body, [*consts, i, end, *state])[2:]

    done = _for(kernel, start, end, state, step)
    return [binary(kernel.write, "max", start, end), end, *done]


def _for(kernel: Kernel, start: Value, end: Value, state: Sequence[Value], step) -> Sequence[Value]:
    write = kernel.write
    one, i = write.constant(1, start.dtype), write.value((), start.dtype)
    inside = [write.value(value.shape, value.dtype) for value in state]
    pairs = ", ".join(f"{arg.name} = {value.name}" for arg, value in zip(inside, state, strict=True))
    arrow = f" iter_args({pairs}) -> ({_types(state)})" if state else ""
    results = write.fresh() if state else ""
    defines = f"{results}:{len(state)} = " if state else ""
    bounds = f"{i.name} = {start.name} to {end.name} step {one.name}"
    write.line(f"{defines}scf.for {bounds}{arrow} : {start.type} {{")
    with write.indented(), kernel.in_a_loop():
        _yield(kernel, step(i, inside))
    write.line("}")
    return [Value(f"{results}#{n}", value.shape, value.dtype) for n, value in enumerate(state)]


def _while(kernel: Kernel, cond: ClosedJaxpr, cond_consts, body: ClosedJaxpr, body_consts, carry):
    write = kernel.write
    before, after = ([write.value(value.shape, value.dtype) for value in carry] for _ in range(2))
    results, types = write.fresh(), _types(carry)
    pairs = ", ".join(f"{arg.name} = {value.name}" for arg, value in zip(before, carry, strict=True))
    write.line(f"{results}:{len(carry)} = scf.while ({pairs}) : ({types}) -> ({types}) {{")
    with write.indented():
        (goes_on,) = kernel.run(cond, [*cond_consts, *before])
        write.line(f"scf.condition({goes_on.name}) {', '.join(v.name for v in before)} : {types}")
    write.line("} do {")
    write.line(f"^bb0({', '.join(f'{v.name}: {v.type}' for v in after)}):")
    with write.indented():
        _yield(kernel, kernel.run(body, [*body_consts, *after]))
    write.line("}")
    return [Value(f"{results}#{i}", value.shape, value.dtype) for i, value in enumerate(carry)]


@rule("scan")
def _(kernel: Kernel, equation, *operands):
    """lax.fori_loop's scan for known bounds: it neither consumes nor collects arrays.

    Such arrays would have a dimension that a step does not see.
    """
    body, length = equation.params["jaxpr"], equation.params["length"]
    outside, inside = ([var.aval.shape for var in (*e.invars, *e.outvars)] for e in (equation, body.jaxpr))
    if outside != inside:
        raise NotImplementedError("a scan over arrays")
    num_consts = len(operands) - len(equation.outvars)
    consts, carry = operands[:num_consts], operands[num_consts:]
    start, end = (kernel.write.constant(n, jnp.dtype("int32")) for n in (0, length))
    return _for(kernel, start, end, carry, lambda _, state: kernel.run(body, [*consts, *state]))
