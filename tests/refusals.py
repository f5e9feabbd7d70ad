"""What is wrong for an argument of each kind, and what a refusal must say."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NAN, INF = float("nan"), float("inf")


def zeros(shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """As jnp's, without a compiled program for each shape: these are made whenever tests are collected."""
    return jax.device_put(np.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


class Kind(NamedTuple):
    """Wrong values of an argument: of any call, and for a given right value."""

    values: tuple[Any, ...]
    arrays: Callable[[Any], Iterator[Any]] = lambda right: iter(())
    optional: bool = False

    def wrong(self, right: Any) -> list[Any]:
        values = [*self.values, *self.arrays(right)]
        return values if self.optional else [None, *values]

    def or_none(self) -> "Kind":
        return self._replace(optional=True)


def _wrong_arrays(right: Any) -> Iterator[Any]:
    yield np.asarray(right, np.float32).tolist()
    # More axes than any form of the argument has.
    yield right[None, None]
    for dtype in (np.complex64, np.bool_, jnp.uint8, jnp.int16 if right.dtype == np.int32 else jnp.int32):
        yield zeros(right.shape, dtype)
    yield np.full(right.shape, "a")
    yield np.zeros(right.shape, object)
    yield jax.random.key(0)


LAYOUT_LIKE = (1, "foo", b"NHD", ["NHD"], zeros(2), {})
ARRAY = Kind(("x", 1.5, 1, True, np.float32(1), {}, object()), _wrong_arrays)
COUNT = Kind(("3", 2.5, True, [1], np.float32(2), np.ones((), int), ones((), int), 0, -1, {}))
NUMBER = Kind(("1", [1.0], True, 0.0, -1.0, NAN, INF, 1e39, 1e-60, 10**400, 1j, ones(()), np.ones(1)))
SOFTCAP = NUMBER._replace(values=(*NUMBER.values, 2.0**126, np.float32(2e30)), optional=True)
FLAG = Kind((1, 0.0, "no", [True], jnp.array(True), np.array([True])))
NAME = Kind(LAYOUT_LIKE)
DTYPE = Kind(("bfloat17", 3.5, "int32", [1], object(), {}, complex, "U3"))
INSTANCE = Kind((1, "x", [], zeros(2), object(), int))
FUNCTION = Kind(tuple(value for value in INSTANCE.values if not callable(value)))
LAYER = Kind(
    (
        *("0", 1.5, True, -1, 2, 10**20, [0], {}, np.float32(0), np.int64(2), np.zeros((), bool)),
        *(jnp.float32(0), zeros(1, jnp.int32), jnp.int32(2), jnp.int32(-1)),
    )
)
PAGES = Kind(
    ("x", 1.5, 1, {}, ["0"], [0.0], [True], [[0]], np.zeros(1), np.zeros((1, 1), int), zeros(1), [None])
)
SCALES = Kind(
    (
        *(
            "x",
            True,
            [1.0],
            0,
            -1.0,
            NAN,
            INF,
            1e39,
            1e-60,
            10**400,
            1j,
            {},
            np.array(["a"]),
            np.array([True]),
        ),
        *(np.zeros(2), np.array([1.0, np.inf]), np.ones(3), ones(3), ones((2, 1)), ones(2, bool)),
    )
)
SLOPES = Kind(("x", 1.0, True, ["1"], [NAN], [None, 1.0], {}, ones((2, 2)), object()))


def is_refused(call: Callable[..., Any], function: str, argument: str, value: Any) -> str | None:
    """None for a refusal as it should be, else what happened instead."""
    try:
        call(**{argument: value})
    except (TypeError, ValueError) as error:
        text = str(error)
        pattern = rf"{re.escape(function)}: argument '{re.escape(argument)}(\.\w+)?': expected .+, got .+"
        if re.fullmatch(pattern, text) and len(text) < 300:
            return None
        return f"{_show(value)}: {type(error).__name__}: {text[:200]}"
    except Exception as error:
        return f"{_show(value)}: {type(error).__name__}: {str(error)[:200]}"
    return f"{_show(value)}: accepted"


def _show(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {value.dtype}{value.shape}"
    return repr(value)[:60]
