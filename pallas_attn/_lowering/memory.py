"""Loads and stores.

An element is at the array's pointer plus the sum of index times stride. The sum is 32 bits wide for arrays of up to
2**31 elements, as all index arithmetic before it, and 64 bits wide beyond.
"""

import math
from typing import Any

import jax.numpy as jnp

from pallas_attn._lowering import each
from pallas_attn._lowering.arithmetic import binary, convert
from pallas_attn._lowering.body import Ref
from pallas_attn._lowering.rules import Kernel, rule
from pallas_attn._lowering.text import Shape, Value, Writer, type_of

POLICIES = ("evict_first", "evict_last")


def strides(shape: Shape) -> list[int]:
    """Strides in elements; the last dimension is contiguous."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def moved(write: Writer, pointer: Value, offset: Value) -> Value:
    spelled = f"tt.addptr {pointer.name}, {offset.name} : {pointer.type}, {offset.type}"
    return write.define(spelled, pointer.shape, pointer.dtype, is_pointer=True)


def _counted_apart(write: Writer, offset: Value) -> Value:
    """The same number, hidden from LLVM's loop optimisation.

    Triton runs LLVM without the target's costs. To save extending an offset to 64 bits, LLVM widens the loop counter
    and everything that depends on it: every comparison of a token with a length becomes two, which need more predicates
    than there are. For the offset of a tile of keys that pays off, for a page's number it does not.
    """
    return _assembly(write, "mov.b32 $0, $1;", "=r,r", offset, offset.dtype)


def _assembly(write: Writer, line: str, constraints: str, operand: Value, dtype: Any) -> Value:
    """Of each element of the operand, by a line without side effects."""
    how = f'"{line}" {{constraints = "{constraints}", packed_element = 1 : i32, pure = true}}'
    to = type_of(operand.shape, dtype)
    spelled = f"tt.elementwise_inline_asm {how} {operand.name} : {operand.type} -> {to}"
    return write.define(spelled, operand.shape, dtype)


def _pointers(kernel: Kernel, ref: Ref, index: tuple[Value, ...], shape: Shape) -> Value:
    """Pointers to each element of a tile. Offsets common to the tile are added to the scalar pointer first."""
    write, pointer = kernel.write, kernel.pointers[ref.position]
    wide = jnp.dtype("int32" if math.prod(ref.shape) <= 2**31 else "int64")
    terms = list(zip(index, strides(ref.shape), strict=True))
    for part in ([t for t in terms if not t[0].shape], [t for t in terms if t[0].shape]):
        offset = None
        for i, stride in part:
            term = convert(write, i, wide)
            term = binary(write, "mul", term, write.constant(stride, wide, term.shape))
            if offset is None:
                offset = term
                continue
            both = jnp.broadcast_shapes(offset.shape, term.shape)
            offset = binary(write, "add", write.broadcast(offset, both), write.broadcast(term, both))
        if offset is not None:
            if kernel.loops and ref.dtype == wide == jnp.int32:
                offset = _counted_apart(write, offset)
            tile = shape if offset.shape else ()
            pointer = moved(write, write.broadcast(pointer, tile), write.broadcast(offset, tile))
    return write.broadcast(pointer, shape)


def _policy(kernel: Kernel, name: str | None) -> str:
    if name is None:
        return ""
    if name not in POLICIES:
        raise NotImplementedError(f"an eviction policy {name!r}")
    return f" {{cachePolicy = #tt.cache_policy<cache_modifier = none, eviction_policy = {name}>}}"


def _check_stored(kernel: Kernel, ref: Ref) -> None:
    if ref.dtype == jnp.bool_:
        raise NotImplementedError("an array of bool, which takes a byte in memory")


@rule("pallas_attn_load")
def _(kernel: Kernel, equation, *operands):
    write, params = kernel.write, equation.params
    ref, shape, rank = params["ref"], params["shape"], len(params["ref"].shape)
    _check_stored(kernel, ref)
    pointers = _pointers(kernel, ref, operands[:rank], shape)
    if params["each"] and (how := each.assembly(ref.dtype)):
        return _assembly(write, *how, pointers, ref.dtype)
    rest = [write.broadcast(one, shape) for one in operands[rank:]]
    names = ", ".join(value.name for value in (pointers, *rest))
    policy = _policy(kernel, params["eviction_policy"])
    return write.define(f"tt.load {names}{policy} : {pointers.type}", shape, ref.dtype)


@rule("pallas_attn_touch")
def _(kernel: Kernel, equation, *operands):
    """A load that is kept although its value is unused."""
    write, params = kernel.write, equation.params
    *index, mask = operands
    pointers = _pointers(kernel, params["ref"], tuple(index), params["shape"])
    spelled = f"tt.load {pointers.name}, {mask.name} {{isVolatile = true}} : {pointers.type}"
    write.define(spelled, params["shape"], params["ref"].dtype)
    return []


@rule("pallas_attn_store")
def _(kernel: Kernel, equation, *operands):
    params, rank = equation.params, len(equation.params["ref"].shape)
    _check_stored(kernel, params["ref"])
    value, *mask = operands[rank:]
    pointers = _pointers(kernel, params["ref"], operands[:rank], value.shape)
    names = ", ".join(one.name for one in (pointers, value, *mask))
    kernel.write.line(f"tt.store {names}{_policy(kernel, params['eviction_policy'])} : {pointers.type}")
    return []


@rule("pallas_attn_program_id")
def _(kernel: Kernel, equation):
    return kernel.program[equation.params["axis"]]
