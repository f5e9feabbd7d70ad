"""Device time of jitted work, and loops of calls to time, for tuning and benchmarks."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

WARM_UP_SECONDS = 0.3  # compiling leaves the GPU idle, and it wakes slowly
REPEATS = 5
QUEUED = 3
PAUSE_SECONDS = 0.03  # before every burst: a card that runs hot lowers its clock, and order would matter


def looped(
    call: Callable[[Any, Any], jax.Array], rounds: int, tables: Sequence[Any], seq_lens: Any
) -> tuple[jax.Array, ...]:
    """The last of `rounds` rounds of call(table, seq_lens), one for each table. Lengths depend on the round before, so
    that no call can be hoisted or dropped; the number of rounds is static, or the host would be asked after each."""

    def body(_, carry):
        lens, _ = carry
        outs = tuple(call(table, lens) for table in tables)
        probe = sum(out[(0,) * out.ndim].astype(jnp.float32) for out in outs)
        return lens + jnp.isnan(probe).astype(lens.dtype), outs

    out = jax.eval_shape(call, tables[0], seq_lens)
    outs = tuple(jnp.zeros(out.shape, out.dtype) for _ in tables)
    return jax.lax.fori_loop(0, rounds, body, (seq_lens, outs))[1]


@functools.partial(jax.jit, static_argnums=1)
def tiled(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The block repeated, so that filling a pool takes neither long nor much memory."""
    size = math.prod(shape)
    return jnp.tile(block, math.ceil(size / len(block)))[:size].reshape(shape)


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
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return time.perf_counter() - start
