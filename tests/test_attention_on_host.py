"""The CUDA kernel of attention's forward pass, its own source run on the host (stand_in/device.h). No GPU."""

import struct
import subprocess
from pathlib import Path

import inputs
import ml_dtypes
import numpy as np
import pytest
import test_prefix_prefill as prefix
import torch
from host_build import build_stand_in
from references.ragged_attention_torch import ragged_paged_attention as reference

from pallas_attn.testing import compare
from pallas_attn.testing.cases import RaggedCase

CACHES = (None, "float8_e4m3fn", "int8")
pytestmark = pytest.mark.once
# Chunks behind contexts, no query, decoding, whole prompts, a query before the start.
LENS, Q_LENS = (300, 40, 1, 140, 3, 65), (17, 0, 1, 140, 3, 33)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_forward")


def run(
    program: Path, case: RaggedCase, data: inputs.RaggedInputs, *new: np.ndarray, skip_rows: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse), in the dtypes and shapes of `ragged_paged_attention`."""
    num_seqs = int(data.num_seqs)
    sinks, alibi = (data.extras.get(name) for name in ("sinks", "alibi_slopes"))
    left = -1 if case.sliding_window is None else case.sliding_window - 1
    call = struct.pack(
        "19i2f",
        *(case.dtype == "float16", data.query.shape[0], case.num_heads, case.num_kv_heads, case.head_dim),
        *(data.value_cache.shape[-1], data.key_cache.shape[0], case.page_size, data.block_tables.shape[1]),
        *(num_seqs, case.layout == "HND", bool(new), skip_rows, 2),
        *(case.softcap is not None, sinks is not None, alibi is not None),
        *(CACHES.index(case.cache_dtype), case.scale_per_page),
        *(case.head_dim**-0.5, case.softcap or 0),
    )
    by_head = np.ones(case.num_kv_heads, np.float32)  # or also by page
    scales = [data.extras[name] * by_head for name in ("k_scale", "v_scale") if case.cache_dtype]
    arrays = [
        data.query, data.key_cache, data.value_cache,
        *scales, *new,
        *(np.asarray(array[:num_seqs], np.int32) for array in (data.block_tables, data.seq_lens)),
        np.asarray(data.cu_q_lens[: num_seqs + 1], np.int32), np.asarray([left, 0 if case.causal else -1], np.int32),
        *(np.asarray(array, np.float32) for array in (sinks, alibi) if array is not None),
    ]  # fmt: skip
    done = subprocess.run(
        [program], input=call + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    rows = data.query.shape[0] * case.num_heads
    dtype, width = getattr(ml_dtypes, case.dtype, None) or np.dtype(case.dtype), data.value_cache.shape[-1]
    out = np.frombuffer(done.stdout, dtype, rows * width).reshape(-1, case.num_heads, width)
    return out, np.frombuffer(done.stdout, np.float32, rows, rows * width * 2).reshape(-1, case.num_heads)


def check(case, data, out, lse):
    expected, expected_lse = reference(case, data)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


def made(*sizes, **options) -> RaggedCase:
    return RaggedCase(LENS, *sizes, q_lens=Q_LENS, **options)


@pytest.mark.parametrize(
    "case",
    [
        made(4, 2, 64, 16),
        made(4, 2, 64, 5, "float16", "HND", sliding_window=40, sinks=True),
        made(2, 1, 128, 24, "bfloat16", "HND", softcap=9.0, alibi=True),
        made(4, 2, 128, 8, "float16", sliding_window=40),
        made(2, 2, 256, 32, "bfloat16", "HND"),
        made(2, 2, 192, 16, value_dim=128),
        made(2, 1, 112, 16),
        made(2, 1, 120, 1, causal=False),
    ],
    ids=lambda case: case.id,
)
def test_pages(program, case):
    data = inputs.make_ragged(case)
    check(case, data, *run(program, case, data))


@pytest.mark.parametrize(
    "case",
    [
        made(4, 2, 64, 16),
        made(4, 2, 64, 8, "float16", "HND", sliding_window=40, sinks=True),
        made(2, 1, 64, 3, sliding_window=90),
        made(2, 1, 128, 256, "bfloat16", "HND", softcap=9.0, alibi=True),
        made(4, 2, 128, 24),
        made(2, 1, 192, 64, value_dim=128),
        made(2, 1, 96, 1, causal=False),
    ],
    ids=lambda case: case.id,
)
def test_new_tokens_beside_pages(program, case):
    data, key, value, whole = prefix.make_apart(case)
    out, lse = run(program, case, data, key, value)
    check(case, whole, out, lse)


@pytest.mark.parametrize(
    "case",
    [
        made(4, 2, 64, 16, cache_dtype="float8_e4m3fn", scale_per_head=True),
        made(2, 1, 128, 5, "float16", "HND", cache_dtype="int8", scale_per_head=True, sinks=True),
        made(2, 1, 96, 8, cache_dtype="int8", softcap=9.0, sliding_window=50),
        made(2, 2, 128, 16, "float16", cache_dtype="float8_e4m3fn", scale_per_page=True),
        made(2, 1, 192, 3, cache_dtype="int8", scale_per_page=True, value_dim=128, causal=False),
        made(2, 1, 192, 24, cache_dtype="float8_e4m3fn", scale_per_head=True),
        made(1, 1, 256, 8, "float16", "HND", cache_dtype="int8", scale_per_page=True),
    ],
    ids=lambda case: case.id,
)
def test_caches_of_bytes(program, case):
    data = inputs.make_ragged(case)
    check(case, data, *run(program, case, data))


@pytest.mark.parametrize(
    "case",
    [
        made(4, 2, 64, 16, cache_dtype="float8_e4m3fn", scale_per_head=True),
        made(2, 1, 128, 5, "float16", "HND", cache_dtype="int8", scale_per_page=True),
        made(2, 1, 192, 64, cache_dtype="int8", value_dim=128, sliding_window=90, scale_per_head=True),
    ],
    ids=lambda case: case.id,
)
def test_new_tokens_beside_caches_of_bytes(program, case):
    data, key, value, whole = prefix.make_apart(case)
    check(case, whole, *run(program, case, data, key, value))


@pytest.mark.parametrize(("dtype", "growth"), [("bfloat16", 50), ("bfloat16", 20000), ("float16", 50)])
def test_scores_that_outgrow_the_first_maximum(program, dtype, growth):
    """Keys are taken from the last one on. Against the last ones' maximum, earlier ones would overflow."""
    case = RaggedCase((300, 400), 2, 1, 64, 16, dtype, q_lens=(300, 20))
    data = inputs.make_ragged(case)
    for seq, length in enumerate((300, 400)):
        for i, page in enumerate(data.block_tables[seq, : -(-length // 16)]):
            grown = np.asarray(data.key_cache[page], np.float32) * (1 + growth * (1 - i * 16 / length))
            data.key_cache[page] = grown.astype(data.key_cache.dtype)
    check(case, data, *run(program, case, data))


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (16, 128), (5, 64)])
def test_a_bad_page_spoils_rows_that_see_it_and_no_others(program, page_size, head_dim, cache_dtype):
    options = {"scale_per_head": True, "cache_dtype": cache_dtype} if cache_dtype else {}
    case = RaggedCase((150, 150), 2, 1, head_dim, page_size, q_lens=(150, 150), **options)
    data = inputs.make_ragged(case)
    first = 100 // page_size * page_size
    data.block_tables[0, 100 // page_size] = -5
    out, lse = run(program, case, data)
    rows = np.asarray(out, np.float32)
    assert np.isfinite(rows[:first]).all()
    assert np.isfinite(rows[150:300]).all()
    assert np.isnan(rows[first:150]).all()
    assert np.isnan(lse[first:150]).all()


@pytest.mark.parametrize("page_size", [16, 3])
def test_lengths_that_cannot_be_right_beside_new_tokens(program, page_size):
    case = made(2, 1, 64, page_size)
    data, key, value, _ = prefix.make_apart(case)
    good, _ = run(program, case, data, key, value)
    data.seq_lens[0] = Q_LENS[0] - 1
    data.seq_lens[3] = 2**31 - 1
    data.block_tables[5, 0] = -1
    out, lse = run(program, case, data, key, value)
    for seq in range(case.num_seqs):
        mine = slice(data.cu_q_lens[seq], data.cu_q_lens[seq + 1])
        if seq in (0, 3, 5):
            assert np.isnan(np.float32(out[mine])).all()
            assert np.isnan(lse[mine]).all()
        else:
            np.testing.assert_array_equal(np.float32(out[mine]), np.float32(good[mine]))
