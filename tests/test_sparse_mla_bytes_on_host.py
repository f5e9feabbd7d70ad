"""The CUDA kernel over chosen tokens of 656 bytes, its own source run on the host (stand_in/device.h). No GPU."""

import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_build import build_stand_in
from references.latents_torch import dequantized
from references.mla_schedule_model import plain_schedule
from references.sparse_mla_torch import sparse_mla as reference

import pallas_attn
from pallas_attn.testing import compare

pytestmark = pytest.mark.once
LATENT, QUERY = 512, 576
ROWS = 240


class Call(NamedTuple):
    query: np.ndarray
    """[tokens, heads, 576] bf16."""
    pool: np.ndarray
    """[ROWS, 656] uint8."""
    ids: np.ndarray
    """[tokens, topk] int32."""
    lengths: np.ndarray
    """[tokens] int32."""
    sinks: np.ndarray | None = None
    tables: np.ndarray = np.zeros((1, 1), np.int32)
    page_size: int = 0
    skip_all_outside: bool = False


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "mla_chosen")


def make(tokens: int, heads: int, topk: int, seed: int = 0) -> Call:
    """A tenth of the ids -1, and none row 0; rows of any size."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((tokens, heads, QUERY), np.float32).astype(ml_dtypes.bfloat16)
    latents = rng.standard_normal((ROWS, QUERY), np.float32) * np.exp2(rng.integers(-3, 2, (ROWS, 1)))
    pool = np.array(
        pallas_attn.quantize_latents(jnp.asarray(latents.astype(ml_dtypes.bfloat16)), scales="exact")
    )
    ids = rng.integers(1, ROWS, (tokens, topk)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return Call(query, pool, ids, np.full(tokens, topk, np.int32))


def rows_of(call: Call, token: int) -> list[int | None]:
    """That a token's ids lead to; None among them poisons it."""
    topk = call.ids.shape[1]
    length = int(call.lengths[token])
    rows: list[int | None] = [] if 0 <= length <= topk else [None]
    table = call.tables[token * len(call.tables) // len(call.ids)]
    for i in call.ids[token, : min(max(length, 0), topk)].tolist():
        if i == -1:
            continue
        row = i
        if call.page_size:
            column, slot = divmod(i, call.page_size)
            page = int(table[column]) if 0 <= column < len(table) else -1
            row = page * call.page_size + slot if 0 <= page < ROWS // call.page_size else -1
        if 0 <= row < ROWS:
            rows.append(row)
        elif not call.skip_all_outside:
            rows.append(None)
    return rows


def run(program: Path, call: Call, num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a pool whose rows that no id leads to are NaN."""
    tokens, heads, _ = call.query.shape
    topk = call.ids.shape[1]
    named = {row for token in range(tokens) for row in rows_of(call, token)}
    pool = call.pool.copy()
    pool[[row for row in range(ROWS) if row not in named]] = 0xFF
    parts, splits, _ = plain_schedule([topk] * tokens, num_parts, 1)
    header = struct.pack(
        "11if",
        *(tokens, heads, topk, ROWS, call.page_size, *call.tables.shape, call.skip_all_outside),
        *(num_parts, int(splits[-1]) > tokens, call.sinks is not None),
        QUERY**-0.5,
    )
    sinks = np.zeros(0, np.float32) if call.sinks is None else call.sinks
    schedule = (np.asarray(array, np.int32) for array in (parts, splits))
    arrays = (call.query, pool, call.ids, call.lengths, call.tables, *schedule, sinks)
    done = subprocess.run(
        [program], input=header + b"".join(a.tobytes() for a in arrays), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    out = np.frombuffer(done.stdout, ml_dtypes.bfloat16, tokens * heads * LATENT)
    lse = np.frombuffer(done.stdout, np.float32, tokens * heads, out.nbytes)
    return out.reshape(tokens, heads, LATENT), lse.reshape(tokens, heads)


def check(program: Path, call: Call, num_parts: int) -> list[int]:
    """The tokens that are poisoned."""
    out, lse = run(program, call, num_parts)
    listed = [rows_of(call, token) for token in range(len(call.ids))]
    poisoned = [token for token, rows in enumerate(listed) if None in rows]
    good = [token for token in range(len(listed)) if token not in poisoned]
    floats = dequantized(call.pool).numpy()
    want, _, want_lse = reference(
        call.query[good], floats, [listed[token] for token in good], sinks=call.sinks
    )
    case_id = f"{call.query.shape[1]} heads, {num_parts} parts"
    compare.assert_rows_close(out[good], want, dtype="bfloat16", case_id=case_id)
    compare.assert_lse_close(lse[good], want_lse, dtype="bfloat16", case_id=case_id)
    assert np.isnan(np.float32(out[poisoned])).all()
    assert np.isnan(lse[poisoned]).all()
    return poisoned


@pytest.mark.parametrize(
    ("heads", "num_parts", "sinks"),
    [(16, 1, True), (5, 30, True), (20, 11, False), (70, 4, True)],
    ids=str,
)
def test_matches_reference(program, heads, num_parts, sinks):
    """Lists of any length, places without a token anywhere in them, ids that come twice; tokens whole and cut."""
    call = make(5, heads, 300)
    call.lengths[:] = 300, 0, 70, 299, 300
    call.ids[0, 64:128] = -1  # a tile of nothing
    call.ids[2, 70:] = 1 << 30  # whatever comes behind
    call.ids[3, ::2] = 7
    call.ids[3, :64] = -1  # and one before there is anything
    call.ids[4] = -1
    if sinks:
        made = np.linspace(-3, 6, heads, dtype=np.float32)
        made[0] = -np.inf
        call = call._replace(sinks=made)
    assert check(program, call, num_parts) == []
    assert rows_of(call, 1) == rows_of(call, 4) == []


def test_bad_ids_and_lengths_poison_only_their_rows(program):
    call = make(6, 4, 130, seed=1)
    call.ids[1, 129] = ROWS
    call.ids[2, 64] = -2
    call.lengths[3:5] = 131, -1
    assert check(program, call, 3) == [1, 2, 3, 4]
    call.lengths[2] = 64
    assert check(program, call, 2) == [1, 3, 4]
    assert check(program, call._replace(skip_all_outside=True), 9) == [3, 4]


def test_positions_lead_through_tables(program):
    """Two tables for four tokens, of pages that are no power of two; entries that are no page poison who uses them."""
    tables = np.random.default_rng(2).permutation(10).astype(np.int32).reshape(2, 5)
    tables[:, 4] = 10, -1
    call = make(4, 16, 100, seed=2)._replace(page_size=24, tables=tables)
    call.ids[:] = np.where(call.ids < 96, call.ids, call.ids % 96)
    assert check(program, call, 3) == []
    call.ids[1, 50] = 96
    call.ids[3, 99] = 5 * 24  # behind the table's end
    assert check(program, call, 3) == [1, 3]
