"""Elementwise operations and conversions.

Triton has the same types as JAX, with two exceptions: bfloat16 and float16 are computed in float32 and rounded once, as
in Triton's own language, and float8 is only converted.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn._lowering.rules import Kernel, rule
from pallas_attn._lowering.text import FLOAT8, Value, Writer, element_of

# For each primitive, the operations on signed integers, unsigned integers and floating-point numbers.
BINARY = {
    "add": ("arith.addi", "arith.addi", "arith.addf"),
    "sub": ("arith.subi", "arith.subi", "arith.subf"),
    "mul": ("arith.muli", "arith.muli", "arith.mulf"),
    "div": ("arith.divsi", "arith.divui", "arith.divf"),
    "rem": ("arith.remsi", "arith.remui", "arith.remf"),
    # NaN goes through, as in lax.max.
    "max": ("arith.maxsi", "arith.maxui", "arith.maximumf"),
    "min": ("arith.minsi", "arith.minui", "arith.minimumf"),
    "and": ("arith.andi", "arith.andi", None),
    "or": ("arith.ori", "arith.ori", None),
    "xor": ("arith.xori", "arith.xori", None),
    "shift_left": ("arith.shli", "arith.shli", None),
    "shift_right_arithmetic": ("arith.shrsi", "arith.shrsi", None),
    "shift_right_logical": ("arith.shrui", "arith.shrui", None),
}
COMPARISONS = {
    "eq": ("eq", "eq", "oeq"),
    "ne": ("ne", "ne", "une"),
    "lt": ("slt", "ult", "olt"),
    "le": ("sle", "ule", "ole"),
    "gt": ("sgt", "ugt", "ogt"),
    "ge": ("sge", "uge", "oge"),
}
# NVIDIA's libdevice, which comes with Triton: float32 with denormals flushed, in one or a few instructions.
LIBDEVICE = {
    "exp2": "__nv_exp2f",
    "exp": "__nv_expf",
    "log": "__nv_logf",
    "log1p": "__nv_log1pf",
    "tanh": "__nv_tanhf",
    "erf": "__nv_erff",
    "rsqrt": "__nv_rsqrtf",
    "sqrt": "__nv_sqrtf",
    "sin": "__nv_sinf",
    "cos": "__nv_cosf",
}
MATH = {"floor": "math.floor", "ceil": "math.ceil"}
LOG2 = ("log2", "__nv_log2f")


def choose(operations: tuple[Any, Any, Any], value: Value) -> str:
    """Picks from (signed, unsigned, floating-point) by a value's elements; bools count as unsigned."""
    chosen = operations[2] if value.is_float else operations[0] if value.is_signed else operations[1]
    if chosen is None:
        raise NotImplementedError(f"{operations[0]} of {value.dtype}")
    return chosen


def convert(write: Writer, value: Value, dtype: Any) -> Value:
    """`value` with elements of another dtype, as lax.convert_element_type."""
    dtype = jnp.dtype(dtype)
    element_of(dtype)  # int4 is stored as wide as int8
    if value.dtype == dtype:
        return value
    if value.constant is not None:
        return write.constant(_converted_constant(value, dtype), dtype, value.shape)
    to_float = jnp.issubdtype(dtype, jnp.floating)
    if dtype == jnp.bool_:
        return write.elementwise(
            _not_zero(value), value, write.constant(0, value.dtype, value.shape), dtype=dtype
        )
    match value.is_float, to_float:
        case True, True:
            return _between_floats(write, value, dtype)
        case True, False:
            return _float_to_integer(write, value, dtype)
        case False, True:
            operation = "arith.sitofp" if value.is_signed else "arith.uitofp"
            first = dtype if _bits(dtype) >= 32 else jnp.dtype("float32")
            return convert(write, write.converted(operation, value, first), dtype)
        case _:
            return _between_integers(write, value, dtype)


