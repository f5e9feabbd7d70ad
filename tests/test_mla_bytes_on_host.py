"""The CUDA kernel over tokens of 656 bytes, its own source run on the host (stand_in/device.h). No GPU."""

import struct
import subprocess
from pathlib import Path

import inputs
import ml_dtypes
import numpy as np
import pytest
import test_mla_decode_fp8 as fp8
from host_build import build_stand_in
from references.mla_decode_torch import mla_decode as reference
from references.mla_schedule_model import plain_schedule

from pallas_attn.testing import compare
from pallas_attn.testing.cases import MLADecodeCase

pytestmark = pytest.mark.once
NOTHING_IS_CUT, INSIDE = 0, 1
LATENT, QUERY = 512, 576


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "mla_transposed")


def run(
    program: Path, case: MLADecodeCase, data: inputs.LatentInputs, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse), in the dtypes and shapes of `mla_decode`."""
    num_seqs, q_len, heads, _ = data.query.shape
    kv, group = case.num_kv_heads, case.group
    parts, splits, _ = plain_schedule([max(int(n), 0) for n in data.seq_lens], num_parts, 1)
    call = struct.pack(
        "9if",
        *(num_seqs, q_len, kv, group, data.latent_cache.shape[0], data.block_tables.shape[1], num_parts),
        *(case.causal, INSIDE if num_parts > 1 else NOTHING_IS_CUT),
        QUERY**-0.5,
    )
    arrays = (
        data.query.reshape(num_seqs, q_len, kv, group, QUERY).transpose(0, 2, 1, 3, 4),
        data.latent_cache,
        *(np.asarray(array, np.int32) for array in (data.block_tables, data.seq_lens, parts, splits)),
    )
    done = subprocess.run(
        [program], input=call + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    rows = num_seqs * q_len * heads
    out = np.frombuffer(done.stdout, ml_dtypes.bfloat16, rows * LATENT)
    out = out.reshape(num_seqs, kv, q_len, group, LATENT).transpose(0, 2, 1, 3, 4)
    lse = np.frombuffer(done.stdout, np.float32, rows, rows * LATENT * 2)
    return out.reshape(num_seqs, q_len, heads, LATENT), lse.reshape(num_seqs, q_len, heads)


@pytest.mark.parametrize(
    ("case", "num_parts"),
    [
        (MLADecodeCase((0, 1, 64, 65, 300), 16), 4),
        (MLADecodeCase((130, 66, 3, 0, 200), 8, q_len=3, causal=True), 1),
        (MLADecodeCase((130, 66), 66, 2, q_len=2, causal=True), 2),
        (MLADecodeCase((640,), 2), 10),
    ],
    ids=lambda value: getattr(value, "id", f"parts{value}"),
)
def test_matches_reference(program, case, num_parts):
    data = fp8.quantized(inputs.make(case), "exact")
    fp8.check_scales_that_round(case, data, "cuda", *run(program, case, data, num_parts))


def test_scales_and_scores_that_grow(program):
    """Base and unit move from page to page; rows of very different sizes beside each other."""
    case = MLADecodeCase((400, 90), 16)
    made = inputs.make(case)
    data = fp8.quantized(made)
    token = np.arange(400)
    for seq, length in enumerate(case.seq_lens):
        place = data.block_tables[seq, token[:length] // 64], token[:length] % 64
        scales = data.latent_cache[*place, 0, 512:528].copy().view("<f4")
        scales *= np.exp2(token[:length, None] // 30)
        data.latent_cache[*place, 0, 512:528] = scales.view(np.uint8)
    data.query[:] = data.query * np.exp2(-np.arange(16) % 7 - 10.0)[:, None].astype(data.query.dtype)
    fp8.check(case, data, *run(program, case, data, 2))


@pytest.mark.parametrize(
    ("length", "heads", "q_len"), [(100, 4, 1), (1, 4, 2), (65, 3, 2), (1, 17, 2)], ids=str
)
def test_bad_pages_and_lengths_poison_only_their_rows(program, length, heads, q_len):
    """Also the rows that see none of a page: query tokens that are not in the sequence, or before it."""
    case = MLADecodeCase((length,) * 6, heads, q_len=q_len, causal=q_len > 1)
    data = fp8.quantized(inputs.make(case))
    data.block_tables[1, (length - 1) // 64] = -1
    data.block_tables[2, 0] = data.latent_cache.shape[0]
    data.block_tables[5, 0] = 2**31 - 1
    data.seq_lens[3] = data.block_tables.shape[1] * 64 + 1
    out, lse = run(program, case, data, 3)
    good = [0, 4]
    expected, expected_lse = reference(fp8.read(fp8.inputs_of(data, good)), causal=case.causal)
    compare.assert_rows_close(out[good], expected, dtype="bfloat16", case_id="good rows")
    compare.assert_lse_close(lse[good], expected_lse, dtype="bfloat16", case_id="good rows")
    bad = [1, 2, 3, 5]
    assert np.isnan(np.float32(out[bad])).all()
    assert np.isnan(lse[bad]).all()
