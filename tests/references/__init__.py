"""References of a second hand: float64 torch, one sequence at a time, written as the textbook has it."""

import functools
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np


def remembered(reference: Callable[..., tuple[np.ndarray, ...]]) -> Callable[..., tuple[np.ndarray, ...]]:
    """Computes once what several tests and implementations are compared with: the same for the same inputs, to the
    last byte. What is handed out is read-only."""
    results: dict[bytes, tuple[np.ndarray, ...]] = {}

    @functools.wraps(reference)
    def call(*arguments: Any, **options: Any) -> tuple[np.ndarray, ...]:
        key = hashlib.sha256(pickle.dumps((arguments, sorted(options.items())))).digest()
        if key not in results:
            results[key] = reference(*arguments, **options)
            for array in results[key]:
                array.flags.writeable = False
        return results[key]

    return call
