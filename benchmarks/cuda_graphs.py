"""How long torch's kernels take: many calls captured in one CUDA graph, replayed in bursts with pauses between them.

A graph leaves the host out, as `pallas_attn._timing` does for JAX, and calls follow each other back to back.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

BURST_MS, PAUSE_S, ROUNDS = 12.0, 0.03, 5
LEAST_CALLS, LEAST_REPLAYS = 16, 3


def captured(call: Callable[[int], object], num_sets: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """(graph, its number of calls): at least LEAST_CALLS of call(set), over all page sets in turn."""
    call(0)
    torch.cuda.synchronize()
    num_calls = num_sets * -(-LEAST_CALLS // num_sets)
    graph = torch.cuda.CUDAGraph()
    # Other threads, JAX's among them, may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(num_calls):
            call(i % num_sets)
    return graph, num_calls


def replayed(graph: torch.cuda.CUDAGraph, num_calls: int, replays: int) -> float:
    """Microseconds a call, the median replay's, after a pause."""
    time.sleep(PAUSE_S)
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / num_calls


def burst(graph: torch.cuda.CUDAGraph, num_calls: int, earlier: Sequence[float]) -> float:
    """Microseconds a call in a burst of BURST_MS; how many replays that is, the first of the `earlier` bursts says."""
    once = earlier[0] if earlier else replayed(graph, num_calls, 1)
    return replayed(graph, num_calls, max(LEAST_REPLAYS, int(BURST_MS * 1e3 / (once * num_calls))))


def microseconds(call: Callable[[int], object], num_sets: int) -> float:
    """Of one call: the median of ROUNDS bursts."""
    graph, num_calls = captured(call, num_sets)
    times: list[float] = []
    for _ in range(ROUNDS):
        times.append(burst(graph, num_calls, times))
    return statistics.median(times)
