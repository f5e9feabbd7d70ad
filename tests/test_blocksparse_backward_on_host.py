"""Block-sparse gradients by the CUDA kernel of attention's backward pass, its own source run on the host. No GPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_backward_on_host as on_host
from blocksparse_inputs import make
from references.blocksparse_torch import blocksparse_attention, gradients
from test_attention_backward_on_host import program as program

from pallas_attn._tile.masking import Rules
from pallas_attn.ops.blocksparse_attention import cuda
from pallas_attn.ops.blocksparse_attention.layout import transposed
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.testing.blocksparse import BlockSparseCase, layout_of

pytestmark = pytest.mark.once

# Sequences without queries, without keys, with more queries than keys; partial tiles at either end; padding.
MIXED = ((150, 150), (1, 200), (0, 0), (40, 290), (0, 30), (1, 0), (5, 3))
CASES = [
    BlockSparseCase(MIXED, 4, 2, 64, 0.5, 128, 128, padding=70),
    BlockSparseCase(((20, 300), (140, 140)), 2, 1, 128, 0.6, 128, 256, dtype="float16"),
    BlockSparseCase(((180, 390),), 2, 2, 40, 0.7, 256, 128, softcap=2.0),
    BlockSparseCase(((140, 140),), 1, 1, 136, "dense", 128, 128),
]


def inputs(case: BlockSparseCase):
    """The call's arrays and d_out; what rows have [1, heads, tokens]; and the gradients, in float64."""
    data, rng = make(case), np.random.default_rng(1)
    data.value[np.abs(data.value.astype(np.float32)) > 100] = 0.5
    d_out = rng.standard_normal(data.query.shape).astype(data.query.dtype)
    out, lse = blocksparse_attention(case, data)
    real = np.isfinite(lse)
    d_out[~real] = 0
    delta = np.where(real, np.sum(out * d_out.astype(np.float64), axis=-1), 0.0)
    scale = case.softcap or case.head_dim**-0.5
    # The maximum's part is any near it.
    maximum = np.where(real, np.round(np.where(real, lse, 0.0)) / scale, 0.0)
    maximum = np.clip(maximum, -1, 1) if case.softcap else maximum
    rest = np.where(real, lse - maximum * scale, 0.0) / np.log(2)
    rows = [x.T[None].astype(np.float32) for x in (maximum, rest, delta, np.zeros_like(delta))]
    right = gradients(case, data, d_out, np.zeros(lse.shape))
    return data, d_out, rows, [right[name] for name in ("query", "key", "value")]


def run(program, case: BlockSparseCase, data, d_out, rows, layout=None, ctas: int = 3) -> list[np.ndarray]:
    layout = layout_of(case) if layout is None else layout
    operands = Operands(
        query=jnp.asarray(data.query), key=jnp.asarray(data.key), value=jnp.asarray(data.value), layout=layout,
        cu_q_lens=jnp.asarray(data.cu_q_lens), cu_k_lens=jnp.asarray(data.cu_k_lens), cache_layout=None,
        kinds="prefill", scale=1.0, rules=Rules(),
    )  # fmt: skip
    where, of_keys = cuda.sequences(operands), transposed(layout)
    sizes = layout.layout_heads, layout.num_row_blocks, of_keys.num_row_blocks, layout.columns.shape[1]
    lists = [of_keys.row_pointers, of_keys.columns, layout.row_pointers, layout.columns]
    of_kernel = on_host.Case(
        *(len(data.query), len(data.key), case.num_heads, case.num_kv_heads, case.head_dim),
        dtype=case.dtype, right=0, ctas=ctas, softcap=case.softcap or 0.0,
        blocks=(case.q_block_size, case.block_size),
    )  # fmt: skip
    arrays = [x[None] for x in (data.query, data.key, data.value, d_out)]
    found = on_host.run(
        program, of_kernel, arrays, rows, layout=([where.q_table, where.k_table], sizes, lists)
    )
    return [x[0] for x in found]


