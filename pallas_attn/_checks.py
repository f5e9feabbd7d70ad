"""One checker and one message format for every argument of every public function.

Messages read `function: argument 'name': expected ..., got ...`, one line that a caller can act on.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np


def fail(
    function: str, argument: str, expected: str, got: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(f"{function}: argument '{argument}': expected {expected}, got {got}")


def dtype_name(dtype: Any) -> str:
    return jnp.dtype(dtype).name


class ArgumentChecker:
    """Checks the arrays of one call, binding dimension names to sizes as they are first met.

    A dimension is given as an int (exact size), a known name (must agree with what bound it) or a new name
    (binds it). `dims` holds what has been bound.
    """

    def __init__(self, function: str):
        self.function = function
        self.dims: dict[str, int] = {}
        self._bound_by: dict[str, str] = {}

    def array(self, name: str, value: Any, shape: Sequence[int | str], dtypes: Sequence[Any]) -> None:
        """Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size."""
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            fail(self.function, name, "an array", type(value).__name__, TypeError)
        if not any(value.dtype == jnp.dtype(d) for d in dtypes):
            expected = " or ".join(dtype_name(d) for d in dtypes)
            fail(self.function, name, f"dtype {expected}", str(value.dtype), TypeError)
        if len(value.shape) != len(shape) or not all(map(self._agrees, shape, value.shape)):
            fail(self.function, name, f"shape {self._describe(shape)}", str(list(value.shape)))
        for dim, size in zip(shape, value.shape, strict=True):
            if isinstance(dim, str) and dim not in self.dims:
                self.dims[dim] = size
                self._bound_by[dim] = name

    def _agrees(self, dim: int | str, size: int) -> bool:
        return size == (dim if isinstance(dim, int) else self.dims.get(dim, size))

    def _describe(self, shape: Sequence[int | str]) -> str:
        """`[num_seqs=4 (as query), max_pages]`: what is known, and where it comes from."""
        words = []
        for dim in shape:
            if isinstance(dim, str) and dim in self.dims:
                words.append(f"{dim}={self.dims[dim]} (as {self._bound_by[dim]})")
            else:
                words.append(str(dim))
        return f"[{', '.join(words)}]"

    def one_of(self, name: str, value: Any, choices: Sequence[Any]) -> None:
        if value not in choices:
            fail(self.function, name, "one of " + ", ".join(repr(c) for c in choices), repr(value))

    def non_empty(self, name: str, value: Any) -> None:
        if 0 in value.shape:
            fail(self.function, name, "no empty dimension", f"shape {list(value.shape)}")

    def count(self, name: str, value: Any) -> None:
        """A Python or numpy int of at least 1: sizes are compiled in."""
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            fail(self.function, name, "an int", f"{value!r} of type {type(value).__name__}", TypeError)
        if value < 1:
            fail(self.function, name, "at least 1", str(value))

    def flag(self, name: str, value: Any) -> None:
        if not isinstance(value, bool | np.bool_):
            fail(self.function, name, "True or False", f"{value!r} of type {type(value).__name__}", TypeError)

    def positive_float(self, name: str, value: float | None) -> None:
        """Concrete numbers only: `scale`, `softcap` and their like are compiled into the kernel."""
        if value is not None and not (
            isinstance(value, int | float | np.number) and np.isfinite(value) and value > 0
        ):
            fail(self.function, name, "a finite number above 0, or None", repr(value))

    def multiple(self, name: str, value: int, of_name: str, of: int) -> None:
        if of <= 0 or value % of:
            fail(self.function, name, f"a multiple of {of_name} ({of})", str(value))
