"""The lines of a kernel's Triton IR, and the values they define."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

ELEMENTS = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "i8",
    "uint16": "i16",
    "uint32": "i32",
    "uint64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
}
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that a line defines. `constant` is the Python number that all elements equal, if known."""

    name: str
    shape: Shape
    dtype: Any
    is_pointer: bool = False
    constant: Any = None

    @property
    def type(self) -> str:
        return type_of(self.shape, self.dtype, is_pointer=self.is_pointer)

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_bool(self) -> bool:
        return self.dtype == jnp.bool_

    @property
    def is_signed(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.signedinteger))


def element_of(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    if name not in ELEMENTS:
        raise NotImplementedError(f"dtype {name} has no type in Triton IR")
    return ELEMENTS[name]


def type_of(shape: Shape, dtype: Any, *, is_pointer: bool = False) -> str:
    element = element_of(dtype)
    if is_pointer:
        element = f"!tt.ptr<{element}>"
    if not shape:
        return element
    if any(side & (side - 1) for side in shape) or 0 in shape:
        raise NotImplementedError(f"a tile of {list(shape)}: Triton's have sides that are powers of two")
    return f"tensor<{'x'.join(map(str, shape))}x{element}>"


class Writer:
    """Collects lines. A method that writes an operation returns the value it defines."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0
        self._depth = 2

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def line(self, text: str) -> None:
        self._lines.append("  " * self._depth + text)

    @contextlib.contextmanager
    def indented(self) -> Iterator[None]:
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self) -> str:
        self._count += 1
        return f"%{self._count - 1}"

    def value(self, shape: Shape, dtype: Any) -> Value:
        """A value that the caller's own line defines, such as a loop's argument."""
        return Value(self.fresh(), shape, dtype)

    def define(self, operation: str, shape: Shape, dtype: Any, *, is_pointer: bool = False) -> Value:
        """`operation` is everything after the equals sign."""
        value = Value(self.fresh(), shape, dtype, is_pointer)
        self.line(f"{value.name} = {operation}")
        return value

    def constant(self, number: Any, dtype: Any, shape: Shape = ()) -> Value:
        spelled = _spell(number, dtype)
        if shape:
            spelled = f"dense<{spelled}>"
        elif jnp.dtype(dtype) == jnp.bool_:
            return dataclasses.replace(self.define(f"arith.constant {spelled}", (), dtype), constant=number)
        defined = self.define(f"arith.constant {spelled} : {type_of(shape, dtype)}", shape, dtype)
        return dataclasses.replace(defined, constant=number)

    def elementwise(self, operation: str, *operands: Value, dtype: Any = None) -> Value:
        """An operation on operands of one type; the result has that type, or elements of `dtype`."""
        first = operands[0]
        names, dtype = ", ".join(value.name for value in operands), first.dtype if dtype is None else dtype
        return self.define(f"{operation} {names} : {first.type}", first.shape, dtype)

    def converted(self, operation: str, value: Value, dtype: Any) -> Value:
        to = type_of(value.shape, dtype)
        return self.define(f"{operation} {value.name} : {value.type} to {to}", value.shape, dtype)

    def broadcast(self, value: Value, shape: Shape) -> Value:
        """A scalar, or an array of the same rank, broadcast to `shape`."""
        if value.shape == shape:
            return value
        if value.constant is not None:
            return self.constant(value.constant, value.dtype, shape)
        to = type_of(shape, value.dtype, is_pointer=value.is_pointer)
        operation = "tt.broadcast" if value.shape else "tt.splat"
        spelled = f"{operation} {value.name} : {value.type} -> {to}"
        return self.define(spelled, shape, value.dtype, is_pointer=value.is_pointer)


def _spell(number: Any, dtype: Any) -> str:
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return "true" if number else "false"
    if not jnp.issubdtype(dtype, jnp.floating):
        return str(int(number))
    exact = np.asarray(number).astype(dtype)
    if math.isfinite(exact):
        return f"{float(exact):.17e}"
    bits = exact.view(f"uint{8 * dtype.itemsize}")
    return f"0x{int(bits):0{2 * dtype.itemsize}X}"
