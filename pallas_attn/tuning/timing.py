"""Device time of jitted work, and the loop of calls that tuning and benchmarks measure."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Calls rotate among sets of inputs of this many bytes in all, 32 times an H100's L2, so that the L2 is always cold.
ROTATE_BYTES = 1600 << 20
MOST_SETS = 128
LEAST_CALLS = 4  # calls in a round, which has an overhead of some microseconds
BURST_SECONDS = 0.02
CHECKED_CALLS = 2  # calls after the rounds: for the first set and the last

WARM_UP_SECONDS = 0.3  # the GPU is idle during compilation and takes time to clock up
REPEATS = 5
QUEUED = 3
PAUSE_SECONDS = 0.03  # before every burst: a hot card lowers its clock, and order would matter


def num_sets(set_bytes: int) -> int:
    """Number of sets of inputs, `set_bytes` each (what one call reads of a cache), that calls rotate among."""
    return max(1, min(MOST_SETS, math.ceil(ROTATE_BYTES / set_bytes)))


def num_rounds(call_seconds: float, calls_a_round: int) -> int:
    """Number of rounds that take about BURST_SECONDS; `call_seconds` is an estimate."""
    return max(1, round(BURST_SECONDS / (max(call_seconds, 8e-6) * calls_a_round)))


def num_calls(rounds: int, calls_a_round: int) -> int:
    """Number of calls in one run of `looped`."""
    return rounds * calls_a_round + CHECKED_CALLS


def looped(
    call: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    rounds: int,
    sets: Sequence[Any],
    lengths: jax.Array | None,
    *,
    plain: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The outputs for the first and the last set, by two calls after `rounds` rounds with a call for each set.

    Each round depends on the witnesses of the previous one, so that no call can be hoisted or dropped, and on nothing
    else: outputs are dead at once and share a buffer that stays in the L2, as in a model. If they were kept, each set
    would have its own buffer.

    Args:
        call: (set, lengths) -> (output, witness). The witness is a small float array that the same kernel writes (the
            lse); a call that has none gives its output twice.
        rounds: static, so that the host is not asked after each.
        sets: what differs from call to call, one pytree for each call of a round: block tables.
        lengths: any array that the call's result depends on; calls get it unchanged, but the compiler cannot know that.
            If None, the smallest float array of each set plays that role, with one number rewritten in place. (An
            optimization barrier does not suffice: unused halves of it are dropped.)
        plain: the call is jnp: XLA would drop what only the output needs, and compile a copy for every set.
    """
    call = jax.jit(call)  # traced once, not once a set

    def after(number: jax.Array, sets: Any, lengths: Any) -> tuple[Any, Any]:
        """Both unchanged, which only the value of `number` shows."""
        nothing = jnp.isnan(number)
        if lengths is None:
            return tuple(_touched(one, nothing) for one in sets), None
        return sets, lengths + nothing.astype(lengths.dtype)

    def probe(one: Any, lengths: Any) -> jax.Array:
        output, witness = call(one, lengths)
        return _first(witness) + _first(output) if plain else _first(witness)

    def body(_, carry):
        sets, lengths = carry
        if plain:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
            probes = jax.lax.map(lambda one: probe(one, lengths), stacked)
        else:
            probes = jnp.stack([probe(one, lengths) for one in sets])
        return after(jnp.sum(probes), sets, lengths)

    sets, lengths = jax.lax.fori_loop(0, rounds, body, (tuple(sets), lengths))
    first, witness = call(sets[0], lengths)
    sets, lengths = after(_first(witness), sets, lengths)
    last, _ = call(sets[-1], lengths)
    return first, last


def _touched(arrays: Any, nothing: jax.Array) -> Any:
    """With `nothing` added to the first number of the smallest float array, in place."""
    leaves, structure = jax.tree.flatten(arrays)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    least = min(floats, key=lambda i: leaves[i].size)
    leaf = leaves[least]
    # At an index that XLA does not know: for a constant one it copies the whole array.
    longest = leaf.shape.index(max(leaf.shape))
    place = [nothing.astype(jnp.int32) if axis == longest else 0 for axis in range(leaf.ndim)]
    first = jax.lax.dynamic_slice(leaf, place, (1,) * leaf.ndim)
    leaves[least] = jax.lax.dynamic_update_slice(leaf, first + nothing.astype(leaf.dtype), place)
    return jax.tree.unflatten(structure, leaves)


def _first(array: jax.Array) -> jax.Array:
    return array[(0,) * array.ndim].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def tiled(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The block repeated: fills a pool quickly and with little memory."""
    size = math.prod(shape)
    return jnp.tile(block, math.ceil(size / len(block)))[:size].reshape(shape)


def warm_up(run: Callable[[], Any]) -> None:
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        jax.block_until_ready(run())


def device_seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median of `device_samples`."""
    return statistics.median(device_samples(run, repeats))


def device_samples(run: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Seconds that `run`, which dispatches milliseconds of jitted work, keeps the device busy; one sample a repeat.

    Measured as the time that further runs add behind a first one, which hides their dispatch: so dispatch and the
    host's wake-up, up to 0.8 ms around a burst, are not counted.
    """
    return [(_queued_seconds(run, 1 + QUEUED) - _queued_seconds(run, 1)) / QUEUED for _ in range(repeats)]


def _queued_seconds(run: Callable[[], Any], times: int) -> float:
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return time.perf_counter() - start