def check(case: BlockSparseCase, found, right) -> None:
    for name, ours, true in zip(("query", "key", "value"), found, right, strict=True):
        error = np.linalg.norm(ours - true) / np.linalg.norm(true)
        assert error < {"bfloat16": 6e-3, "float16": 8e-4}[case.dtype], (name, error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients(program, case):
    data, d_out, rows, right = inputs(case)
    found = run(program, case, data, d_out, rows)
    check(case, found, right)
    if case is CASES[0]:
        for first, again in zip(found, run(program, case, data, d_out, rows, ctas=1), strict=True):
            np.testing.assert_array_equal(first, again)


def test_neighbours_and_blocks_that_nobody_sees_may_hold_anything(program):
    case = BlockSparseCase(((200, 200), (60, 130), (70, 70)), 2, 2, 64, 0.4, 128, 128)
    data, d_out, rows, right = inputs(case)
    own = slice(200, 260), slice(200, 330)  # the middle one's
    unseen = np.all(right[2] == 0, axis=-1)
    assert unseen[own[1]].any()
    for array, (side, others) in {
        "query": (own[0], 0),
        "key": (own[1], unseen),
        "value": (own[1], unseen),
    }.items():
        spoilt = getattr(data, array)
        outside = np.ones(spoilt.shape[:2], bool)
        outside[side] = others[side] if array != "query" else False
        spoilt[outside] = np.nan
    outside = np.ones(len(d_out), bool)
    outside[own[0]] = False
    d_out[outside] = np.nan
    rows = [np.where(outside, np.nan, row).astype(np.float32) for row in rows]
    found = run(program, case, data, d_out, rows)
    check(case, [x[side] for x, side in zip(found, (own[0], own[1], own[1]), strict=True)],
          [x[side] for x, side in zip(right, (own[0], own[1], own[1]), strict=True)])  # fmt: skip


def test_rows_that_cannot_be_right_are_nan(program):
    """Their log-sum-exps are. So are keys that they list, and all those of a head whose pointers do not ascend."""
    case = BlockSparseCase(((384, 384),), 2, 2, 64, "dense", 128, 128)
    data, d_out, rows, right = inputs(case)
    layout = layout_of(case)
    pointers, columns = (np.repeat(x, 2, axis=0) for x in (layout.row_pointers, layout.columns))
    columns[0, pointers[0, 1] : pointers[0, 2]] = 2**30, 1
    spoilt = [row.copy() for row in rows]
    for row in spoilt:
        row[0, 0, 128:256] = np.nan
    wrong = dataclasses.replace(layout, row_pointers=pointers, columns=columns)
    d_query, d_key, d_value = run(program, case, data, d_out, spoilt, wrong)
    np.testing.assert_array_equal(np.isnan(d_query[:, 0]).all(1), (np.arange(384) // 128) == 1)
    assert np.isfinite(d_query[:, 1]).all()
    for found in (d_key, d_value):
        np.testing.assert_array_equal(np.isnan(found[:, 0]).all(1), (np.arange(384) // 128) == 1)
        assert np.isfinite(found[:, 1]).all()
    pointers[0, 1], pointers[0, 2] = 5, 3
    for row in spoilt:
        row[0, 0] = np.nan
    wrong = dataclasses.replace(layout, row_pointers=pointers, columns=np.repeat(layout.columns, 2, axis=0))
    d_query, d_key, d_value = run(program, case, data, d_out, spoilt, wrong)
    for found, true in zip((d_query, d_key, d_value), right, strict=True):
        assert np.isnan(found[:, 0]).all()
        assert np.linalg.norm(found[:, 1] - true[:, 1]) < 6e-3 * np.linalg.norm(true[:, 1])


def test_positions_beyond_the_layout_and_bad_lengths(program):
    case = BlockSparseCase(((300, 300), (130, 130)), 2, 1, 64, "dense", 128, 128)
    data, d_out, rows, right = inputs(case)
    short = layout_of(dataclasses.replace(case, lens=((256, 256),)))
    spoilt = [np.where((np.arange(430) >= 256) & (np.arange(430) < 300), np.nan, row) for row in rows]
    d_query, d_key, _ = run(program, case, data, d_out, spoilt, short)
    assert np.isnan(d_query[256:300]).all()
    assert (d_key[256:300] == 0).all()
    np.testing.assert_array_less(
        np.linalg.norm(d_query[300:] - right[0][300:]), 6e-3 * np.linalg.norm(right[0][300:])
    )
    data.cu_k_lens = np.array([0, 300, 431], np.int32)
    spoilt = [np.where(np.arange(430) >= 300, np.nan, row) for row in rows]
    d_query, d_key, d_value = run(program, case, data, d_out, spoilt)
    assert np.isnan(d_query[300:]).all()
    assert (d_key[300:] == 0).all()
    check(case, [x[:300] for x in (d_query, d_key, d_value)], [x[:300] for x in right])
