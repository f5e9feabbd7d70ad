"""The CUDA kernel that finds packed documents: its own source run on the host (stand_in/device.h), and on a GPU."""

import struct
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from host_build import build_stand_in

from pallas_attn.ops.flash_attention import segments, segments_cuda

CASES = {
    "packed": (1, 300, 0, lambda rng, shape: np.sort(rng.integers(-5, 5, shape))),
    "in any order": (2, 97, 0, lambda rng, shape: rng.permutation(20)[np.sort(rng.integers(0, 20, shape))]),
    "scattered": (2, 65, 130, lambda rng, shape: rng.integers(0, 7, shape)),
    "all apart": (1, 200, 0, lambda rng, shape: np.arange(200)[None] * 2**20),
    "alike": (1, 40, 70, lambda rng, shape: np.zeros(shape)),
    "extremes": (2, 33, 31, lambda rng, shape: rng.choice([-(2**31), 2**31 - 1, 0, -1], shape)),
    "one token": (3, 1, 0, lambda rng, shape: rng.integers(0, 2, shape)),
    "more than threads": (1, 2500, 1100, lambda rng, shape: rng.integers(0, 900, shape)),
    "many rows": (40, 5, 4, lambda rng, shape: rng.integers(0, 3, shape)),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_documents")


def drawn(name: str) -> list[np.ndarray]:
    """Ids of queries, and of keys if they have their own."""
    batch, q_len, k_len, draw = CASES[name]
    rng = np.random.default_rng(0)
    return [draw(rng, (batch, length)).astype(np.int32) for length in (q_len, k_len) if length]


def on_host(program: Path, ids: list[np.ndarray]) -> list[np.ndarray]:
    (batch, q_len), k_len = ids[0].shape, ids[1].shape[1] if len(ids) > 1 else 0
    call = struct.pack("3i", batch, q_len, k_len) + b"".join(array.tobytes() for array in ids)
    done = subprocess.run([program], input=call, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    words, found = np.frombuffer(done.stdout, np.int32), []
    for array in ids:
        for shape in (array.shape, (batch, q_len + k_len, 3)):
            found.append(words[: np.prod(shape)].reshape(shape))
            words = words[np.prod(shape) :]
    assert not words.size
    return found


def check(ids: list[np.ndarray], found: list[np.ndarray]) -> None:
    """Ranks in order of first tokens; where each rank's tokens lie."""
    for row, every in enumerate(np.concatenate(ids, axis=1)):
        kinds, first = np.unique(every, return_index=True)
        order = kinds[np.argsort(first)].tolist()
        for of_side, ranks, table in zip(ids, found[::2], found[1::2], strict=True):
            expected = np.array([order.index(one) for one in of_side[row].tolist()])
            np.testing.assert_array_equal(ranks[row], expected)
            rows = np.zeros_like(table[row])
            for rank in range(len(order)):
                at = np.flatnonzero(expected == rank)
                rows[rank] = (at[0], at[-1] + 1, at[-1] + 1 - at[0] == len(at)) if len(at) else (0, 0, 1)
            np.testing.assert_array_equal(table[row], rows)


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_documents_on_the_host(program, name):
    ids = drawn(name)
    check(ids, on_host(program, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_documents_on_a_gpu(name):
    ids = list(map(jnp.asarray, drawn(name)))
    if not segments_cuda.serves(*ids):
        pytest.skip("needs a Hopper GPU and the CUDA library")
    found = segments.sides(ids[0], ids[-1])
    flat = [np.asarray(array) for side in found[: len(ids)] for array in side]
    check(list(map(np.asarray, ids)), flat)
