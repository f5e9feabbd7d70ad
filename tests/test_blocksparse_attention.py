"""Numerics of `blocksparse_attention` against float64 torch, on the CPU: xla, and the kernels in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from blocksparse_inputs import TEST_CASES, make, visible
from references.blocksparse_torch import blocksparse_attention as reference
from support import ON_GPU, unchecked

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn._call.pools import PoolShape
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig, builders, kernel, walk
from pallas_attn.ops.blocksparse_attention.problem import Problem
from pallas_attn.testing import compare
from pallas_attn.testing.blocksparse import BlockSparseCase, layout_of

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]


def run(case, data, implementation, layout=None, **options):
    layout = layout_of(case) if layout is None else layout
    config = None
    if implementation != "xla" and case.config:
        sizes = dict(block_q=min(128, layout.q_block_size), block_kv=layout.block_size)
        sizes |= dict(decode_block_kv=min(32, layout.block_size), num_warps=4)
        config = BlockSparseConfig(**{**sizes, **dict(case.config)})
    lengths = data.lengths()
    call = functools.partial(
        pallas_attn.blocksparse_attention,
        softcap=case.softcap,
        cache_layout=case.cache_layout,
        return_lse=True,
        implementation=implementation,
        config=config,
        **options,
    )
    return jax.jit(lambda q, k, v, lengths: call(q, k, v, layout, **lengths))(*data.arguments(), lengths)


def check(case, data, out, lse):
    expected, expected_lse = reference(case, data)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    # The newest jax has the first two.
    [*TEST_CASES[:2], *(pytest.param(case, marks=pytest.mark.once) for case in TEST_CASES[2:])],
    ids=lambda case: case.id,
)
def test_matches_reference(case, implementation):
    data = make(case)
    out, lse = run(case, data, implementation)
    assert out.dtype == jnp.dtype(case.dtype)
    check(case, data, out, lse)


@pytest.mark.parametrize("case", [c for c in TEST_CASES if c.pattern != "dense"], ids=lambda case: case.id)
@pytest.mark.control
def test_a_forgotten_pattern_is_caught(case):
    data = make(case)
    with pytest.raises(AssertionError):
        check(case, data, *reference(case, data, dense=True))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize(
    ("block_size", "q_block_size", "block_kv", "block_q"),
    [(16, 64, 16, 64), (16, 64, 16, 16), (64, 16, 64, 16), (64, 64, 16, 32), (64, 64, 64, 16)],
)
def test_tiles_of_any_size_beside_blocks_of_any(block_size, q_block_size, block_kv, block_q, implementation):
    """The keys at the queries' own positions are some tiles of several blocks, or a part of one."""
    config = (("block_q", block_q), ("block_kv", block_kv))
    lens = ((70, 70), (1, 90), (33, 140))
    case = BlockSparseCase(lens, 2, 1, 32, 0.5, block_size, q_block_size, dtype="float32", config=config)
    data = make(case)
    check(case, data, *run(case, data, implementation))


SMALL = BlockSparseCase(((100, 100), (1, 90), (40, 40)), 4, 2, 32, 0.7, dtype="float32", padding=4)


@pytest.mark.once
@pytest.mark.parametrize("page_size", [None, 16])
def test_keys_beyond_the_l2_are_read_a_kv_head_at_a_time(page_size, monkeypatch):
    case = BlockSparseCase(((70, 70), (33, 90)), 6, 2, 32, 0.5, dtype="float32", page_size=page_size)
    data, taken = make(case), []

    def heads_together(problem, itemsize):
        taken.append(rule(problem, itemsize))
        return taken[-1]

    rule = kernel.heads_together
    monkeypatch.setattr(kernel, "heads_together", heads_together)
    monkeypatch.setattr(kernel, "MOST_IN_L2", 1 << 14)
    # Traced for another limit, a call of the same sizes would not ask again.
    jax.clear_caches()
    check(case, data, *run(case, data, "interpret"))
    assert taken == [3]
    jax.clear_caches()


