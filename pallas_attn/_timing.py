"""Device time of jitted work, for tuning and benchmarks."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

WARM_UP_SECONDS = 0.3  # compiling leaves the GPU idle, and it wakes slowly
REPEATS = 5
QUEUED = 3


def warm_up(run: Callable[[], Any]) -> None:
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        jax.block_until_ready(run())


def device_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds that `run`, a dispatch of jitted work that takes milliseconds, keeps the device busy: median of repeats.

    What further runs add when queued behind one, so that dispatch and the host's waking up, up to 0.8 ms around
    a burst, are not counted. Their dispatch is hidden behind the first run.
    """
    return statistics.median(
        (_queued_seconds(run, 1 + QUEUED) - _queued_seconds(run, 1)) / QUEUED for _ in range(repeats)
    )


def _queued_seconds(run: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return time.perf_counter() - start
