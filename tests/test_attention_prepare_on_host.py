"""The order of the CUDA forward kernel's work items, its own source run on the host (stand_in/device.h). No GPU."""

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from host_build import build_stand_in

pytestmark = pytest.mark.once
GROUP, KV_HEADS, TILE_TOKENS, TILE_KEYS, CTAS = 4, 8, 32, 128, 132
FIELDS = ("seq", "token", "tokens", "first_key", "num_keys", "partial", "head", "nothing")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_prepare")


def counted(
    program: Path,
    lens,
    q_lens,
    *,
    partials: int = 0,
    kv_len: int = 0,
    keys_in_l2: int = 2**30,
    taken=None,
    tables: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[list[int], np.ndarray]:
    """What the kernels tell each other, and work items in the order in which they are taken. `tables`: where queries
    and keys of documents lie, of which `lens` are not asked for."""
    bounds = np.cumsum([0, *q_lens], dtype=np.int32)
    tokens = int(bounds[-1])
    most = tokens // TILE_TOKENS + len(lens) + 3 + partials
    call = struct.pack(
        "14i",
        *(
            len(lens),
            q_lens[0] if kv_len and not tables else tokens,
            GROUP,
            KV_HEADS,
            16,
            -(-max(lens) // 16),
            most,
            partials,
        ),
        *(TILE_TOKENS, TILE_KEYS, CTAS, keys_in_l2, kv_len, 3 if tables else 1),
    )
    of_others = np.zeros(len(lens), np.int32) if taken is None else np.asarray(taken, np.int32)
    arrays = (np.asarray(lens, np.int32), *(tables or (bounds,)), of_others)
    done = subprocess.run(
        [program], input=call + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    counters = np.frombuffer(done.stdout, np.int32, 4).tolist()
    items = np.frombuffer(done.stdout, np.int32, offset=16).reshape(-1, 8)[: counters[1]]
    found = np.zeros(len(items), [(name, int) for name in FIELDS])
    for i, name in enumerate(FIELDS):
        found[name] = items[:, i]
    return counters, found


def ordered(program: Path, lens, q_lens, *, partials: int = 0) -> np.ndarray:
    (_, _, _, together), items = counted(program, lens, q_lens, partials=partials)
    assert together == KV_HEADS
    return items


def expected(lens, q_lens) -> list[tuple[int, int, int, int]]:
    """(sequence, first query, queries, key tiles) of all tiles."""
    return [
        (seq, token, min(TILE_TOKENS, new - token), -(-(length - new + min(token + TILE_TOKENS, new)) // TILE_KEYS))
        for seq, (length, new) in enumerate(zip(lens, q_lens, strict=True))
        for token in range(0, new, TILE_TOKENS)
    ]  # fmt: skip


def tiles_of(items: np.ndarray) -> list[tuple[int, int, int, int]]:
    """The same of items: a tile's runs of key tiles are neighbours, from the first one on."""
    found = {}
    for item in sorted(items.tolist(), key=lambda item: (item[0], item[1], item[3])):
        seq, token, tokens, first, keys = item[:5]
        assert first == found.get((seq, token, tokens), 0)
        found[seq, token, tokens] = first + keys
    return [(*tile, keys) for tile, keys in found.items()]


@pytest.mark.parametrize("partials", [0, 66])
@pytest.mark.parametrize(
    ("lens", "q_lens"),
    [
        ((4096,), (4096,)),
        ((16000,), (40,)),
        ((3000, 16000, 500, 4000), (1, 70, 33, 1)),
        ((4096,) * 64 + (2048,) * 2, (1,) * 64 + (2048,) * 2),
        ((7, 5, 300), (7, 5, 300)),
    ],
    ids=["prompt", "long", "chunks", "decodes", "short"],
)
def test_every_key_of_every_tile_is_taken_once(program, lens, q_lens, partials):
    items = ordered(program, lens, q_lens, partials=partials)
    assert tiles_of(items) == expected(lens, q_lens)
    used = items["partial"][items["partial"] >= 0]
    assert sorted(used) == list(range(len(used)))


@pytest.mark.parametrize("partials", [0, 66])
def test_sequences_of_two_calls(program, partials):
    """Those that one takes, whose keys lie in rows as documents', are not the other's."""
    lens, q_lens = (3000, 16000, 500, 4000, 900), (300, 70, 33, 1, 900)
    taken, bounds = np.asarray([1, 0, 0, 0, 1]), np.cumsum([0, *q_lens])
    tables = np.zeros((2, 5, 3), np.int32)
    tables[:, :, 2] = 1
    tables[0, 0], tables[1, 0] = (0, 300, 1), (0, 3000, 1)
    tables[0, 4], tables[1, 4] = (bounds[4], bounds[5], 1), (3000, 3900, 1)
    both = [
        counted(program, lens, q_lens, partials=partials, taken=taken)[1],
        counted(program, lens, q_lens, partials=partials, kv_len=5000, tables=(tables[0], tables[1]))[1],
    ]
    assert not np.isin(both[0]["seq"], [0, 4]).any()
    assert np.isin(both[1]["seq"], [0, 4]).all()
    assert sorted(tiles_of(both[0]) + tiles_of(both[1])) == expected(lens, q_lens)


@pytest.mark.parametrize(
    ("lens", "q_lens"), [((4096, 700), (4096, 700)), ((100, 5000, 900, 2000), (1, 60, 1, 1))], ids=str
)
def test_the_longest_come_first(program, lens, q_lens):
    keys = ordered(program, lens, q_lens)["num_keys"]
    assert (np.diff(keys) <= 0).all()


LASTING = 2  # times as long as its longest tile takes, on all CTAs


@pytest.mark.parametrize("keys_in_l2", [1, 10_000, 70_000, 2**30])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 16384), (8, 2048), (64, 512), (3, 1000), (300, 4096)])
def test_equal_sequences_side_by_side_fit_in_the_l2(program, seqs, tokens, keys_in_l2):
    """Pairs of a sequence and a head: as few as do not leave multiprocessors idle at the end."""
    lens = (tokens,) * seqs
    (_, items, split, together), _ = counted(program, lens, lens, kv_len=tokens, keys_in_l2=keys_in_l2)
    tiles = expected(lens[:1], lens[:1])
    work, longest = sum(tile[3] for tile in tiles), max(tile[3] for tile in tiles)
    pairs = seqs * KV_HEADS
    assert (items, split) == (len(tiles) * seqs, 0)
    assert pairs % together == 0
    assert together == pairs or work * together >= LASTING * longest * CTAS
    if together > 1 and together * tokens > keys_in_l2:
        fewer = together // 2 if together % 2 == 0 else 1
        assert work * fewer < LASTING * longest * CTAS


def test_heads_side_by_side_by_what_sequences_have(program):
    """Of pages: keys that several tiles read, whatever a table has room for; decoded sequences read theirs once."""
    lens, new = (30_000,) * 6 + (4096,) * 64, (2048,) * 6 + (1,) * 64
    (_, _, _, together), _ = counted(program, lens, new, keys_in_l2=70_000)
    assert together == 1
    (_, _, _, together), _ = counted(program, lens, new, keys_in_l2=400_000)
    assert together == 2
    (_, _, _, together), _ = counted(program, (100_000,) * 64, (1,) * 64, keys_in_l2=1000)
    assert together == KV_HEADS