@pytest.mark.parametrize(
    ("tokens", "num_kv_heads", "itemsize", "given", "together"),
    [
        # 8 KV heads of 128: 4 KiB of keys and values a token in 16 bits, 40 MiB of 10240 tokens.
        (10240, 8, 2, 0, 32),
        (10241, 8, 2, 0, 4),
        (5121, 8, 4, 0, 4),
        # With as many KV heads as heads, or with one.
        (2561, 32, 2, 0, 1),
        (2560, 32, 2, 0, 32),
        (131072, 1, 2, 0, 32),
        # The caller's own.
        (10241, 8, 2, 16, 16),
    ],
)
def test_the_heads_that_start_together_are_those_whose_keys_the_l2_holds(
    tokens, num_kv_heads, itemsize, given, together
):
    problem = Problem(
        num_tokens=64,
        num_seqs=1,
        num_heads=32,
        max_k_len=tokens,
        pool=PoolShape(tokens, 1, num_kv_heads, 128),
        cache_layout=None,
        kinds="mixed",
        scale=1.0,
        rules=Rules(),
        config=BlockSparseConfig(heads_together=given),
    )
    assert kernel.heads_together(problem, itemsize) == together


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_missing_query_lengths_are_inferred_where_all_is_pure(implementation):
    prefill = BlockSparseCase(((40, 40), (64, 64)), 2, 1, 32, 0.6, dtype="float32")
    decode = BlockSparseCase(((1, 40), (1, 64)), 2, 1, 32, 0.6, dtype="float32")
    for case in (prefill, decode):
        data = make(case)
        call = functools.partial(
            pallas_attn.blocksparse_attention,
            *data.arguments(),
            layout_of(case),
            implementation=implementation,
        )
        lengths = data.lengths()
        given = call(**lengths)
        del lengths["cu_q_lens"]
        np.testing.assert_allclose(call(**lengths), given, atol=1e-6)
    data = make(SMALL)
    with pytest.raises(ValueError, match="'cu_q_lens': expected an array, for there are neither"):
        pallas_attn.blocksparse_attention(
            *data.arguments(), layout_of(SMALL), cu_k_lens=jnp.asarray(data.cu_k_lens)
        )


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_traced_layout_that_points_outside_spoils_its_own_rows_alone(implementation):
    case = dataclasses.replace(SMALL, pattern=1.0)
    data, layout = make(case), layout_of(case)
    good, good_lse = (np.array(x) for x in run(case, data, implementation))
    pointers, columns = layout.row_pointers.copy(), layout.columns.copy()

    def last_of(head, row):
        return pointers[head, row + 1] - 1

    # Head 1: row 2 looks ahead; head 2: row 1 below 0; head 3: row 2 does not ascend.
    columns[1, last_of(1, 2)] = 3
    columns[2, pointers[2, 1]] = -7
    begin = pointers[3, 2]
    columns[3, begin : begin + 2] = columns[3, begin : begin + 2][::-1]
    broken = dataclasses.replace(layout, columns=columns)
    with pytest.raises(ValueError, match="SparseLayout: argument 'columns'"):
        run(case, data, implementation, layout=broken)
    call = jax.jit(
        lambda layout: pallas_attn.blocksparse_attention(
            *data.arguments(), layout, **data.lengths(), return_lse=True, implementation=implementation
        )
    )
    out, lse = (np.array(x) for x in call(broken))
    # Sequences of 100, 90 (its last token alone) and 40 tokens.
    position = np.concatenate([np.arange(100), [89], np.arange(40), [-1] * 4])
    bad = np.zeros((len(position), 4), bool)
    for head, row in ((1, 2), (2, 1), (3, 2)):
        bad[:, head] = (position >= 0) & (position // 32 == row)
    assert bad.any(axis=0).tolist() == [False, True, True, True]
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(out).all(axis=2), bad)
    np.testing.assert_allclose(out[~bad], good[~bad], atol=1e-6)
    np.testing.assert_allclose(lse[~bad], good_lse[~bad], atol=1e-5)


