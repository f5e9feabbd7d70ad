"""Sparse MLA against float64 torch: decoding through slots and positions, prefill, bf16 and fp8 latents."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import torch
import triton_kernels
from references.latents_torch import dequantized
from references.sparse_mla_torch import sparse_mla as reference
from support import ON_GPU, unchecked

import pallas_attn
from pallas_attn import SparseMLAConfig
from pallas_attn.testing import compare

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU, CUDA]
NOTHING = 2147480000  # in entries that must not be looked at


@dataclasses.dataclass
class Decode:
    """One call: some ids of -1, some twice, lists of different length, unread slots full of NaN."""

    heads: int = 4
    q_len: int = 1
    topk: int = 48
    page_size: int = 16
    fp8: bool = False
    positions: bool = False
    lengths: tuple[int, ...] | None = None
    sinks: bool = False
    seqs: int = 3
    config: tuple[int, int, int] = (16, 16, 1)
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        pages_each = 5
        num_pages = self.seqs * pages_each + 2
        self.tables = (
            rng.permutation(num_pages)[: self.seqs * pages_each].reshape(self.seqs, -1).astype(np.int32)
        )
        rows = rng.standard_normal((num_pages * self.page_size, 576)).astype(jnp.dtype(self.dtype))
        self.query = rng.standard_normal((self.seqs, self.q_len, self.heads, 576)).astype(
            jnp.dtype(self.dtype)
        )
        shape = (self.seqs, self.q_len, self.topk)
        position = rng.integers(0, pages_each * self.page_size, shape)  # with repetitions
        position[rng.random(shape) < 0.2] = -1
        self.sink_values = rng.standard_normal(self.heads).astype(np.float32) * 3 if self.sinks else None
        used = np.full(self.seqs, self.topk) if self.lengths is None else np.array(self.lengths)
        position = np.where(np.arange(self.topk) < used[:, None, None], position, NOTHING)
        page = np.take_along_axis(
            self.tables[:, None, :], np.clip(position // self.page_size, 0, pages_each - 1), 2
        )
        slot = np.where(position == -1, -1, page * self.page_size + position % self.page_size)
        slot[position == NOTHING] = NOTHING
        self.ids = (position if self.positions else slot).astype(np.int32)
        self.rows = [
            [int(s) for s in slot[b, i] if s not in (-1, NOTHING)]
            for b in range(self.seqs)
            for i in range(self.q_len)
        ]
        unread = np.setdiff1d(np.arange(len(rows)), [i for row in self.rows for i in row])
        self.pool = rows
        if self.fp8:
            self.pool = np.array(pallas_attn.quantize_latents(jnp.asarray(rows)))
            self.floats = dequantized(self.pool).bfloat16().double().numpy()
            self.pool[unread] = 0x7F
        else:
            self.floats = rows.astype(np.float64)
            self.pool[unread] = np.nan

    def run(self, implementation: str, **changes: Any):
        block_q, block_kv, num_splits = self.config
        config = SparseMLAConfig(block_q, block_kv, num_splits, num_warps=4)
        options: dict[str, Any] = dict(
            block_tables=jnp.asarray(self.tables) if self.positions else None,
            topk_length=None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32),
            sinks=None if self.sink_values is None else jnp.asarray(self.sink_values),
        )
        call = functools.partial(
            pallas_attn.sparse_mla_decode,
            addressing="positions" if self.positions else "slots",
            return_lse=True,
            implementation=implementation,
            config=None if implementation in ("xla", "cuda") else config,
        )
        pool = self.pool.reshape(-1, self.page_size, 1, self.pool.shape[-1])
        arrays = [jnp.asarray(x) for x in (self.query, pool, self.ids)]
        return jax.jit(call)(*arrays, **(options | changes))

    def expected(self, rows=None, rounding=None, **changes):
        flat = self.query.reshape(-1, self.heads, 576)
        out, _, lse = reference(
            flat,
            self.floats,
            self.rows if rows is None else rows,
            sinks=self.sink_values,
            rounding=rounding,
            **changes,
        )
        lead = (self.seqs, self.q_len, self.heads)
        return out.reshape(*lead, 512), lse.reshape(lead)

    def check(self, out, lse, **changes) -> None:
        expected, expected_lse = self.expected(**changes)
        rounded, _ = self.expected(rounding=getattr(torch, self.dtype), **changes)
        about: Any = dict(dtype=self.dtype, case_id=str(self))
        compare.assert_rows_close(out, expected, rounded_reference=rounded, **about)
        compare.assert_lse_close(lse, expected_lse, **about)


CASES = [
    dict(q_len=2),
    dict(heads=9, fp8=True, topk=40, config=(16, 16, 3), seed=1),
    dict(positions=True, q_len=2, page_size=8, lengths=(48, 17, 0), config=(16, 16, 2), sinks=True, seed=2),
    dict(heads=20, positions=True, fp8=True, page_size=24, lengths=(1, 48, 33), config=(16, 32, 1), seed=3),
    dict(heads=70, topk=70, fp8=True, lengths=(70, 64, 3), config=(64, 32, 2), sinks=True, seed=4),
    dict(heads=64, topk=33, page_size=1, dtype="float16", config=(64, 32, 1), seed=5),
    dict(heads=1, topk=1, seqs=2, seed=6),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options", [*CASES[:3], *(pytest.param(case, marks=pytest.mark.once) for case in CASES[3:])], ids=str
)
def test_decode_matches_reference(options, implementation):
    case = Decode(**options)
    out, lse = case.run(implementation)
    assert (out.dtype, lse.dtype) == (jnp.dtype(case.dtype), jnp.float32)
    case.check(out, lse)


@pytest.mark.once
def test_decode_in_float32():
    case = Decode(dtype="float32", q_len=2, sinks=True, positions=True, lengths=(48, 0, 5))
    case.check(*case.run("xla"))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("positions", [False, True])
def test_bad_ids_and_lengths_poison_only_their_rows(positions, implementation):
    case = Decode(seqs=6, q_len=2, positions=positions, lengths=(48,) * 6, config=(16, 16, 2))
    num_slots, beyond = len(case.floats), case.tables.shape[1] * case.page_size
    case.ids[1, 0, 47] = beyond if positions else num_slots
    case.ids[2, 1, 0] = -2
    case.ids[3, 0, 20] = NOTHING
    case.ids[4, 0] = case.ids[4, 1] = -1  # none at all
    rows: list = list(case.rows)
    rows[2] = rows[5] = rows[6] = None
    rows[8] = rows[9] = []
    if positions:
        case.tables[0, 2] = num_slots // case.page_size
        page = case.ids[0] // case.page_size == 2
        assert page.any(axis=1).all()
        rows[0] = rows[1] = None
    out, lse = case.run(implementation)
    case.check(out, lse, rows=rows)
    assert np.isneginf(lse[4]).all()
    assert (np.float32(out[4]) == 0).all()
    lengths = jnp.asarray([48, 49, -1, 47, 2**31 - 1, 0], jnp.int32)
    out, lse = case.run(implementation, topk_length=lengths)
    assert [bool(np.isnan(x).all()) for x in np.asarray(out, np.float32)] == [
        positions,
        True,
        True,
        False,
        True,
        False,
    ]
    assert np.isnan(lse[1]).all()
    assert np.isneginf(lse[5]).all()


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_boundary_id_is_lost(implementation):
    """One id after another, at tiles' and splits' ends, names the row that outweighs all others."""
    case = Decode(seqs=8, topk=96, config=(16, 16, 3), fp8=True)
    assert -(-96 // 3) == 32
    needle = 3
    query = case.query.astype(np.float64)
    direction = query.mean(axis=(0, 1, 2))
    case.query = (
        case.query * np.asarray(0.1, case.query.dtype) + (direction * 200).astype(case.query.dtype)
    ).astype(case.query.dtype)
    latents = case.floats.copy()
    latents[needle] = direction / np.linalg.norm(direction) * 20
    case.pool = np.array(pallas_attn.quantize_latents(jnp.asarray(latents, jnp.bfloat16)))
    case.floats = dequantized(case.pool).bfloat16().double().numpy()
    places = [0, 15, 16, 31, 32, 63, 64, 95]
    others = np.setdiff1d(np.arange(len(latents)), [needle])
    case.ids = np.random.default_rng(0).choice(others, case.ids.shape).astype(np.int32)
    for seq, place in enumerate(places):
        case.ids[seq, 0, place] = needle
    case.rows = case.ids.reshape(8, -1).tolist()
    out, lse = case.run(implementation)
    case.check(out, lse)
    without, _ = case.expected(rows=[[i for i in row if i != needle] for row in case.rows])
    assert compare.row_errors(without, case.expected()[0]).min() > 0.5, "the row outweighs nothing"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8", [pytest.param(False, marks=pytest.mark.once), True])
def test_prefill(fp8, implementation):
    rng = np.random.default_rng(3)
    tokens, kv, heads, topk = 7, 90, 5, 40
    query = rng.standard_normal((tokens, heads, 576)).astype(jnp.bfloat16)
    latents = rng.standard_normal((kv, 1, 576)).astype(jnp.bfloat16)
    stored, floats = latents, latents.astype(np.float64)
    if fp8:
        stored = np.array(pallas_attn.quantize_latents(jnp.asarray(latents), scales="exact"))
        floats = dequantized(stored).bfloat16().double().numpy()
    ids = rng.integers(0, kv, (tokens, 1, topk)).astype(np.int32)
    ids[:, 0, ::7] = [-1]
    ids[:, 0, 3::9] = [kv]
    ids[1, 0, 5], ids[2, 0, 6] = NOTHING, -(2**31)
    ids[3] = -1
    lengths = np.array([40, 40, 39, 40, 0, 17, 1], np.int32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    rows = [[i for i in ids[t, 0, : lengths[t]].tolist() if 0 <= i < kv] for t in range(tokens)]
    call = jax.jit(functools.partial(pallas_attn.sparse_mla_prefill, implementation=implementation))
    out, top, lse = call(
        *(jnp.asarray(x) for x in (query, stored, ids)),
        topk_length=jnp.asarray(lengths),
        sinks=jnp.asarray(sinks),
    )
    expected, expected_top, expected_lse = reference(query, floats[:, 0], rows, sinks=sinks)
    rounded, *_ = reference(query, floats[:, 0], rows, sinks=sinks, rounding=torch.bfloat16)
    about: Any = dict(dtype="bfloat16", case_id="prefill")
    compare.assert_rows_close(out, expected, rounded_reference=rounded, **about)
    compare.assert_lse_close(lse, expected_lse, **about)
    compare.assert_lse_close(top, expected_top, **about)
    # Without lengths and sinks, all ids count.
    plain = call(*(jnp.asarray(x) for x in (query, stored, ids)))
    rows = [[i for i in row[0].tolist() if 0 <= i < kv] for row in ids]
    compare.assert_rows_close(plain[0], reference(query, floats[:, 0], rows)[0], **about)
    bad = call(*(jnp.asarray(x) for x in (query, stored, ids)), topk_length=jnp.asarray(lengths) + 1)
    assert [bool(np.isnan(x).all()) for x in np.asarray(bad[0], np.float32)] == [
        True,
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert np.isnan(bad[1][0]).all()


@pytest.mark.parametrize("implementation", ["xla", *ON_GPU])
def test_flash_mla_names(implementation):
    """Their arguments, their +inf for rows that see nothing, their order of the lse's dimensions."""
    case = Decode(q_len=2, fp8=True, sinks=True, lengths=(48, 0, 5))
    pool = jnp.asarray(case.pool.reshape(-1, case.page_size, 1, 656))
    query, ids = jnp.asarray(case.query), jnp.asarray(case.ids)
    assert case.sink_values is not None
    options: dict[str, Any] = dict(attn_sink=jnp.asarray(case.sink_values), implementation=implementation)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    call = functools.partial(
        pallas_attn.flash_mla_with_kvcache, query, pool, None, None, 512, None, None, None, False
    )
    out, lse = call(True, ids, topk_length=lengths, **options)
    expected, expected_lse = case.expected()
    compare.assert_rows_close(out, expected, dtype="bfloat16", case_id="with_kvcache")
    expected_lse = np.where(np.isneginf(expected_lse), np.inf, expected_lse).swapaxes(1, 2)
    compare.assert_lse_close(lse, expected_lse, dtype="bfloat16", case_id="with_kvcache")

    latents, flat = (
        pallas_attn.dequantize_latents(pool.reshape(-1, 1, 656)),
        query.reshape(-1, case.heads, 576),
    )
    ids = jnp.where(ids == NOTHING, -1, ids).reshape(-1, 1, case.topk)
    found = pallas_attn.flash_mla_sparse_fwd(flat, latents, ids, 576**-0.5, **options)
    rows = reference(flat, case.floats, case.rows, sinks=case.sink_values)
    compare.assert_rows_close(found[0], rows[0], dtype="bfloat16", case_id="sparse_fwd")
    for ours, theirs in zip(
        found[1:], (rows[1], np.where(np.isneginf(rows[2]), np.inf, rows[2])), strict=True
    ):
        assert (np.isposinf(ours) == np.isposinf(theirs)).all()
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("seed", range(2))
def test_random_cases(seed):
    rng = np.random.default_rng(100 + seed)
    topk = int(rng.integers(1, 70))
    case = Decode(
        heads=int(rng.integers(1, 18)),
        q_len=int(rng.integers(1, 3)),
        topk=topk,
        page_size=int(rng.choice([1, 8, 24, 64])),
        fp8=bool(rng.integers(2)),
        positions=bool(rng.integers(2)),
        lengths=tuple(int(n) for n in rng.integers(0, topk + 1, 3)),
        sinks=bool(rng.integers(2)),
        config=(int(rng.choice([16, 32])), int(rng.choice([16, 32])), int(rng.integers(1, 4))),
        seed=seed,
    )
    for implementation in ("xla", "interpret"):
        case.check(*case.run(implementation))


