"""Which pages the CUDA MLA kernel's CTAs visit, and where they leave what: plain C++, walked without a GPU."""

import ctypes
import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from host_build import build_library
from references.mla_schedule_model import plain_schedule

PAGE = 64
MOST_KEPT = 3


class Run(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("request", "page_begin", "page_end", "seq_len"),
            *("partial", "kept_splits", "bad_length"),
        )
    )


@dataclasses.dataclass
class Walk:
    library: ctypes.CDLL

    def __call__(self, lengths, schedule, splits, max_blocks: int) -> list[list[Run]]:
        """The runs of every part."""
        lengths, splits = np.asarray(lengths, np.int32), np.asarray(splits, np.int32)
        # A row is loaded as one word of 16 bytes, so it must begin at a multiple of them, as on the device.
        room = np.zeros(schedule.size + 4, np.int32)
        start = -room.ctypes.data % 16 // 4
        rows = room[start : start + schedule.size]
        rows[:] = np.asarray(schedule, np.int32).ravel()
        parts = schedule.shape[0]
        found = []
        for part in range(parts):
            runs = (Run * len(lengths))()
            arrays = (ctypes.c_void_p(array.ctypes.data) for array in (lengths, rows, splits))
            count = self.library.walk_on_host(len(lengths), parts, int(max_blocks), *arrays, part, runs)
            found.append(list(runs[:count]))
        return found


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return Walk(build_library(tmp_path_factory.mktemp("walk"), "tests/run_walker_host.cc"))


def scheduled(lengths: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    rows, splits, _ = plain_schedule([int(n) for n in lengths], parts, overhead=2)
    return np.array(rows), np.array(splits)


def some_lengths(seed: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 7, 40, 150]))
    return rng.integers(0, rng.choice([70, 900, 9000]), batch), int(rng.choice([1, 3, 22, 66, 132]))


@pytest.mark.parametrize("seed", range(12))
def test_every_page_is_visited_once_and_every_split_has_a_place(walk: Walk, seed: int) -> None:
    lengths, parts = some_lengths(seed)
    schedule, splits = scheduled(lengths, parts)
    pages = -(-lengths // PAGE)
    visited = [np.zeros(n, int) for n in pages]
    partials = defaultdict(list)
    for runs in walk(lengths, schedule, splits, max(pages.max(), 1)):
        for i, run in enumerate(runs):
            visited[run.request][run.page_begin : run.page_end] += 1
            assert (run.seq_len, run.bad_length) == (lengths[run.request], 0)
            partials[run.request].append(run.partial)
            count = splits[run.request + 1] - splits[run.request]
            first = run.page_begin == 0
            assert run.kept_splits == (count if 1 < count <= MOST_KEPT and first else 0)
            assert i == len(runs) - 1 or run.kept_splits == 0  # it waits for the others in registers
    assert all((times == 1).all() for times in visited)
    taken = []
    for request, of_request in partials.items():
        count = splits[request + 1] - splits[request]
        assert len(of_request) == count
        if count == 1:
            assert of_request == [-1]
        else:
            first = 2 * (splits[request] - request)
            assert of_request == list(range(first, first + count))
            taken += of_request
    assert sorted(partials) == list(range(len(lengths)))
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < 2 * parts


EXTREMES = (-(2**31), -65, -1, 0, 1, 2, 63, 64, 1000, 2**30, 2**31 - 1)


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_keeps_within_the_arrays(walk: Walk, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, parts = some_lengths(seed)
    lengths = np.where(rng.random(lengths.shape) < 0.1, rng.choice(EXTREMES, lengths.shape), lengths)
    max_blocks = int(rng.choice([1, 10, 200]))
    if seed % 2:  # of other lengths
        schedule, splits = scheduled(rng.integers(0, 5000, len(lengths)), parts)
    else:
        schedule, splits = rng.choice(EXTREMES, (parts, 8)), rng.choice(EXTREMES, len(lengths) + 1)
    for runs in walk(lengths, schedule, splits, max_blocks):
        for run in runs:
            assert 0 <= run.request < len(lengths)
            assert 0 <= run.page_begin <= run.page_end
            assert run.page_begin == run.page_end or run.page_end <= max_blocks
            assert 0 <= run.seq_len <= max_blocks * PAGE
            assert run.bad_length == (not 0 <= lengths[run.request] <= max_blocks * PAGE)
            assert -1 <= run.partial < 2 * parts
            assert run.kept_splits in (0, 2, 3)


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 63, 2**31 - 64])
def test_the_longest_lengths(walk: Walk, length: int) -> None:
    schedule = np.array([[0, 0, 0, length, 0, 0, 0, 0]])
    ((run,),) = walk([length], schedule, [0, 1], 2**25)
    assert (run.page_begin, run.page_end) == (0, -(-length // PAGE))
    assert (run.seq_len, run.bad_length) == (length, 0)
