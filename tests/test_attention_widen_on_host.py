"""The CUDA kernel that makes 16-bit rows of 8-bit pages, its own source run on the host (stand_in/device.h). No GPU."""

import dataclasses
import struct
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from host_build import build_stand_in

pytestmark = pytest.mark.once
BF16 = ml_dtypes.bfloat16
NOTHING = 0xFFFF  # what an array holds that nobody wrote


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_widen")


@dataclasses.dataclass
class Case:
    lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int = 16
    head_dim: int = 64
    value_dim: int = 64
    kv_heads: int = 2
    group: int = 4
    dtype: type = BF16
    cache: str = "float8_e4m3fn"
    heads_first: bool = False
    window: int = -1  # keys to the left
    least_rows: int = 64
    least_pairs: int = 0
    room: int = 1000
    ctas: int = 3
    now: int | None = None  # of the sequences

    def __post_init__(self):
        rng = np.random.default_rng(0)
        seqs, self.max_pages = len(self.lens), max(1, -(-max(self.lens) // self.page_size))
        self.num_pages = seqs * self.max_pages
        self.tables = rng.permutation(self.num_pages).astype(np.int32).reshape(seqs, self.max_pages)
        sides = (self.kv_heads, self.page_size) if self.heads_first else (self.page_size, self.kv_heads)
        # All bytes, NaN among them.
        self.pools = [
            rng.integers(0, 256, (self.num_pages, *sides, dim), np.uint8)
            for dim in (self.head_dim, self.value_dim)
        ]
        self.bounds = np.cumsum([0, *self.q_lens], dtype=np.int32)
        self.seq_lens = np.asarray(self.lens, np.int32)
        self.tokens = int(self.bounds[-1]) + 5

    def rows(self, pool: np.ndarray, seq: int, begin: int) -> np.ndarray:
        """[kv_heads, keys, dim]: keys from `begin` on as 16-bit words, NaN and 0 where there is no page."""
        numbers = pool.view(getattr(ml_dtypes, self.cache, np.int8)).astype(self.dtype)
        keys = np.arange(begin, self.lens[seq])
        pages = self.tables[seq, keys // self.page_size]
        outside = (pages < 0) | (pages >= self.num_pages)
        numbers = numbers.swapaxes(1, 2) if not self.heads_first else numbers
        found = numbers[np.where(outside, 0, pages), :, keys % self.page_size].swapaxes(0, 1)
        found[:, outside] = np.nan if pool is self.pools[0] else 0
        return found


def run(program: Path, case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Rows of keys and of values, tables of queries and keys, and which sequences are taken."""
    call = struct.pack(
        "16i",
        *(case.dtype != BF16, case.cache == "int8", case.tokens, case.group, case.kv_heads),
        *(case.head_dim, case.value_dim, case.num_pages, case.page_size, case.max_pages, len(case.lens)),
        *(case.heads_first, case.least_rows, case.least_pairs, case.room, case.ctas),
    )
    now = len(case.lens) if case.now is None else case.now
    arrays = (
        *case.pools,
        case.tables,
        case.seq_lens,
        case.bounds,
        np.int32([now]),
        np.int32([case.window, 0]),
    )
    done = subprocess.run(
        [program], input=call + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    made, at = [], 0
    for dim in (case.head_dim, case.value_dim):
        shape = (case.kv_heads, case.room, dim)
        made.append(np.frombuffer(done.stdout, np.uint16, np.prod(shape), at).reshape(shape))
        at += made[-1].nbytes
    told = np.frombuffer(done.stdout, np.int32, offset=at)
    seqs = len(case.lens)
    return made, told[: 3 * seqs].reshape(-1, 3), told[3 * seqs : 6 * seqs].reshape(-1, 3), told[6 * seqs :]


def check(program: Path, case: Case, expected: list[int]) -> None:
    """That exactly the `expected` sequences are taken, and their rows right."""
    made, queries, keys, taken = run(program, case)
    assert np.flatnonzero(taken).tolist() == expected
    end = 0
    for seq, new in enumerate(case.q_lens):
        if seq not in expected:
            assert queries[seq].tolist() == keys[seq].tolist() == [0, 0, 1]
            continue
        assert queries[seq].tolist() == [case.bounds[seq], case.bounds[seq + 1], 1]
        begin = 0 if case.window < 0 else max(0, case.lens[seq] - new - case.window)
        assert keys[seq].tolist() == [end, end + case.lens[seq] - begin, 1]
        for rows, pool in zip(made, case.pools, strict=True):
            right = case.rows(pool, seq, begin)
            got = rows[:, end : keys[seq, 1]].view(case.dtype)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
            known = ~np.isnan(right)
            np.testing.assert_array_equal(got[known].view(np.uint16), right[known].view(np.uint16))
        end = keys[seq, 1]
    for rows in made:
        assert (rows[:, end:] == NOTHING).all()


LENS, Q_LENS = (70, 300, 40, 1, 129, 0, 33), (20, 16, 15, 1, 129, 0, 33)
CASES = [
    Case(LENS, Q_LENS),
    Case(LENS, Q_LENS, page_size=1, heads_first=True, cache="int8"),
    Case(LENS, Q_LENS, page_size=5, head_dim=128, dtype=np.float16, kv_heads=1),
    Case(LENS, Q_LENS, page_size=24, head_dim=192, value_dim=128, cache="int8", dtype=np.float16, ctas=1),
    Case(LENS, Q_LENS, page_size=256, head_dim=16, value_dim=256, heads_first=True, kv_heads=3),
    Case(LENS, Q_LENS, head_dim=112, value_dim=80, window=37),
    Case(LENS, Q_LENS, page_size=7, window=0, heads_first=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cache}-{case.page_size}-{case.head_dim}")
def test_rows_are_what_pages_hold(program, case):
    check(program, case, [0, 1, 4, 6])


def test_sequences_are_taken_in_order_as_long_as_there_is_room(program):
    check(program, Case(LENS, Q_LENS, room=532), [0, 1, 4, 6])
    check(program, Case(LENS, Q_LENS, room=531), [0, 1, 4])
    check(program, Case(LENS, Q_LENS, room=498), [0, 1])
    # One for which there never is keeps nobody out.
    check(program, Case(LENS, Q_LENS, room=299), [0, 4, 6])
    check(program, Case(LENS, Q_LENS, room=32), [])


def test_none_is_taken_of_a_call_with_few_pairs_of_tiles(program):
    """One of rows and 3, 1, 2 of keys in all that are long, 5 x 2 in the fourth."""
    check(program, Case(LENS, Q_LENS, least_pairs=3 + 1 + 10 + 2), [0, 1, 4, 6])
    check(program, Case(LENS, Q_LENS, least_pairs=3 + 1 + 10 + 2 + 1), [])


def test_as_many_sequences_as_there_are(program):
    check(program, Case(LENS, Q_LENS, now=2), [0, 1])
    check(program, Case(LENS, Q_LENS, now=0), [])
    check(program, Case(LENS, Q_LENS, now=-3), [])
    check(program, Case(LENS, Q_LENS, now=99), [0, 1, 4, 6])


def test_many_sequences(program):
    lens, q_lens = (5, 130, 64, 1, 40) * 60, (5, 20, 1, 1, 17) * 60
    expected = [seq for seq in range(300) if seq % 5 in (1, 4)]
    check(program, Case(lens, q_lens, kv_heads=1, head_dim=16, value_dim=16, room=11000, ctas=2), expected)


@pytest.mark.parametrize("entry", [-1, 10**6, -(2**31)])
def test_a_page_outside_the_pool_is_nan_in_keys(program, entry):
    case = Case(LENS, Q_LENS, page_size=8)
    case.tables[1, 5] = case.tables[4, 16] = entry
    # Nobody looks at what is behind a sequence's end.
    case.tables[0, 9:] = entry
    check(program, case, [0, 1, 4, 6])


@pytest.mark.parametrize("length", [-1, 10**6, 2**31 - 1])
def test_lengths_that_cannot_be_right_are_not_taken(program, length):
    case = Case(LENS, Q_LENS)
    case.seq_lens[1] = length
    check(program, case, [0, 4, 6])


def test_more_queries_than_keys(program):
    """Some stand before the sequence's start."""
    check(program, Case((30, 50), (40, 20), window=3), [0, 1])