@pytest.mark.once
@pytest.mark.control
def test_faults_are_caught():
    case = Decode(q_len=2, sinks=True, lengths=(48, 30, 9))
    expected, _ = case.expected()
    compare.assert_rows_close(expected, expected, dtype="bfloat16", case_id="right")
    sinks, case.sink_values = case.sink_values, None
    faults = {"sinks ignored": case.expected()[0]}
    case.sink_values = sinks
    wrong_rows = {
        "repeats counted once": [sorted(set(row)) for row in case.rows],
        "first id lost": [row[1:] for row in case.rows],
        "last id lost": [row[:-1] for row in case.rows],
        "-1 read as row 0": [[0, *row] for row in case.rows],
        "the other token's ids": [*case.rows[1:], case.rows[0]],
        "length ignored": [row + [5] * 9 for row in case.rows],
    }
    faults |= {fault: case.expected(rows=rows)[0] for fault, rows in wrong_rows.items()}
    faults["scale ignored"] = case.expected(scale=1.0)[0]
    faults["zeros"] = np.zeros_like(expected)
    for fault, out in faults.items():
        with pytest.raises(AssertionError):
            compare.assert_rows_close(out, expected, dtype="bfloat16", case_id=fault)


def lowered(
    *, heads=128, topk=2048, fp8=True, positions=False, sm=90, prefill=False, num_pages=9000, config=None,
    implementation="pallas",
):  # fmt: skip
    shape = jax.ShapeDtypeStruct
    width, dtype = (656, jnp.uint8) if fp8 else (576, jnp.bfloat16)
    options: dict[str, Any] = dict(implementation=implementation, config=config)
    if prefill:
        call = functools.partial(pallas_attn.sparse_mla_prefill, **options)
        lead, pool, ids = (512,), shape((4096, 1, width), dtype), shape((512, 1, topk), jnp.int32)
    else:
        call = functools.partial(
            pallas_attn.sparse_mla_decode,
            addressing="positions" if positions else "slots",
            block_tables=jnp.zeros((4, 64), jnp.int32) if positions else None,
            **options,
        )
        lead, pool, ids = (4, 2), shape((num_pages, 64, 1, width), dtype), shape((4, 2, topk), jnp.int32)
    return lowering.lower_for_gpu(
        call, shape((*lead, heads, 576), jnp.bfloat16), pool, ids, device=lowering.DEVICES[sm]
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(heads=16, positions=True),
        dict(heads=16, fp8=False),
        dict(fp8=False, prefill=True),
        dict(heads=16, sm=80),
        dict(heads=128, fp8=False, sm=80),
    ],
    ids=str,
)
def test_compiles(options):
    sm = options.get("sm", 90)
    attend, *merging = lowering.compile_kernels(lowered(**options), sm)
    assert attend.name == "pallas_attn_sparse_mla"
    assert [k.name for k in merging] == ([] if options.get("prefill") else ["pallas_attn_sparse_mla_combine"])
    assert attend.shared_bytes <= lowering.SMEM_LIMIT[sm]
    assert attend.stack_bytes <= 512, f"{attend.stack_bytes} bytes on the stack"
    assert "cp.async" in attend.ptx, "loads are not pipelined"