def _converted_constant(value: Value, dtype: Any) -> Any:
    """With XLA's semantics, which Triton leaves undefined: integers wrap around, floating-point numbers saturate to the
    nearest integer of the type, and NaN becomes 0."""
    number = np.asarray(value.constant).astype(value.dtype)
    if value.is_float and jnp.issubdtype(dtype, jnp.integer):
        ends, exact = jnp.iinfo(dtype), float(number)
        return 0 if math.isnan(exact) else int(min(max(exact, ends.min), ends.max))
    return number.astype(dtype)[()]


def _not_zero(value: Value) -> str:
    return "arith.cmpf une," if value.is_float else "arith.cmpi ne,"


def _bits(dtype: Any) -> int:
    return 1 if dtype == jnp.bool_ else 8 * jnp.dtype(dtype).itemsize


def _between_integers(write: Writer, value: Value, dtype: Any) -> Value:
    if _bits(dtype) == _bits(value.dtype):  # signedness is in the operations, not in the type
        return Value(value.name, value.shape, dtype)
    wider = "arith.extsi" if value.is_signed else "arith.extui"
    return write.converted(wider if _bits(dtype) > _bits(value.dtype) else "arith.trunci", value, dtype)


def _float_to_integer(write: Writer, value: Value, dtype: Any) -> Value:
    """Rounds towards zero. The instruction saturates, but only at 32 bits and more."""
    value = _computable(write, value)
    if _bits(dtype) >= 32:
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return write.converted("arith.fptosi" if signed else "arith.fptoui", value, dtype)
    whole = write.converted("arith.fptosi", value, jnp.dtype("int32"))
    for operation, end in (("arith.maxsi", jnp.iinfo(dtype).min), ("arith.minsi", jnp.iinfo(dtype).max)):
        whole = write.elementwise(operation, whole, write.constant(end, whole.dtype, whole.shape))
    return write.converted("arith.trunci", whole, dtype)


def _between_floats(write: Writer, value: Value, dtype: Any) -> Value:
    names = {jnp.dtype(value.dtype).name, jnp.dtype(dtype).name}
    if len(narrow := names & set(FLOAT8)) == 1:
        if "float64" in names:
            raise NotImplementedError(f"{value.dtype} as {dtype}")
        return _to_or_from_float8(write, value, dtype)
    if narrow or names == {"float16", "bfloat16"}:
        return convert(write, convert(write, value, jnp.dtype("float32")), dtype)
    wider = _bits(dtype) > _bits(value.dtype)
    return write.converted("arith.extf" if wider else "arith.truncf", value, dtype)


def _to_or_from_float8(write: Writer, value: Value, dtype: Any) -> Value:
    to = Value("", value.shape, dtype)
    rounding = ", rounding = rtne" if _bits(dtype) == 8 else ""
    return write.define(f"tt.fp_to_fp {value.name}{rounding} : {value.type} -> {to.type}", value.shape, dtype)


def _computable(write: Writer, value: Value) -> Value:
    """float16, bfloat16 and float8 as float32."""
    return (
        convert(write, value, jnp.dtype("float32")) if value.is_float and _bits(value.dtype) < 32 else value
    )


def calculate(write: Writer, operation: Callable[..., Value], *operands: Value) -> Value:
    """`operation` on operands of one shape and dtype; narrower floats are computed in float32 and rounded back."""
    dtype = operands[0].dtype
    return convert(write, operation(*(_computable(write, one) for one in operands)), dtype)


def binary(write: Writer, name: str, left: Value, right: Value) -> Value:
    operation = choose(BINARY[name], left)
    return calculate(write, lambda a, b: write.elementwise(operation, a, b), left, right)


@rule(*BINARY)
def _(kernel: Kernel, equation, left, right):
    shape = equation.outvars[0].aval.shape
    left, right = (kernel.write.broadcast(one, shape) for one in (left, right))
    return binary(kernel.write, equation.primitive.name, left, right)


def _signed(write: Writer, left: Value, right: Value) -> tuple[Value, Value] | None:
    """Signed integers of one dtype, broadcast to one shape."""
    if left.dtype != right.dtype or not left.is_signed:
        return None
    shape = jnp.broadcast_shapes(left.shape, right.shape)
    return write.broadcast(left, shape), write.broadcast(right, shape)


