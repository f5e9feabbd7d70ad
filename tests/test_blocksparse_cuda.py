"""Block-sparse prefill's CUDA kernel: against float64 on the host, and what it makes of what cannot be right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from blocksparse_inputs import make
from lowering import H100, abstract_mesh, lower_for_gpu
from references.blocksparse_torch import blocksparse_attention as reference
from support import as_if_cuda

import pallas_attn
from pallas_attn._call import dispatch
from pallas_attn._tile import triton
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig, BlockSparseCudaConfig, builders, cuda
from pallas_attn.testing import compare
from pallas_attn.testing.blocksparse import PHI3_SMALL, BlockSparseCase, layout_of

gpu = pytest.mark.gpu
# Tiles that are partial at either end, sequences without queries, without keys and with fewer keys than queries, single
# queries between.
MIXED = ((300, 300), (1, 500), (0, 0), (129, 257), (40, 290), (1, 1), (1, 0), (5, 3), (128, 128))
CASES = [
    BlockSparseCase(((530, 530), (40, 290)), 2, 1, 128, 0.5, 128, 128),
    BlockSparseCase(MIXED, 4, 2, 128, 0.5, 128, 128, padding=200),
    BlockSparseCase(MIXED, 4, 4, 128, "dense", 128, 128, dtype="float16", padding=3),
    BlockSparseCase(((1300, 1300),), 4, 1, 128, "window", 256, 128),
    BlockSparseCase(((700, 1300), (260, 260)), 4, 2, 128, 0.4, 128, 512),
    BlockSparseCase(((1100, 1100),), 2, 2, 128, 0.6, 512, 256, dtype="float16"),
    BlockSparseCase(((64, 64), (1, 1), (127, 127), (2, 130)) * 20, 2, 1, 128, 0.7, 128, 128),
    BlockSparseCase(((128 * 36, 128 * 36),), 1, 1, 128, 0.95, 128, 128),
]  # fmt: skip
# What attention's kernel takes besides, of which lists name the keys.
OF_LISTS = [
    BlockSparseCase(MIXED, 4, 2, 64, 0.5, 64, 64, padding=200),
    BlockSparseCase(((1500, 1500), (70, 900)), 4, 1, 128, PHI3_SMALL, 64, 64, dtype="float16", softcap=9.0),
    BlockSparseCase(((700, 700),), 2, 1, 96, 0.5, 64, 256, softcap=30.0),
    BlockSparseCase(((300, 900), (513, 513)), 2, 2, 256, 0.4, 128, 128),
]
LARGE = CASES[4]
FIRST = triton.first_lowering()  # what serves where this kernel cannot


@pytest.fixture(params=[False, True], ids=["own kernel", "lists"])
def by_lists(request, monkeypatch):
    monkeypatch.setattr(cuda, "BY_LISTS", request.param)


def call(data, layout, **options):
    function = functools.partial(
        pallas_attn.blocksparse_attention, return_lse=True, implementation="cuda", **options
    )
    traced = jax.jit(lambda operands, layout, lengths: function(*operands, layout, **lengths))
    return traced(data.arguments(), layout, data.lengths())


def arrays(results):
    return (np.array(x.astype(jnp.float32)) for x in results)


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(case, by_lists):
    check(case)


@gpu
@pytest.mark.parametrize("case", OF_LISTS, ids=lambda case: case.id)
def test_lists_match_reference(case, monkeypatch):
    monkeypatch.setattr(cuda, "BY_LISTS", True)
    check(case)


def check(case):
    data, options = make(case), {"softcap": case.softcap}
    out, lse = call(data, layout_of(case), **options)
    expected, expected_lse = reference(case, data)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)
    again = call(data, layout_of(case), **options)
    for first, second in zip((out, lse), again, strict=True):
        np.testing.assert_array_equal(np.array(first), np.array(second))


@gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.pattern != "dense"], ids=lambda case: case.id)
@pytest.mark.control
def test_another_layout_is_caught(case):
    data = make(case)
    dense = builders.dense_causal(case.max_len, block_size=case.block_size, q_block_size=case.q_block_size)
    out, _ = call(data, dense)
    expected, _ = reference(case, data)
    with pytest.raises(AssertionError):
        compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)


@gpu
def test_rows_that_cannot_be_right_are_nan_and_no_others(by_lists):
    case = dataclasses.replace(LARGE, lens=((1024, 1024),), pattern=1.0, q_block_size=128, block_size=128)
    data, layout = make(case), layout_of(case)
    good, good_lse = arrays(call(data, layout))
    pointers, columns = layout.row_pointers.copy(), layout.columns.copy()
    # Head 0: row 1 looks ahead; head 1: row 2 goes far beyond int32, row 5 does not ascend; head 2: row 3 begins below
    # 0, of which the row before it ends there, too; head 3: row 6 repeats a column.
    columns[0, pointers[0, 2] - 1] = 2
    columns[1, pointers[1, 2]] = 2**30
    columns[1, pointers[1, 5] : pointers[1, 5] + 2] = [1, 0]
    columns[3, pointers[3, 6] + 1] = columns[3, pointers[3, 6]]
    pointers[2, 3] = -4
    out, lse = arrays(call(data, dataclasses.replace(layout, row_pointers=pointers, columns=columns)))
    bad = np.zeros((8, 4), bool)
    for head, row in ((0, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 6)):
        bad[row, head] = True
    bad = bad.repeat(128, axis=0)
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(out).all(axis=2), bad)
    np.testing.assert_array_equal(out[~bad], good[~bad])
    np.testing.assert_array_equal(lse[~bad], good_lse[~bad])


@gpu
def test_positions_beyond_the_layout_and_bad_lengths_are_nan(by_lists):
    case = dataclasses.replace(LARGE, lens=((300, 300), (200, 200)), block_size=128, q_block_size=128)
    data = make(case)
    good, _ = arrays(call(data, layout_of(case)))
    out, lse = arrays(call(data, builders.dense_causal(256, block_size=128, q_block_size=128)))
    beyond = (np.arange(500) >= 256) & (np.arange(500) < 300)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), beyond)
    np.testing.assert_array_equal(np.isnan(lse).all(axis=1), beyond)
    data.cu_k_lens = np.array([0, 300, 501], np.int32)
    out, _ = arrays(call(data, layout_of(case)))
    assert np.isnan(out[300:]).all()
    np.testing.assert_array_equal(out[:300], good[:300])


@gpu
def test_neighbours_do_not_matter(by_lists):
    case = CASES[1]
    data = make(case)
    good, _ = arrays(call(data, layout_of(case)))
    data.key[data.cu_k_lens[3] : data.cu_k_lens[4]] = np.nan
    data.value[data.cu_k_lens[3] : data.cu_k_lens[4]] = np.nan
    data.query[data.cu_q_lens[3] : data.cu_q_lens[4]] = np.nan
    out, _ = arrays(call(data, layout_of(case)))
    own = np.arange(len(out))
    own = (own >= data.cu_q_lens[3]) & (own < data.cu_q_lens[4])
    np.testing.assert_array_equal(out[~own], good[~own])
    assert np.isnan(out[own]).any()


@gpu
def test_vmap_gives_what_calls_give(by_lists):
    case = dataclasses.replace(CASES[0], lens=((200, 200), (60, 190)))
    data = make(case)
    layout, lengths = layout_of(case), data.lengths()

    def attend(*operands):
        return pallas_attn.blocksparse_attention(*operands, layout, **lengths, implementation="cuda")

    several = [jnp.stack([x, 2 * x, x + 1]) for x in data.arguments()]
    got = jax.jit(jax.vmap(attend))(*several)
    for i in range(3):
        expected = jax.jit(attend)(*(x[i] for x in several))
        np.testing.assert_array_equal(np.array(got[i]), np.array(expected))


@gpu
def test_gradients_are_those_of_the_tiled_kernels(by_lists):
    case = CASES[0]
    data = make(case)
    layout, lengths = layout_of(case), data.lengths()

    def gradients(implementation):
        def loss(operands):
            out = pallas_attn.blocksparse_attention(
                *operands, layout, **lengths, implementation=implementation
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return arrays(jax.jit(jax.grad(loss))(data.arguments()))

    for ours, theirs in zip(gradients("cuda"), gradients(FIRST), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2)
        assert np.abs(theirs).max() > 0.1


@gpu
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(CASES[1], head_dim=64),
        *CASES[3:6],
        dataclasses.replace(CASES[4], head_dim=96, softcap=3.0),
        dataclasses.replace(OF_LISTS[3], pattern=0.6),
    ],
    ids=lambda case: case.id,
)
def test_gradients_of_its_own_are_those_of_the_tiled_kernels(case, monkeypatch):
    monkeypatch.setattr(cuda, "BY_LISTS", True)
    data, layout = make(case), layout_of(case)
    data.value[np.abs(data.value.astype(np.float32)) > 100] = np.nan  # which no query sees
    lengths, d_out = data.lengths(), np.random.default_rng(1).standard_normal(data.query.shape)

    def gradients(backward):
        def both(floats, layout):
            attend = functools.partial(
                pallas_attn.blocksparse_attention, **lengths, softcap=case.softcap, implementation="cuda",
                config=BlockSparseCudaConfig(backward=backward),
            )  # fmt: skip
            out, vjp = jax.vjp(lambda floats: attend(*floats, layout), floats)
            return vjp(jnp.asarray(d_out, out.dtype))[0]

        return [np.float64(x) for x in arrays(jax.jit(both)(data.arguments(), layout))]

    ours = gradients("cuda")
    for found, theirs, again in zip(ours, gradients("tiled"), gradients("cuda"), strict=True):
        np.testing.assert_array_equal(found, again)
        assert np.linalg.norm(found - theirs) < 5e-3 * np.linalg.norm(theirs)
        assert np.abs(theirs).max() > 0.1


@gpu
def test_gradients_of_rows_that_cannot_be_right_are_nan_where_those_of_the_tiled_kernels_are():
    case = dataclasses.replace(LARGE, lens=((1024, 1024),), pattern=1.0, q_block_size=128, block_size=128)
    data, layout = make(case), layout_of(case)
    pointers, columns = layout.row_pointers.copy(), layout.columns.copy()
    columns[1, pointers[1, 2]] = 2**30
    pointers[2, 3] = -4
    wrong = dataclasses.replace(layout, row_pointers=pointers, columns=columns)

    def gradients(backward):
        def loss(floats, layout):
            config = BlockSparseCudaConfig(backward=backward)
            out = pallas_attn.blocksparse_attention(
                *floats, layout, **data.lengths(), implementation="cuda", config=config
            )
            return jnp.sum(out.astype(jnp.float32))

        return [np.array(x, np.float32) for x in jax.jit(jax.grad(loss))(data.arguments(), wrong)]

    for found, theirs in zip(gradients("cuda"), gradients("tiled"), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(theirs))
        assert np.isnan(found).any()
        assert not np.isnan(found).all()


@gpu
def test_it_is_chosen_where_it_can_serve():
    def chosen(case, **options):
        data = make(case)
        with dispatch.record_implementations() as choices:
            pallas_attn.blocksparse_attention(*data.arguments(), layout_of(case), **data.lengths(), **options)
        return choices["blocksparse_attention"]

    assert chosen(LARGE) == "cuda"
    assert chosen(dataclasses.replace(LARGE, block_size=64)) == FIRST
    assert chosen(LARGE, softcap=3.0) == FIRST
    assert chosen(LARGE, config=BlockSparseConfig()) == FIRST
    assert chosen(dataclasses.replace(LARGE, lens=((1, 300), (1, 200)))) == FIRST
    assert chosen(dataclasses.replace(LARGE, lens=((64, 64),) * 9)) == FIRST
    assert chosen(dataclasses.replace(LARGE, page_size=16)) == FIRST


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ((128, 128, 128), {}, None),
        ((64, 64, 64), {"softcap": 3.0}, None),
        ((256, 64, 128), {}, None),
        ((128, 128, 64), {}, "needs blocks of at least 128 queries and 64 keys, got 64 queries and 128 keys"),
        ((128, 32, 128), {}, "needs blocks of at least 128 queries and 64 keys, got 128 queries and 32 keys"),
        ((132, 128, 128), {}, "needs a head_dim of at most 256, a multiple of 8, got 132"),
    ],
    ids=str,
)
def test_what_lists_serve(monkeypatch, sizes, options, reason):
    monkeypatch.setattr(cuda, "BY_LISTS", True)
    as_if_cuda(monkeypatch)
    dim, block_size, q_block_size = sizes
    layout = builders.dense_causal(512, block_size=block_size, q_block_size=q_block_size)
    ends = jnp.array([0, 300, 512], jnp.int32)

    def attend(query, key, value):
        options_of_call = dict(cu_q_lens=ends, cu_k_lens=ends, implementation="cuda", return_lse=True)
        return pallas_attn.blocksparse_attention(query, key, value, layout, **options_of_call, **options)

    arrays = [jax.ShapeDtypeStruct((512, heads, dim), jnp.bfloat16) for heads in (4, 2, 2)]
    if reason is not None:
        with abstract_mesh(H100), pytest.raises(ValueError, match=reason):
            jax.eval_shape(attend, *arrays)
        return
    text = lower_for_gpu(attend, *arrays).as_text()
    [line] = [line for line in text.splitlines() if "@pallas_attn_attention_lists_sm90(" in line]
    assert f"block_q = {q_block_size}" in line


def lowered_gradients(size=128, q_size=128, **options):
    layout = builders.dense_causal(512, block_size=size, q_block_size=q_size)
    ends = jnp.array([0, 300, 512], jnp.int32)

    def loss(query, key, value):
        out = pallas_attn.blocksparse_attention(query, key, value, layout, cu_k_lens=ends, **options)
        return out.astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct((512, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
    return lower_for_gpu(jax.grad(loss, (0, 1, 2)), *shapes).as_text()


@pytest.mark.parametrize("backward", [None, "tiled", "cuda"])
def test_gradients_are_whose_the_config_says(monkeypatch, backward):
    as_if_cuda(monkeypatch)
    text = lowered_gradients(implementation="cuda", config=BlockSparseCudaConfig(backward=backward))
    assert ("@pallas_attn_attention_backward_sm90(" in text) == (backward == "cuda")
    assert ("pallas_attn_blocksparse_dq" in text) == (backward != "cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 64, "q_size": 64, "implementation": "cuda"},
         "backward 'tiled' or None, got 'cuda', which takes blocks of at least 128 queries and 128 keys, got 64 and"),
        ({"implementation": "pallas"}, "takes no BlockSparseCudaConfig"),
    ],
    ids=["blocks of 64", "pallas"],
)  # fmt: skip
def test_a_config_that_cannot_be_heard_is_refused(monkeypatch, options, message):
    as_if_cuda(monkeypatch)
    monkeypatch.setattr(cuda, "BY_LISTS", True)
    with pytest.raises(ValueError, match=message):
        lowered_gradients(**options, config=BlockSparseCudaConfig(backward="cuda"))