def test_pools_beyond_int32():
    kernel = lowering.triton_kernels(lowered(num_pages=61 * 16384))[0][1]
    assert "i64" in lowering.triton_text(kernel)
    between = 2**31 // (64 * 656) + 1
    with pytest.raises(ValueError, match=r"cannot serve this call: 8-bit pools of 2\*\*31 to 2\*\*32"):
        lowered(num_pages=between)
    with triton_kernels.written() as kernels:
        lowered(num_pages=between, implementation="triton")
    pointers = [line for line in kernels[0].text.splitlines() if "tt.addptr" in line and "ptr<i8>" in line]
    assert pointers
    assert all("i64" in line for line in pointers)


@pytest.mark.once
def test_a_sink_has_a_gradient_beside_a_token_without_ids():
    query, pool = jnp.ones((2, 1, 2, 576)), jnp.ones((1, 16, 1, 576))
    ids = jnp.array([[[-1, -1]], [[3, -1]]], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(sinks):
        return jnp.sum(pallas_attn.sparse_mla_decode(query, pool, ids, sinks=sinks, implementation="xla"))

    # 512 elements of sigmoid(24 - sink), for the token that has an id.
    share = 1 / (1 + np.exp(np.array([23.0, 24.0]) - 24))
    np.testing.assert_allclose(gradient(jnp.array([23.0, 24.0])), 512 * share * (share - 1), rtol=1e-4)


@pytest.mark.once
def test_numpy_arrays_will_do():
    case = Decode()
    pool = case.pool.reshape(-1, 16, 1, 576)
    out = unchecked(pallas_attn.sparse_mla_decode)(case.query, pool, case.ids, implementation="xla")
    np.testing.assert_array_equal(out, case.run("xla")[0])
