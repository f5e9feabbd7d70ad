"""A whole kernel as the text of a Triton IR module.

The syntax is Triton 3.9's; `stages` adapts it for older versions. It contains no files, lines or versions, so that
equal kernels have equal texts.
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

# Importing these registers their rules.
RULES = (arithmetic, control, memory, shapes)
# XLA aligns buffers to at least this many bytes, which lets Triton move 16 bytes at once.
ALIGNMENT = 16
INT32, INT64 = jnp.dtype("int32"), jnp.dtype("int64")
# The most programs along a grid's second and third axis; along the first, 2**31 - 1.
MOST_BEHIND_FIRST = 2**16 - 1


@dataclasses.dataclass(frozen=True)
class Batch:
    """A dimension that a call was mapped over: its length, and which of the kernel's arguments have it in front."""

    size: int
    batched: tuple[bool, ...]


def folded(grid: Sequence[int]) -> int:
    """How many of a grid's axes are folded into the GPU's first one: all, if one is too long for another axis."""
    return len(grid) if any(size > MOST_BEHIND_FIRST for size in grid[1:]) else 1


def launched(grid: Sequence[int], batch: Sequence[Batch]) -> tuple[int, int, int]:
    """The programs of a kernel along the GPU's axes."""
    first = folded(grid)
    y, z, *_ = (*grid[first:], 1, 1)
    return math.prod(grid[:first]) * math.prod(level.size for level in batch), y, z


def lower(
    closed: ClosedJaxpr,
    arguments: Sequence[Ref],
    *,
    name: str,
    grid: Sequence[int],
    batch: Sequence[Batch] = (),
) -> str:
    """The module of a traced body. Its programs are as `launched` says."""
    write = Writer()
    pointers = [Value(f"%arg{ref.position}", (), ref.dtype, is_pointer=True) for ref in arguments]
    if len(grid) > 3:
        raise NotImplementedError(f"{name}: a grid of {len(grid)} axes, of which a GPU has three")
    first: list[Value] = []
    if batch or folded(grid) > 1:
        number = write.define("tt.get_program_id x : i32", (), INT32)
        first, rest = _split(write, number, grid[: folded(grid)])
        pointers = _batch(write, pointers, arguments, rest, batch)
    others = [_program_id(write, axis, grid[axis]) for axis in range(len(first), len(grid))]
    Kernel(name, write, pointers, first + others).run(closed, ())
    write.line("tt.return")
    spelled = ", ".join(
        f"%arg{ref.position}: {Value('', (), ref.dtype, is_pointer=True).type} "
        f"{{tt.divisibility = {ALIGNMENT} : i32}}"
        for ref in arguments
    )
    return f"module {{\n  tt.func public @{name}({spelled}) {{\n{write.text}\n  }}\n}}\n"


def _program_id(write: Writer, axis: int, size: int) -> Value:
    """The program's place along an axis.

    The bounds 0 and `size` are stated, which makes divisions cheaper. Not for a size of 2: the compiler would then
    branch on it early, and the largest of our kernels would run out of registers.
    """
    if size == 1:
        return write.constant(0, INT32)
    place = write.define(f"tt.get_program_id {'xyz'[axis]} : i32", (), INT32)
    if size == 2:
        return place
    return write.elementwise("arith.minui", place, write.constant(size - 1, INT32))


def _split(write: Writer, number: Value, sizes: Sequence[int]) -> tuple[list[Value], Value]:
    """The places along axes of these sizes, the first of which varies fastest, and the remaining quotient."""
    places = []
    for by in sizes:
        size = write.constant(by, INT32)
        places.append(write.elementwise("arith.remui", number, size))
        number = write.elementwise("arith.divui", number, size)
    return places, number


def _batch(write: Writer, pointers, arguments, number: Value, batch) -> list[Value]:
    """Pointers to the program's own part of each argument. The dimension mapped last is in front and varies slowest."""
    pointers = list(pointers)
    sizes = [math.prod(ref.shape) for ref in arguments]
    places, _ = _split(write, number, [level.size for level in batch])
    for place, level in zip(places, batch, strict=True):
        place = write.converted("arith.extui", place, INT64)
        for i, batched in enumerate(level.batched):
            if batched:
                step = write.constant(sizes[i], INT64)
                pointers[i] = memory.moved(write, pointers[i], write.elementwise("arith.muli", place, step))
                sizes[i] *= level.size
    return pointers
