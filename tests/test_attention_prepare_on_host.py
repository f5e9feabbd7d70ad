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


def ordered(program: Path, lens, q_lens, *, partials: int = 0) -> np.ndarray:
    """Work items in the order in which they are taken."""
    bounds = np.cumsum([0, *q_lens], dtype=np.int32)
    tokens = int(bounds[-1])
    most = tokens // TILE_TOKENS + len(lens) + 3 + partials
    call = struct.pack(
        "11i",
        *(len(lens), tokens, GROUP, KV_HEADS, 16, -(-max(lens) // 16), most, partials),
        *(TILE_TOKENS, TILE_KEYS, CTAS),
    )
    arrays = (np.asarray(lens, np.int32), bounds)
    done = subprocess.run(
        [program], input=call + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    _, count, _, together = np.frombuffer(done.stdout, np.int32, 4)
    assert together == KV_HEADS
    items = np.frombuffer(done.stdout, np.int32, offset=16).reshape(-1, 8)[:count]
    found = np.zeros(count, [(name, int) for name in FIELDS])
    for i, name in enumerate(FIELDS):
        found[name] = items[:, i]
    return found


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


@pytest.mark.parametrize(
    ("lens", "q_lens"), [((4096, 700), (4096, 700)), ((100, 5000, 900, 2000), (1, 60, 1, 1))], ids=str
)
def test_the_longest_come_first(program, lens, q_lens):
    keys = ordered(program, lens, q_lens)["num_keys"]
    assert (np.diff(keys) <= 0).all()