def _is_power_of_2(value: Value) -> bool:
    return value.constant is not None and value.constant > 0 and not value.constant & (value.constant - 1)


def floor_divide(write: Writer, left: Value, right: Value) -> Value | None:
    """jnp.floor_divide of signed integers."""
    if (operands := _signed(write, left, right)) is None:
        return None
    left, by = operands
    if _is_power_of_2(right):
        bits = write.constant(int(right.constant).bit_length() - 1, left.dtype, left.shape)
        return write.elementwise("arith.shrsi", left, bits)
    quotient, rest = (write.elementwise(operation, left, by) for operation in ("arith.divsi", "arith.remsi"))
    # The quotient is rounded towards zero, which is up where the remainder and the divisor differ in sign.
    zero, boolean = write.constant(0, left.dtype, left.shape), jnp.dtype("bool")
    up = write.elementwise("arith.cmpi slt,", write.elementwise("arith.xori", rest, by), zero, dtype=boolean)
    uneven = write.elementwise("arith.cmpi ne,", rest, zero, dtype=boolean)
    one_less = write.converted("arith.extsi", write.elementwise("arith.andi", up, uneven), left.dtype)
    return write.elementwise("arith.addi", quotient, one_less)


def remainder(write: Writer, left: Value, right: Value) -> Value | None:
    """jnp.remainder of signed integers by a power of two: an unsigned remainder of the same bits.

    Not a mask: Triton's contiguity analysis understands a remainder, not a mask.
    """
    operands = _signed(write, left, right) if _is_power_of_2(right) else None
    return None if operands is None else write.elementwise("arith.remui", *operands)


# jnp writes these functions with sign, rem and where: a third of our kernels' operations. And two of Triton's passes
# for coalescing scan a kernel once for each operation.
SHORTER = {"floor_divide": floor_divide, "remainder": remainder}


@rule(*COMPARISONS)
def _(kernel: Kernel, equation, left, right):
    write, shape = kernel.write, equation.outvars[0].aval.shape
    left, right = (_computable(write, write.broadcast(one, shape)) for one in (left, right))
    predicate = choose(COMPARISONS[equation.primitive.name], left)
    operation = "arith.cmpf" if left.is_float else "arith.cmpi"
    return write.elementwise(f"{operation} {predicate},", left, right, dtype=jnp.dtype("bool"))


def libdevice(write: Writer, symbol: str, *operands: Value) -> Value:
    for one in operands:
        if one.dtype != jnp.float32:
            raise NotImplementedError(f"{symbol} of {one.dtype}")
    names, types = (", ".join(parts) for parts in ([o.name for o in operands], [o.type for o in operands]))
    where = f'{{libname = "", libpath = "", pure = true, symbol = "{symbol}"}}'
    spelled = f"tt.extern_elementwise {names} {where} : ({types}) -> {operands[0].type}"
    return write.define(spelled, operands[0].shape, operands[0].dtype)


@rule(*LIBDEVICE, LOG2[0])
def _(kernel: Kernel, equation, value):
    symbol = dict([LOG2], **LIBDEVICE)[equation.primitive.name]
    return calculate(kernel.write, lambda x: libdevice(kernel.write, symbol, x), value)


@rule(*MATH)
def _(kernel: Kernel, equation, value):
    operation = MATH[equation.primitive.name]
    return calculate(kernel.write, lambda x: kernel.write.elementwise(operation, x), value)


@rule("round")
def _(kernel: Kernel, equation, value):
    to_even = "EVEN" in str(equation.params["rounding_method"])
    symbol = "__nv_rintf" if to_even else "__nv_roundf"
    return calculate(kernel.write, lambda x: libdevice(kernel.write, symbol, x), value)


@rule("abs")
def _(kernel: Kernel, equation, value):
    operation = "math.absf" if value.is_float else "math.absi"
    return calculate(kernel.write, lambda x: kernel.write.elementwise(operation, x), value)


