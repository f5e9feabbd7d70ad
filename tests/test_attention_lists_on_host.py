"""The CUDA forward kernel where lists name the keys, its own source run on the host (stand_in/device.h). No GPU."""

import math
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from blocksparse_inputs import make
from host_build import build_stand_in
from references.blocksparse_torch import blocksparse_attention as of_layout
from test_block_mask import dense

from pallas_attn import block_mask, mods
from pallas_attn.testing import compare
from pallas_attn.testing.blocksparse import PHI3_SMALL, BlockSparseCase, layout_of

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_lists")


def run(program, arrays, lists, dtype, scale, sinks=None, *, seqs=0, softcap=0.0, keep=False, skip_rows=0):
    """(out, lse, rest, low) of query [batch, tokens, heads, dim]. `lists`: the arrays of a mask or a layout, and
    (batch, heads, rows, pitch, max_bits, q_shift, k_shift)."""
    query, key, value = arrays
    listed, sizes = lists
    of_arrays = (
        dtype == "float16",
        *query.shape[:2],
        *key.shape[1:2],
        query.shape[2],
        *key.shape[2:],
        value.shape[3],
    )
    # As `hopper_lists.forward` has them; one KV head's heads side by side.
    tiles = query.shape[1] // 128 + 2 * (seqs + 2) if seqs else query.shape[0] * -(-query.shape[1] // 128)
    together = query.shape[2] // key.shape[2]
    of_call = sinks is not None, keep, skip_rows, 2, together, tiles * sizes[1]
    call = struct.pack("22i2f", *of_arrays, seqs, *sizes, *of_call, scale, softcap)
    sent = [*arrays, *([] if sinks is None else [np.asarray(sinks, np.float32)]), *map(np.asarray, listed)]
    text = call + b"".join(np.ascontiguousarray(array).tobytes() for array in sent)
    done = subprocess.run([program], input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    rows, width = math.prod(query.shape[:3]), value.shape[3]
    kinds = [(query.dtype, rows * width), (np.float32, rows)]
    if keep:
        kinds += [(np.float32, rows), (np.int8, rows * width)]
    results, at = [], 0
    for kind, count in kinds:
        results.append(np.frombuffer(done.stdout, kind, count, at).reshape(*query.shape[:3], -1))
        at += results[-1].nbytes
    return [result if result.shape[3] == width else result[..., 0] for result in results]


class Case(NamedTuple):
    mask: mods.MaskMod
    q_len: int
    kv_len: int
    dim: int = 64
    value_dim: int = 64
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1
    blocks: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    softcap: float = 0.0
    sinks: bool = False
    keep: bool = False


DOCUMENTS = jnp.asarray(np.repeat([0, 1, 3, 2], [70, 150, 33, 100]), jnp.int32)  # and ids of no order
PREFIXES = jnp.array([40, 200], jnp.int32)
CASES = {
    "causal": Case(mods.causal(), 300, 300, heads=4, kv_heads=2),
    "window": Case(mods.sliding_window(150, 20), 260, 390, 128, 128, blocks=(128, 64)),
    "documents": Case(mods.documents(DOCUMENTS), 353, 353, 256, 256, dtype="float16", keep=True),
    "by sequence": Case(mods.prefix_lm(PREFIXES), 200, 333, 96, 120, batch=2, sinks=True, softcap=7.0),
    "by head": Case(
        lambda b, h, q, k: (k <= q) & (q - k < 90 * (h + 1)) & (q % 5 > 0), 290, 290, 128, 64, blocks=(256, 128),
        keep=True, sinks=True,
    ),
    "everything": Case(mods.and_masks(), 130, 257, 32, 40, blocks=(128, 512), softcap=3.0),
    "dilated": Case(mods.dilated(3, 200), 256, 256, 200, 136, heads=1),
}  # fmt: skip


def lists_of(case: Case, max_partial: int = 64, arrays=None):
    made = arrays or block_mask(
        case.mask, q_len=case.q_len, kv_len=case.kv_len, batch=case.batch, num_heads=case.heads,
        block_q=case.blocks[0], block_kv=case.blocks[1], max_partial=max_partial,
    )  # fmt: skip
    order, _, ends = made.of_queries
    sizes = (*order.shape, made.bits.words.shape[0], *(block.bit_length() - 1 for block in case.blocks))
    return [order, ends, made.bits.first, made.bits.words], sizes


def drawn(case: Case):
    rng = np.random.default_rng(0)
    dtype = getattr(ml_dtypes, case.dtype, None) or np.dtype(case.dtype)
    shapes = (
        (case.q_len, case.heads, case.dim),
        (case.kv_len, case.kv_heads, case.dim),
        (case.kv_len, case.kv_heads, case.value_dim),
    )
    return [rng.standard_normal((case.batch, *shape), np.float32).astype(dtype) for shape in shapes]


def expected(case: Case, arrays, sinks, rounding=None):
    """(out, lse) in float64."""
    query, key, value = (torch.as_tensor(array.astype(np.float64)) for array in arrays)
    group = case.heads // case.kv_heads
    key, value = (x.nan_to_num(0).repeat_interleave(group, 2) for x in (key, value))
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(case.dim)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    mask = torch.tensor(dense(case.mask, case.batch, case.heads, case.q_len, case.kv_len))
    logits = logits.masked_fill(~mask, -math.inf)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e300)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(torch.as_tensor(sinks, dtype=torch.float64)[None, :, None, None] - top)
    if rounding is not None:
        weights = weights.to(rounding).double()
    out = torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total > 0, total, 1), value)
    lse = (top + torch.log(total))[..., 0].transpose(1, 2)
    if sinks is not None:
        unseen = torch.as_tensor(sinks, dtype=torch.float64).expand(lse.shape)
        lse = torch.where(mask.any(-1).transpose(1, 2), lse, unseen)
    return (out if rounding is None else out.to(rounding).double()).numpy(), lse.numpy()


