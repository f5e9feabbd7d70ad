"""One checker and one message format for every argument of every public function.

Messages read `function: argument 'name': expected ..., got ...`, one line that a caller can act on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

LEAST_FLOAT32, LARGEST_FLOAT32 = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
LONGEST_SHOWN = 60


def fail(
    function: str, argument: str, expected: str, got: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(f"{function}: argument '{argument}': expected {expected}, got {got}")


def dtype_name(dtype: Any) -> str:
    return jnp.dtype(dtype).name


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_traced(value: Any) -> bool:
    """Whether a transformation (jit, scan, vmap, grad) holds it, so that its value is not known yet."""
    return isinstance(value, Tracer)


def brief(value: Any) -> str:
    """For messages, a value of the right kind; an int may have hundreds of digits."""
    digits = str(value)
    return digits if len(digits) <= LONGEST_SHOWN else f"{digits[:LONGEST_SHOWN]}..."


def shown(value: Any) -> str:
    """A value of the wrong kind, for a message: short, and on one line whatever its repr is."""
    kind = type(value).__name__
    if is_array(value) and not isinstance(value, np.generic):
        return f"an array of dtype {value.dtype} and shape {list(value.shape)}"
    words = " ".join(repr(value).split())
    return f"{words} of type {kind}" if len(words) <= LONGEST_SHOWN else kind


def check_int(
    function: str, argument: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """A Python or numpy int: sizes are compiled in."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        fail(function, argument, "an int", shown(value), TypeError)
    if least is not None and value < least:
        fail(function, argument, f"at least {least}", brief(value))
    if most is not None and value > most:
        fail(function, argument, f"at most {most}", brief(value))


def is_number(value: Any) -> bool:
    """A real number of Python's or numpy's."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def plain(number: Any) -> int | float:
    """As a Python number: numpy would compare in its own type, where float32's bounds may be 0 and inf."""
    return number if isinstance(number, int) else float(number)


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

    def bind(self, source: str, **dims: int) -> None:
        """Binds dimensions of `source`, with which arrays that are checked later must agree."""
        self.dims.update(dims)
        self._bound_by.update(dict.fromkeys(dims, source))

    def is_array(self, name: str, value: Any) -> None:
        if not is_array(value):
            self.fail(name, "an array", type(value).__name__, TypeError)

    def dtype_among(self, name: str, value: Any, dtypes: Sequence[Any]) -> None:
        """An array of one of these dtypes."""
        self.is_array(name, value)
        if not any(value.dtype == jnp.dtype(d) for d in dtypes):
            expected = " or ".join(dtype_name(d) for d in dtypes)
            self.fail(name, f"dtype {expected}", str(value.dtype), TypeError)

    def array(self, name: str, value: Any, shape: Sequence[int | str], dtypes: Sequence[Any]) -> None:
        """Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or size."""
        self.dtype_among(name, value, dtypes)
        if len(value.shape) != len(shape) or not all(map(self._agrees, shape, value.shape)):
            self.fail(name, f"shape {self._describe(shape)}", str(list(value.shape)))
        for dim, size in zip(shape, value.shape, strict=True):
            if isinstance(dim, str) and dim not in self.dims:
                self.bind(name, **{dim: size})

    def _agrees(self, dim: int | str, size: int) -> bool:
        return size == (dim if isinstance(dim, int) else self.dims.get(dim, size))

    def _describe(self, shape: Sequence[int | str]) -> str:
        """`[num_seqs=4 (as query), max_pages]`: the sizes that are known, and where they come from."""
        words = []
        for dim in shape:
            if isinstance(dim, str) and dim in self.dims:
                words.append(f"{self.spell(dim)}={self.dims[dim]} (as {self.spell(self._bound_by[dim])})")
            else:
                words.append(self.spell(dim) if isinstance(dim, str) else str(dim))
        return f"[{', '.join(words)}]"

    def not_descending(self, name: str, bounds: Any, num_seqs: Any = None) -> None:
        """Refuses bounds that descend, as far as their values (and `num_seqs`) are known."""
        if is_traced(bounds) or is_traced(num_seqs) or not getattr(bounds, "is_fully_addressable", True):
            return
        known = np.asarray(bounds)
        if num_seqs is not None:
            known = known[: int(np.asarray(num_seqs).reshape(())) + 1]
        descends = known[1:] < known[:-1]
        if descends.any():
            at = int(np.argmax(descends))
            self.fail(name, "bounds that do not descend", f"{known[at + 1]} behind {known[at]}")

    def instance(self, name: str, value: Any, kind: type, *, optional: bool = False) -> None:
        if not (isinstance(value, kind) or (optional and value is None)):
            article = "an" if kind.__name__[0] in "AEIMOU" else "a"
            expected = f"{article} {kind.__name__}{' or None' if optional else ''}"
            self.fail(name, expected, type(value).__name__, TypeError)

    def one_of(self, name: str, value: Any, choices: Sequence[Any]) -> None:
        # Only values of the same kind are compared: an array would compare element by element.
        if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
            expected = "one of " + ", ".join(repr(c) for c in choices)
            if isinstance(value, type(choices[0])):
                self.fail(name, expected, repr(value))
            self.fail(name, expected, shown(value), TypeError)

    def dtype(self, name: str, value: Any, choices: Sequence[Any]) -> None:
        """Checks an argument that is a dtype, or that numpy takes for one."""
        expected = "one of " + ", ".join(map(dtype_name, choices))
        try:
            given = None if value is None else jnp.dtype(value)
        except (TypeError, ValueError):
            given = None
        if given is None:
            self.fail(name, expected, shown(value), TypeError)
        if given not in [jnp.dtype(d) for d in choices]:
            self.fail(name, expected, given.name)

    def non_empty(self, name: str, value: Any) -> None:
        if 0 in value.shape:
            self.fail(name, "no empty dimension", f"shape {list(value.shape)}")

    def count(self, name: str, value: Any, most: int | None = None) -> None:
        check_int(self.function, self.spell(name), value, least=1, most=most)

    def int_within(self, name: str, value: Any, least: int, most: int) -> None:
        check_int(self.function, self.spell(name), value, least, most)

    def flag(self, name: str, value: Any) -> None:
        if not isinstance(value, bool | np.bool_):
            self.fail(name, "True or False", shown(value), TypeError)

    def positive_float(self, name: str, value: Any, *, optional: bool = True) -> None:
        """Concrete numbers only: `scale`, `softcap` and their like are compiled into the kernel."""
        if optional and value is None:
            return
        expected = f"a finite number above 0{', or None' if optional else ''}"
        if not is_number(value):
            self.fail(name, expected, shown(value), TypeError)
        # As float32, which is what kernels compute with.
        if not LEAST_FLOAT32 <= plain(value) <= LARGEST_FLOAT32:
            self.fail(name, expected, brief(value))

    def multiple(self, name: str, value: int, of_name: str, of: int) -> None:
        if of <= 0 or value % of:
            self.fail(name, f"a multiple of {self.spell(of_name)} ({of})", str(value))