def negative(write: Writer, value: Value) -> Value:
    """-0.0 - x has the bits of -x, and Triton 3.6 takes no arith.negf of a tile."""
    zero = write.constant(-0.0 if value.is_float else 0, value.dtype, value.shape)
    return binary(write, "sub", zero, value)


@rule("neg")
def _(kernel: Kernel, equation, value):
    return negative(kernel.write, value)


@rule("not")
def _(kernel: Kernel, equation, value):
    ones = kernel.write.constant(True if value.is_bool else -1, value.dtype, value.shape)
    return kernel.write.elementwise("arith.xori", value, ones)


@rule("sign")
def _(kernel: Kernel, equation, value):
    """(x > 0) - (x < 0), and a NaN's is NaN."""
    write = kernel.write
    compare = "arith.cmpf o" if value.is_float else "arith.cmpi s"
    if not (value.is_float or value.is_signed):
        raise NotImplementedError(f"sign of {value.dtype}")

    def sign(x: Value) -> Value:
        zero = write.constant(0, x.dtype, x.shape)
        above, below = (
            write.elementwise(f"{compare}{way},", x, zero, dtype=jnp.dtype("bool")) for way in ("gt", "lt")
        )
        signs = binary(write, "sub", convert(write, above, x.dtype), convert(write, below, x.dtype))
        if not x.is_float:
            return signs
        is_nan = write.elementwise("arith.cmpf uno,", x, x, dtype=jnp.dtype("bool"))
        return select(write, is_nan, x, signs)

    return calculate(write, sign, value)


@rule("square")
def _(kernel: Kernel, equation, value):
    return binary(kernel.write, "mul", value, value)


@rule("integer_pow")
def _(kernel: Kernel, equation, value):
    exponent = equation.params["y"]
    if not 1 <= exponent <= 4:
        raise NotImplementedError(f"a power of {exponent}")
    power = value
    for _ in range(exponent - 1):
        power = binary(kernel.write, "mul", power, value)
    return power


@rule("logistic")
def _(kernel: Kernel, equation, value):
    write = kernel.write

    def logistic(x: Value) -> Value:
        one = write.constant(1, x.dtype, x.shape)
        falling = libdevice(write, LIBDEVICE["exp"], negative(write, x))
        return binary(write, "div", one, binary(write, "add", one, falling))

    return calculate(write, logistic, value)


def select(write: Writer, which: Value, yes: Value, no: Value) -> Value:
    names = ", ".join(value.name for value in (which, yes, no))
    types = f"{which.type}, {yes.type}" if yes.shape else yes.type
    return write.define(f"arith.select {names} : {types}", yes.shape, yes.dtype)


@rule("select_n")
def _(kernel: Kernel, equation, which, *cases):
    if len(cases) != 2 or not which.is_bool:
        raise NotImplementedError(f"a choice among {len(cases)} by {which.dtype}")
    shape = equation.outvars[0].aval.shape
    which, no, yes = (kernel.write.broadcast(one, shape) for one in (which, *cases))
    return select(kernel.write, which, yes, no)


@rule("clamp")
def _(kernel: Kernel, equation, least, value, most):
    write = kernel.write
    least, most = (write.broadcast(one, value.shape) for one in (least, most))
    return binary(write, "min", binary(write, "max", value, least), most)


@rule("convert_element_type")
def _(kernel: Kernel, equation, value):
    return convert(kernel.write, value, equation.params["new_dtype"])


@rule("bitcast_convert_type")
def _(kernel: Kernel, equation, value):
    dtype = equation.params["new_dtype"]
    if _bits(dtype) != _bits(value.dtype):
        raise NotImplementedError(f"a bitcast of {value.dtype} to {dtype}")
    to = Value("", value.shape, dtype)
    if to.type == value.type:
        return Value(value.name, value.shape, dtype)
    return kernel.write.define(f"tt.bitcast {value.name} : {value.type} -> {to.type}", value.shape, dtype)


@rule("copy", "copy_p", "stop_gradient", "reshard", "optimization_barrier")
def _(kernel: Kernel, equation, *values):
    return values
