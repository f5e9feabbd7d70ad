"""Sizes that are powers of two: sides of tiles, and head_dim in such tiles."""

from collections.abc import Mapping
from typing import Any

from pallas_attn._call.architecture import LEAST_SIDE

MAX_HEAD_DIM = 256
"""Of kernels whose programs hold many query rows; `paged_attention`, whose programs hold few, takes twice that."""

type Chunk = tuple[Any, int]
"""(first, size) of some elements of head_dim; the size is a power of two, and the last may reach beyond the end."""


def next_power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(a, b):
    return (a + (b - 1)) // b


def tile_side(size: int) -> int:
    """Side of a tile that holds `size` rows or columns of a matrix product: a power of two, at least the tensor
    core's 16; the excess is masked."""
    return max(LEAST_SIDE, next_power_of_2(size))


def whole(head_dim: int) -> Chunk:
    """All of head_dim in one chunk, for kernels that wait for memory rather than for products."""
    return 0, tile_side(head_dim)


def chunks(head_dim: int) -> tuple[Chunk, ...]:
    """head_dim in one chunk, or in two where that saves a quarter of the work: 192 = 128 + 64, 80 = 64 + 16."""
    _, side = whole(head_dim)
    first, rest = side // 2, tile_side(head_dim - side // 2)
    return ((0, first), (first, rest)) if first >= LEAST_SIDE and rest <= side // 4 else (whole(head_dim),)


def reaches_beyond(chunk: Chunk, head_dim: int) -> bool:
    """Whether a chunk may reach beyond head_dim; its first element may be known at run time only."""
    first, size = chunk
    return first + size > head_dim if isinstance(first, int) else head_dim % size > 0


def too_wide(dims: Mapping[str, int], most: int = MAX_HEAD_DIM) -> str | None:
    """Why kernels do not serve heads of these sizes, by their names; None if they do."""
    return next((f"{name} is at most {most}, got {dim}" for name, dim in dims.items() if dim > most), None)
