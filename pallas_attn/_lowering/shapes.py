"""Operations that change the shape of tiles: broadcasts, reductions, products."""

import jax.numpy as jnp
from jax import lax

from pallas_attn._lowering.arithmetic import binary, convert
from pallas_attn._lowering.rules import Kernel, rule
from pallas_attn._lowering.text import Shape, Value, Writer

REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}
SCANS = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}


def reshape(write: Writer, value: Value, shape: Shape) -> Value:
    """The same elements in the same order."""
    if value.shape == shape:
        return value
    if value.constant is not None or not value.shape:
        return write.broadcast(value, shape)
    if not shape:  # one element: any reduction extracts it
        flat = reshape(write, value, (1,))
        return reduce(write, flat, 0, "max" if not flat.is_bool else "or")
    to = Value("", shape, value.dtype)
    return write.define(f"tt.reshape {value.name} : {value.type} -> {to.type}", shape, value.dtype)


def expand(write: Writer, value: Value, axis: int) -> Value:
    shape = (*value.shape[:axis], 1, *value.shape[axis:])
    to = Value("", shape, value.dtype)
    spelled = f"tt.expand_dims {value.name} {{axis = {axis} : i32}} : {value.type} -> {to.type}"
    return write.define(spelled, shape, value.dtype)


@rule("broadcast_in_dim")
def _(kernel: Kernel, equation, value, *sizes):
    shape, dimensions = equation.params["shape"], equation.params["broadcast_dimensions"]
    if value.shape and value.constant is None:
        for axis in range(len(shape)):
            if axis not in dimensions:
                value = expand(kernel.write, value, axis)
    return kernel.write.broadcast(value, shape)


@rule("reshape", "squeeze", "expand_dims")
def _(kernel: Kernel, equation, value):
    if equation.params.get("dimensions") is not None and equation.primitive.name == "reshape":
        raise NotImplementedError("a reshape that transposes")
    shape = equation.outvars[0].aval.shape
    added = [axis for axis, side in enumerate(shape) if side == 1]
    if value.shape and tuple(side for side in shape if side != 1) == value.shape:
        for axis in added:
            value = expand(kernel.write, value, axis)
        return value
    return reshape(kernel.write, value, shape)


@rule("iota")
def _(kernel: Kernel, equation):
    write, shape, dimension = kernel.write, equation.params["shape"], equation.params["dimension"]
    int32, size = jnp.dtype("int32"), shape[dimension]
    line = write.define(
        f"tt.make_range {{end = {size} : i32, start = 0 : i32}} : {Value('', (size,), int32).type}",
        (size,),
        int32,
    )
    line = convert(write, line, equation.params["dtype"])
    for axis in range(len(shape)):
        if axis != dimension:
            line = expand(write, line, axis)
    return write.broadcast(line, shape)


def transpose(write: Writer, value: Value, order: Shape) -> Value:
    shape = tuple(value.shape[axis] for axis in order)
    to, spelled = Value("", shape, value.dtype), ", ".join(map(str, order))
    return write.define(
        f"tt.trans {value.name} {{order = array<i32: {spelled}>}} : {value.type} -> {to.type}",
        shape,
        value.dtype,
    )


@rule("transpose")
def _(kernel: Kernel, equation, value):
    return transpose(kernel.write, value, equation.params["permutation"])


@rule("stack")
def _(kernel: Kernel, equation, *values):
    shape = equation.outvars[0].aval.shape
    if len(values) != 2 or equation.params["axis"] != len(shape) - 1:
        raise NotImplementedError("a stack of other than two, or not along the last axis")
    one, other = values
    to = Value("", shape, one.dtype)
    return kernel.write.define(
        f"tt.join {one.name}, {other.name} : {one.type} -> {to.type}", shape, one.dtype
    )


def reduce(write: Writer, value: Value, axis: int, combine: str) -> Value:
    shape = (*value.shape[:axis], *value.shape[axis + 1 :])
    return _combined(write, "tt.reduce", f"axis = {axis} : i32", value, shape, combine)


def _combined(write: Writer, name: str, how: str, value: Value, shape: Shape, combine: str) -> Value:
    """A reduction or a scan: the region combines two elements."""
    left, right = (write.value((), value.dtype) for _ in range(2))
    defined = write.value(shape, value.dtype)
    write.line(f'{defined.name} = "{name}"({value.name}) <{{{how}}}> ({{')
    write.line(f"^bb0({left.name}: {left.type}, {right.name}: {right.type}):")
    with write.indented():
        both = binary(write, combine, left, right)
        write.line(f"{name}.return {both.name} : {both.type}")
    write.line(f"}}) : ({value.type}) -> {defined.type}")
    return defined


@rule(*REDUCTIONS)
def _(kernel: Kernel, equation, value):
    for axis in sorted(equation.params["axes"], reverse=True):
        value = reduce(kernel.write, value, axis, REDUCTIONS[equation.primitive.name])
    return value


@rule(*SCANS)
def _(kernel: Kernel, equation, value):
    reverse = "true" if equation.params["reverse"] else "false"
    how = f"axis = {equation.params['axis']} : i32, reverse = {reverse}"
    return _combined(kernel.write, "tt.scan", how, value, value.shape, SCANS[equation.primitive.name])


@rule("dot_general")
def _(kernel: Kernel, equation, left, right):
    write, result = kernel.write, equation.outvars[0].aval
    (contracted_left, contracted_right), batch = equation.params["dimension_numbers"]
    if batch != ((), ()) or len(left.shape) != 2 or len(right.shape) != 2:
        raise NotImplementedError(f"a product of {left.type} and {right.type}")
    if left.dtype != right.dtype:
        raise NotImplementedError(f"a product of {left.dtype} and {right.dtype}")
    if contracted_left == (0,):
        left = transpose(write, left, (1, 0))
    if contracted_right == (1,):
        right = transpose(write, right, (1, 0))
    # Triton's product treats every integer as signed and does not support these.
    if not (left.is_float or left.is_signed) or left.dtype in ("int16", "int64", "float64"):
        raise NotImplementedError(f"a product of {left.dtype}")
    wide = jnp.dtype("float32" if left.is_float else "int32")
    start = write.constant(0, wide, result.shape)
    names = f"{left.name}, {right.name}, {start.name}"
    types = f"{left.type} * {right.type} -> {start.type}"
    spelled = f"tt.dot {names}, inputPrecision = {_precision(kernel, equation)} : {types}"
    return convert(write, write.define(spelled, result.shape, wide), result.dtype)


def _precision(kernel: Kernel, equation) -> str:
    """For float32 operands: full precision, or rounded to 10 bits of mantissa (TF32) as XLA does by default."""
    precision = equation.params["precision"]
    precisions = set(precision if isinstance(precision, tuple) else (precision,))
    if precisions == {lax.Precision.HIGHEST}:
        return "ieee"
    if precisions <= {None, lax.Precision.DEFAULT}:
        return "tf32"
    raise NotImplementedError(f"a product with the precision {precision}")
