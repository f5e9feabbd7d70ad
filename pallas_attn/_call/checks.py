"""One checker and one message format for every argument of every public function.

Messages read `function: argument 'name': expected ..., got ...`, one line that a caller can act on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

LEAST_FLOAT32, LARGEST_FLOAT32 = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def fail(
    function: str, argument: str, expected: str, got: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(f"{function}: argument '{argument}': expected {expected}, got {got}")


def dtype_name(dtype: Any) -> str:
    return jnp.dtype(dtype).name


def check_int(
    function: str, argument: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """A Python or numpy int: sizes are compiled in."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        fail(function, argument, "an int", f"{value!r} of type {type(value).__name__}", TypeError)
    if least is not None and value < least:
        fail(function, argument, f"at least {least}", str(value))
    if most is not None and value > most:
        fail(function, argument, f"at most {most}", str(value))


class ArgumentChecker:
    """Checks the arguments of one call, binding dimension names to sizes as they are first met.

    A dimension is given as an int (exact size), a known name (must agree with what bound it) or a new name
    (binds it). `dims` holds what has been bound. `spelled` maps names of arguments and dimensions to what messages
    call them, for functions that do the same under other names.
    """

    def __init__(self, function: str, spelled: Mapping[str, str] | None = None):
        self.function = function
        self.dims: dict[str, int] = {}
        self._bound_by: dict[str, str] = {}
        self._spelled = spelled or {}

    def spell(self, name: str) -> str:
        return self._spelled.get(name, name)

    def fail(self, name: str, expected: str, got: str, error: type[Exception] = ValueError) -> NoReturn:
        fail(self.function, self.spell(name), expected, got, error)

    def array(self, name: str, value: Any, shape: Sequence[int | str], dtypes: Sequence[Any]) -> None:
        """Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size."""
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            self.fail(name, "an array", type(value).__name__, TypeError)
        if not any(value.dtype == jnp.dtype(d) for d in dtypes):
            expected = " or ".join(dtype_name(d) for d in dtypes)
            self.fail(name, f"dtype {expected}", str(value.dtype), TypeError)
        if len(value.shape) != len(shape) or not all(map(self._agrees, shape, value.shape)):
            self.fail(name, f"shape {self._describe(shape)}", str(list(value.shape)))
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
                words.append(f"{self.spell(dim)}={self.dims[dim]} (as {self.spell(self._bound_by[dim])})")
            else:
                words.append(self.spell(dim) if isinstance(dim, str) else str(dim))
        return f"[{', '.join(words)}]"

    def one_of(self, name: str, value: Any, choices: Sequence[Any]) -> None:
        if value not in choices:
            self.fail(name, "one of " + ", ".join(repr(c) for c in choices), repr(value))

    def non_empty(self, name: str, value: Any) -> None:
        if 0 in value.shape:
            self.fail(name, "no empty dimension", f"shape {list(value.shape)}")

    def count(self, name: str, value: Any, most: int | None = None) -> None:
        check_int(self.function, self.spell(name), value, least=1, most=most)

    def flag(self, name: str, value: Any) -> None:
        if not isinstance(value, bool | np.bool_):
            self.fail(name, "True or False", f"{value!r} of type {type(value).__name__}", TypeError)

    def positive_float(self, name: str, value: Any) -> None:
        """Concrete numbers only: `scale`, `softcap` and their like are compiled into the kernel."""
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        # As float32, which is what kernels compute with.
        if value is not None and not (number and LEAST_FLOAT32 <= value <= LARGEST_FLOAT32):
            self.fail(name, "a finite number above 0, or None", repr(value))

    def multiple(self, name: str, value: int, of_name: str, of: int) -> None:
        if of <= 0 or value % of:
            self.fail(name, f"a multiple of {self.spell(of_name)} ({of})", str(value))