@functools.cache
def by_traced_layout(implementation: str):
    data = make(BlockSparseCase(((80, 80),), 2, 1, 32, "dense", 16, 16, dtype="float32"))
    call = functools.partial(
        pallas_attn.blocksparse_attention, *data.arguments(), **data.lengths(), implementation=implementation
    )
    return jax.jit(lambda layout: call(layout=layout))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("array", "place", "value", "spoilt"),
    [
        # Blocks of 16 tokens: the last of row 2, whose first token is beyond int32 and comes out as 0.
        ("columns", 5, 2**28, [2]),
        # The second of row 4, whose first token is the least of int32.
        ("columns", 11, 2**27, [4]),
        # Row 1 keeps its entries, though row 3 begins at the same one.
        ("row_pointers", 3, 1, [2, 3]),
        ("row_pointers", 3, 2**31 - 1, [2, 3]),
    ],
)
def test_whatever_a_traced_layout_holds_other_rows_are_right(array, place, value, spoilt, implementation):
    layout, call = builders.dense_causal(80, block_size=16), by_traced_layout(implementation)
    changed = getattr(layout, array).copy()
    changed[0, place] = value
    out, good = (np.array(call(x)) for x in (dataclasses.replace(layout, **{array: changed}), layout))
    bad = np.isin(np.arange(80) // 16, spoilt)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), bad)
    np.testing.assert_allclose(out[~bad], good[~bad], atol=1e-6)


@pytest.mark.parametrize(
    ("column", "block_size", "read"),
    [
        (0, 16, True),
        (3, 16, True),
        (4, 16, False),
        (-1, 16, False),
        (2**27, 16, False),  # -2**31
        (2**27 - 1, 16, False),  # 2**31 - 16, of which the last is beyond
        (-(2**28) + 1, 16, False),  # 16
    ],
)
def test_no_tile_outside_of_the_past_is_read(column, block_size, read):
    """Whatever a column's first position comes to in 32 bits."""
    column = jnp.int32(column)
    assert bool(walk.in_the_past(column, column * block_size, jnp.int32(64 - block_size))) == read


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_beyond_the_layout_are_nan(implementation):
    data = make(SMALL)
    short = builders.dense_causal(64, block_size=32)
    out, lse = (np.array(x) for x in run(SMALL, data, implementation, layout=short))
    position = np.concatenate([np.arange(100), [89], np.arange(40), [-1] * 4])
    np.testing.assert_array_equal(np.isnan(lse).all(axis=1), position >= 64)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 2)), position >= 64)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_pages_and_lengths_spoil_only_their_sequences(implementation):
    case = dataclasses.replace(
        SMALL, lens=((70, 70), (1, 90), (40, 40), (1, 64), (33, 64)), page_size=16, pattern="dense"
    )
    data = make(case)
    assert data.block_tables is not None
    assert data.seq_lens is not None
    good, _ = (np.array(x) for x in run(case, data, implementation))
    data.block_tables[0, 1] = -1
    data.block_tables[1, 0] = 2147480000
    data.seq_lens[4] = -3
    out, _ = (np.array(x) for x in run(case, data, implementation))
    token = np.arange(len(out))
    nan = (token >= 16) & (token < 71) | (token >= 112) & (token < 145)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), nan)
    np.testing.assert_allclose(out[~nan], good[~nan], atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_of_blocks_that_no_head_sees_may_be_anyones(implementation):
    pattern = LocalStride(32, 1, 4)
    case = BlockSparseCase(((1, 300), (1, 170)), 2, 1, 32, pattern, dtype="float32", page_size=16)
    data = make(case)
    assert data.block_tables is not None
    expected = reference(case, data)
    for seq, (_, k_len) in enumerate(case.lens):
        seen = visible(case, 0, k_len - 1)
        for page in range(-(-k_len // 16)):
            if not seen[16 * page : 16 * page + 16].any():
                data.block_tables[seq, page] = (2147480000, -1)[page % 2]
    out, lse = run(case, data, implementation)
    compare.assert_rows_close(out, expected[0], dtype="float32", case_id=case.id)
    compare.assert_lse_close(lse, expected[1], dtype="float32", case_id=case.id)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("page_size", [None, 16])
def test_blocks_that_no_head_sees_may_hold_anything(page_size, implementation):
    """Those at the queries' own positions too, which kernels load before they know whether they are listed."""
    case = BlockSparseCase(
        ((100, 100), (1, 90), (40, 40)), 2, 1, 32, 0.4, dtype="float32", page_size=page_size
    )
    data, layout = make(case), layout_of(case)
    seen = layout.to_block_mask().any(axis=0)
    assert not seen.diagonal().all()
    expected = reference(case, data)
    for which in (data.key, data.value):
        unseen = np.abs(data.value) > 100  # so `make` marks them
        which[unseen] = np.nan
    assert np.isnan(data.key).any()
    out, lse = run(case, data, implementation)
    compare.assert_rows_close(out, expected[0], dtype="float32", case_id=case.id)
    compare.assert_lse_close(lse, expected[1], dtype="float32", case_id=case.id)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_neighbours_do_not_matter(implementation):
    """Sequences in one batch: NaN keys of one never reach another."""
    data = make(SMALL)
    good, _ = (np.array(x) for x in run(SMALL, data, implementation))
    data.key[100:190] = data.value[100:190] = np.nan
    out, _ = (np.array(x) for x in run(SMALL, data, implementation))
    own = np.arange(len(out)) == 100
    assert np.isnan(out[own]).all()
    np.testing.assert_array_equal(out[~own], good[~own])


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", *ON_GPU])
def test_blocks_that_no_head_of_a_group_sees_may_hold_anything(implementation):
    """Block 1 for both KV heads, block 0 for the second alone."""
    lengths, tokens = jnp.array([0, 48], jnp.int32), np.arange(48)
    mask = np.tri(3, dtype=bool) & np.array([True, False, True]) & np.ones((4, 1, 1), bool)
    mask[2:, :, 0] = False
    layout = builders.from_block_mask(mask, block_size=16)
    query, key, value, towards = np.random.default_rng(0).standard_normal((4, 48, 4, 16)).astype(np.float32)

    @jax.jit
    def both(query, key, value, towards):
        call = functools.partial(pallas_attn.blocksparse_attention, layout=layout, cu_k_lens=lengths,
                                 cu_q_lens=lengths, softcap=3.0, implementation=implementation)  # fmt: skip
        out, pull = jax.vjp(call, query, key, value)
        return out, *pull(towards)

    arrays = [query, key[:, ::2], value[:, ::2], towards]
    expected = both(*arrays)
    unseen = np.stack([tokens // 16 == 1, tokens < 32], axis=1)
    for array, gradient in zip(arrays[1:3], expected[2:], strict=True):
        assert (np.asarray(gradient)[unseen] == 0).all()
        assert np.abs(np.asarray(gradient)[~unseen]).max() > 0.1
        array[unseen] = np.nan
    for got, wanted in zip(both(*arrays), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.once
def test_gradients_are_those_of_dense_attention_with_a_mask():
    case = BlockSparseCase(((50, 50), (1, 40), (20, 40)), 4, 2, 16, 0.5, 16, 16, dtype="float32")
    data, layout = make(case), layout_of(case)
    data.value[np.abs(data.value) > 100] = 0.5
    query, key, value = data.arguments()
    mask = np.zeros((4, 71, 130), bool)
    for seq, (q_len, k_len) in enumerate(case.lens):
        for i in range(q_len):
            for head in range(4):
                seen = visible(case, head, k_len - q_len + i)
                first = data.cu_k_lens[seq]
                mask[head, data.cu_q_lens[seq] + i, first : first + len(seen)] = seen

    def dense(query, key, value):
        keys, values = (jnp.repeat(x, 2, axis=1) for x in (key, value))
        logits = jnp.einsum("qhd,khd->hqk", query, keys, precision="highest") / 4
        weights = jax.nn.softmax(logits, where=mask, axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, values, precision="highest")

    def sparse(query, key, value):
        call = pallas_attn.blocksparse_attention
        return call(query, key, value, layout, **data.lengths(), implementation="xla")

    towards = np.random.default_rng(1).standard_normal(query.shape).astype(np.float32)
    got, expected = (
        jax.grad(lambda *x, f=f: jnp.sum(f(*x) * towards), argnums=(0, 1, 2))(query, key, value)
        for f in (sparse, dense)
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert float(jnp.max(jnp.abs(theirs))) > 0.1
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": jnp.zeros((3, 4, 32), jnp.int8)}, TypeError, "'query': expected dtype bfloat16 or"),
        ({"key": jnp.zeros((64, 3, 32))}, ValueError, "'value': expected shape"),
        ({"value": jnp.zeros((64, 2, 32), jnp.bfloat16)}, TypeError, "'value': expected dtype float32"),
        ({"cu_k_lens": None}, ValueError, "'cu_k_lens': expected an array for keys in rows, got None"),
        ({"cu_q_lens": jnp.zeros(7, jnp.int32)}, ValueError, r"'cu_q_lens': expected shape \[4\], got \[7\]"),
        ({"cu_k_lens": jnp.zeros(4)}, TypeError, "'cu_k_lens': expected dtype int32"),
        ({"block_tables": jnp.zeros((3, 2), jnp.int32)}, ValueError, "'key': expected shape"),
        ({"layout": 3}, TypeError, "'layout': expected a SparseLayout, got int"),
        ({"layout": builders.local_stride(LocalStride(32, 1, 2, 1), 64, num_heads=2, num_kv_heads=1)},
         ValueError, r"'layout': expected 1 head or 4 \(as query\), got 2 heads"),
        ({"cache_layout": "HND"}, ValueError, "'cache_layout': expected NHD for keys in rows, got 'HND'"),
        ({"scale": 0.0}, ValueError, "'scale': expected a finite number above 0"),
        ({"softcap": -1.0}, ValueError, "'softcap': expected a finite number above 0"),
        ({"return_lse": 1}, TypeError, "'return_lse': expected True or False"),
        ({"config": BlockSparseConfig()}, ValueError, "'config': expected None for implementation 'xla'"),
        ({"config": BlockSparseConfig(), "implementation": "interpret"}, ValueError,
         r"'config': expected block_q at most the layout's \(32\), got 128"),
        ({"implementation": "tpu"}, ValueError, "'implementation': expected None or one of 'cuda', 'pallas', 'trito"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.once
def test_errors(changes, error, message):
    lens = jnp.array([0, 20, 30, 64], jnp.int32)
    arguments = {
        "query": jnp.zeros((64, 4, 32)), "key": jnp.zeros((64, 2, 32)), "value": jnp.zeros((64, 2, 32)),
        "layout": builders.dense_causal(64, block_size=32), "cu_q_lens": lens, "cu_k_lens": lens,
        "implementation": "xla",
    }  # fmt: skip
    with pytest.raises(error, match=f"blocksparse_attention: argument {message}"):
        unchecked(pallas_attn.blocksparse_attention)(**{**arguments, **changes})


@pytest.mark.once
def test_configs_are_checked():
    with pytest.raises(
        ValueError, match="BlockSparseConfig: argument 'block_q': expected a power of two >= 16"
    ):
        BlockSparseConfig(block_q=24)
    with pytest.raises(
        ValueError, match="BlockSparseConfig: argument 'num_splits': expected at least 1, got 0"
    ):
        BlockSparseConfig(num_splits=0)
