"""Device time of torch calls: many of them captured in one CUDA graph, which is replayed in bursts after pauses.

A graph leaves the host out, as `pallas_attn.tuning.timing` does for JAX, and calls follow each other back to back.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

BURST_SECONDS, PAUSE_SECONDS = 0.012, 0.03
LEAST_CALLS, LEAST_REPLAYS = 16, 3
GRAPH_SECONDS = 0.04  # of fewer calls, where they are long


class Captured:
    """At least LEAST_CALLS of call(set), or GRAPH_SECONDS of them, the sets in turn, in a graph of their own."""

    def __init__(self, call: Callable[[int], Any], num_sets: int):
        call(0)  # what is built at a first call is built now
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        self.num_calls = num_sets * math.ceil(least_calls(time.perf_counter() - start) / num_sets)
        self._graph = torch.cuda.CUDAGraph()
        # JAX's threads may use the GPU meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for index in range(self.num_calls):
                call(index % num_sets)
        self._replays = 0

    def sample(self) -> float:
        """Seconds a call in one burst of about BURST_SECONDS."""
        if self._replays == 0:
            self._replays = burst_replays(self._seconds(1) * self.num_calls)
        return self._seconds(self._replays)

    def _seconds(self, replays: int) -> float:
        """Of a call, the median replay's."""
        time.sleep(PAUSE_SECONDS)
        self._graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        torch.cuda.synchronize()
        milliseconds = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        return statistics.median(milliseconds) * 1e-3 / self.num_calls


def least_calls(seconds: float) -> int:
    """Of a graph, whose calls take so long, the host's share among it."""
    return max(1, min(LEAST_CALLS, math.ceil(GRAPH_SECONDS / seconds)))


def burst_replays(replay_seconds: float) -> int:
    return max(LEAST_REPLAYS, int(BURST_SECONDS / replay_seconds))


def peak_bytes(call: Callable[[int], Any]) -> int:
    """Device memory that a call takes besides what it is given."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call(0)
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