def check(case: Case, arrays, results, sinks=None):
    out, lse, *kept = results
    want, want_lse = expected(case, arrays, sinks)
    rounded, _ = expected(case, arrays, sinks, getattr(torch, case.dtype))
    compare.assert_rows_close(out, want, dtype=case.dtype, case_id="", rounded_reference=rounded)
    if kept:
        rest, low = kept
        by = case.softcap or case.dim**-0.5
        lse = np.where(lse == -np.inf, rest, lse * by * math.log2(math.e) + rest)
        seen = dense(case.mask, case.batch, case.heads, case.q_len, case.kv_len).any(-1).transpose(0, 2, 1)
        assert np.abs(low[seen]).max() > 60
    compare.assert_lse_close(lse * math.log(2), want_lse, dtype=case.dtype, case_id="")


@pytest.mark.parametrize("name", CASES)
def test_masks(program, name):
    case = CASES[name]
    arrays = drawn(case)
    # Blocks that nobody sees may hold anything.
    seen = dense(case.mask, case.batch, case.heads, case.q_len, case.kv_len).any((1, 2))
    for batch, first in np.ndindex(case.batch, -(-case.kv_len // case.blocks[1])):
        block = slice(first * case.blocks[1], (first + 1) * case.blocks[1])
        if not seen[batch, block].any():
            for array in arrays[1:]:
                array[batch, block] = np.nan
    sinks = np.linspace(-1, 1, case.heads) if case.sinks else None
    scale, options = case.dim**-0.5, dict(softcap=case.softcap, keep=case.keep)
    results = run(program, arrays, lists_of(case), case.dtype, scale, sinks, **options)
    check(case, arrays, results, sinks)


LAYOUTS = [
    BlockSparseCase(((330, 330), (40, 290)), 2, 1, 128, 0.5, 128, 128),
    BlockSparseCase(((129, 257), (1, 500), (0, 0), (5, 3), (1, 0)), 4, 2, 64, 0.5, 128, 128, padding=140, softcap=5.0),
    BlockSparseCase(((400, 400), (260, 300)), 2, 2, 64, 0.5, 64, 128, dtype="float16"),
    BlockSparseCase(((300, 500),), 2, 1, 256, 0.6, 64, 256),
    BlockSparseCase(((300, 600),), 2, 1, 80, "window", 256, 128),
    BlockSparseCase(((200, 700),), 1, 1, 128, "dense", 128, 512),
    BlockSparseCase(((400, 450),), 2, 1, 64, 0.6, 512, 256),
    # Two rows are a tile's.
    BlockSparseCase(((300, 500), (100, 260), (1, 1)), 2, 1, 64, 0.5, 64, 64),
    BlockSparseCase(((449, 449),), 2, 2, 128, PHI3_SMALL, 64, 64, dtype="float16", softcap=5.0),
]  # fmt: skip


def sent(case: BlockSparseCase):
    data, layout = make(case), layout_of(case)
    arrays = [np.asarray(x)[None] for x in (data.query, data.key, data.value)]
    pointers, columns = np.asarray(layout.row_pointers), np.asarray(layout.columns)
    shifts = (size.bit_length() - 1 for size in (layout.q_block_size, layout.block_size))
    sizes = (1, pointers.shape[0], pointers.shape[1] - 1, columns.shape[1], 0, *shifts)
    listed = [np.asarray(x, np.int32) for x in (data.cu_q_lens, data.cu_k_lens, pointers, columns)]
    return data, arrays, listed, sizes


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.id)
def test_layouts(program, case):
    data, arrays, listed, sizes = sent(case)
    out, lse = run(
        program, arrays, (listed, sizes), case.dtype, case.head_dim**-0.5, seqs=case.num_seqs,
        softcap=case.softcap or 0.0,
    )  # fmt: skip
    want, want_lse = of_layout(case, data)
    rounded, _ = of_layout(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out[0], want, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse[0] * math.log(2), want_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize("q_block", [128, 64])
def test_rows_of_a_layout_that_cannot_be_right_are_nan_and_no_others(program, q_block):
    case = BlockSparseCase(((4 * q_block, 4 * q_block),), 2, 1, 64, 1.0, 64, q_block)
    _, arrays, listed, sizes = sent(case)
    good, _ = run(program, arrays, (listed, sizes), case.dtype, 0.125, seqs=1)
    pointers, columns = (x.copy() for x in listed[2:])
    columns[0, pointers[0, 2] - 1] = 4  # ahead of row 1
    columns[1, pointers[1, 2]] = 2**30
    pointers[1, 3] = -4  # where row 2 ends, too
    out, lse = run(program, arrays, ([*listed[:2], pointers, columns], sizes), case.dtype, 0.125, seqs=1)
    bad = np.zeros((4, 2), bool)
    bad[1, 0] = bad[2:, 1] = True
    bad = np.repeat(bad, q_block, axis=0)
    assert np.isnan(np.float32(out[0, bad])).all()
    assert np.isnan(lse[0, bad]).all()
    np.testing.assert_array_equal(np.float32(out[0, ~bad]), np.float32(good[0, ~bad]))


def test_united_rows_do_not_write_over_each_other_where_pointers_descend(program):
    case = BlockSparseCase(((256, 256),), 1, 1, 64, "dense", 64, 64)
    _, arrays, listed, sizes = sent(case)
    good, _ = run(program, arrays, (listed, sizes), case.dtype, 0.125, seqs=1)
    pointers, columns = (x.copy() for x in listed[2:])
    pointers[0] = 0, 1, 0, 3, 6  # rows 2 and 3 list block 0, where row 0 does
    columns[0, :6] = 0, 1, 2, 0, 1, 3
    out, lse = run(program, arrays, ([*listed[:2], pointers, columns], sizes), case.dtype, 0.125, seqs=1)
    np.testing.assert_array_equal(np.float32(out[0, :64]), np.float32(good[0, :64]))
    assert np.isnan(np.float32(out[0, 64:192])).all()
    assert np.isfinite(lse[0, 192:]).all()


@pytest.mark.parametrize("block", [128, 64])
def test_neighbours_may_be_nan(program, block):
    """Keys behind a sequence's last, in its last block, are another's: what is masked is zero, but zero times NaN is
    not."""
    case = BlockSparseCase(((70, 150), (50, 50)), 1, 1, 64, "dense", block, block)
    _, arrays, listed, sizes = sent(case)
    good, _ = run(program, arrays, (listed, sizes), case.dtype, 0.125, seqs=2)
    query, key, value = (x.copy() for x in arrays)
    query[0, 70:], key[0, 150:], value[0, 150:] = np.nan, np.nan, np.nan
    out, _ = run(program, (query, key, value), (listed, sizes), case.dtype, 0.125, seqs=2)
    np.testing.assert_array_equal(np.float32(out[0, :70]), np.float32(good[0, :70]))
    assert np.isnan(np.float32(out[0, 70:])).all()


def test_rows_whose_bits_are_beyond_what_is_kept_are_nan(program):
    case = Case(mods.causal(), 384, 384)
    arrays = drawn(case)
    good = run(program, arrays, lists_of(case), case.dtype, 0.125)
    listed, sizes = lists_of(case)
    short = [*listed[:3], listed[3][:2]], (*sizes[:4], 2, *sizes[5:])
    out, lse = run(program, arrays, short, case.dtype, 0.125)
    assert np.isnan(np.float32(out[:, 256:])).all()
    assert np.isnan(lse[:, 256:]).all()
    np.testing.assert_array_equal(out[:, :256], good[0][:, :256])


def test_blocks_that_do_not_exist_are_read_as_zeros(program):
    """Of lists that nobody has checked: nothing outside the arrays is read."""
    case = Case(mods.and_masks(), 128, 256)
    (order, *others), sizes = lists_of(case)
    order = np.asarray(order).copy()
    order[..., 1] = 2**30
    out, _ = run(program, drawn(case), ([order, *others], sizes), case.dtype, 0.125)
    assert np.isfinite(np.float32(out)).all()


def test_sequences_of_one_query_are_left_alone(program):
    case = BlockSparseCase(((1, 300), (130, 130)), 2, 1, 64, 1.0, 128, 128)
    _, arrays, listed, sizes = sent(case)
    out, lse = run(program, arrays, (listed, sizes), case.dtype, 0.125, seqs=2, skip_rows=1)
    assert np.isnan(lse[0, 0]).all()  # as it was
    assert np.isfinite(np.float32(out[0, 1:])).all()
