"""A whole kernel as the text of a Triton IR module.

The text is spelled as Triton 3.9 does; `compiler` respells it for older ones. It names no files, lines or versions, so
that equal kernels are equal texts.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from pallas_attn._lowering import arithmetic, control, memory, shapes
from pallas_attn._lowering.body import Ref
from pallas_attn._lowering.rules import Kernel
from pallas_attn._lowering.text import Value, Writer

# Modules of rules, which register themselves.
RULES = (arithmetic, control, memory, shapes)
# XLA's buffers begin at multiples of at least so many bytes: it is what lets Triton move 16 bytes at once.
ALIGNMENT = 16
INT32, INT64 = jnp.dtype("int32"), jnp.dtype("int64")


@dataclasses.dataclass(frozen=True)
class Batch:
    """A dimension that a call was mapped over: how long it is, and which of the kernel's arguments have it in front."""

    size: int
    batched: tuple[bool, ...]


def lower(
    closed: ClosedJaxpr,
    arguments: Sequence[Ref],
    *,
    name: str,
    grid: Sequence[int],
    batch: Sequence[Batch] = (),
) -> str:
    """The module of a traced body. Its programs are `grid`, times the batches along the first axis."""
    write = Writer()
    pointers = [Value(f"%arg{ref.position}", (), ref.dtype, is_pointer=True) for ref in arguments]
    if len(grid) > 3:
        raise NotImplementedError(f"{name}: a grid of {len(grid)} axes, of which a GPU has three")
    batched, pointers = _batch(write, pointers, arguments, grid, batch) if batch else (None, pointers)
    program = [_program_id(write, axis, size) for axis, size in enumerate(grid)]
    if batched is not None and grid:
        program[0] = batched
    Kernel(name, write, pointers, program).run(closed, ())
    write.line("tt.return")
    spelled = ", ".join(
        f"%arg{ref.position}: {Value('', (), ref.dtype, is_pointer=True).type} "
        f"{{tt.divisibility = {ALIGNMENT} : i32}}"
        for ref in arguments
    )
    return f"module {{\n  tt.func public @{name}({spelled}) {{\n{write.text}\n  }}\n}}\n"


def _program_id(write: Writer, axis: int, size: int) -> Value:
    """The program's place along an axis.

    That it is below `size`, and not below 0, makes divisions by it cheaper, and the compiler only knows what it reads.
    A place of one bit is better not explained: the compiler then chooses by it early, and the largest of our kernels
    runs out of registers.
    """
    if size == 1:
        return write.constant(0, INT32)
    place = write.define(f"tt.get_program_id {'xyz'[axis]} : i32", (), INT32)
    if size == 2:
        return place
    return write.elementwise("arith.minui", place, write.constant(size - 1, INT32))


def _batch(write: Writer, pointers, arguments, grid, batch) -> tuple[Value, list[Value]]:
    """The place along the first axis without the batches, and pointers to the program's own part of each argument.

    What was mapped last has its dimension in front, and varies slowest.
    """
    pointers = list(pointers)

    def split(number: Value, by: int) -> tuple[Value, Value]:
        size = write.constant(by, INT32)
        return write.elementwise("arith.remui", number, size), write.elementwise("arith.divui", number, size)

    programs = write.define("tt.get_program_id x : i32", (), INT32)
    first, rest = split(programs, grid[0] if grid else 1)
    sizes = [math.prod(ref.shape) for ref in arguments]
    for level in batch:
        place, rest = split(rest, level.size)
        place = write.converted("arith.extui", place, INT64)
        for i, batched in enumerate(level.batched):
            if batched:
                step = write.constant(sizes[i], INT64)
                pointers[i] = memory.moved(write, pointers[i], write.elementwise("arith.muli", place, step))
                sizes[i] *= level.size
    return first, pointers
