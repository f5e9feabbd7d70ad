"""Numerics of `ragged_paged_attention` against float64 torch, on the CPU: xla, and the kernel in interpret mode."""

import dataclasses
import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import torch
from references.ragged_attention_torch import ragged_paged_attention as reference
from support import ON_GPU, unchecked

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles
from pallas_attn.testing import cases, compare

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]
CASES = [
    case if case.fast else pytest.param(case, marks=pytest.mark.once)
    for case in op_cases.of("ragged_paged_attention")
]
PLAIN = next(case for case in op_cases.of("ragged_paged_attention") if case.fast)


def config_of(case: cases.RaggedCase) -> RaggedAttentionConfig:
    sizes = {"block_q": 32, "block_kv": 32, "num_splits": 1, **dict(case.config)}
    return RaggedAttentionConfig(
        RaggedTiles(**sizes), RaggedTiles(**{**sizes, "block_q": 16}) if case.short else None
    )


@functools.cache
def compiled(case: cases.RaggedCase, implementation: str):
    return jax.jit(
        functools.partial(
            pallas_attn.ragged_paged_attention,
            return_lse=True,
            layout=case.layout,
            softcap=case.softcap,
            causal=case.causal,
            sliding_window=case.sliding_window,
            implementation=implementation,
            config=None if implementation == "xla" else config_of(case),
        )
    )


def run(case: cases.RaggedCase, data: inputs.RaggedInputs, implementation: str, **traced):
    return compiled(case, implementation)(*data.arguments(), **data.extras, **traced)


def check(case: cases.RaggedCase, data: inputs.RaggedInputs, out, lse, **options) -> None:
    expected, expected_lse = reference(case, data, **options)
    rounded, _ = reference(case, data, rounding=getattr(torch, case.dtype), **options)
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(case, implementation):
    data = inputs.make_ragged(case)
    out, lse = run(case, data, implementation)
    assert out.dtype == jnp.dtype(case.dtype)
    assert lse.dtype == jnp.float32
    check(case, data, out, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_empty_and_num_seqs_may_change(implementation):
    """One compiled function for any number of sequences; what lies behind the last one may be anything."""
    data = inputs.make_ragged(PLAIN)
    for num_seqs in (7, 4, 0):
        fewer = data.copy(num_seqs=np.asarray(num_seqs, np.int32))
        out, lse = run(PLAIN, fewer, implementation)
        end = int(data.cu_q_lens[num_seqs])
        assert not np.asarray(out[end:], np.float32).any()
        assert np.isneginf(lse[end:]).all()
        check(PLAIN, fewer, out, lse)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "boundary", ["first", "page end", "page start", "split end", "split start", "own", "window"]
)
def test_no_boundary_token_is_lost(boundary, implementation):
    """Sequences hide most of their weight in one token at a boundary; "own" is the newest token's own position."""
    # A prefill of two blocks, one of them in part; a decoded sequence.
    lens, q_lens = (410, 300), (20, 1)
    window = 150 if boundary == "window" else None
    cut = (("block_kv", 16), ("num_splits", 3), ("min_split_tokens", 16), ("target_programs", 12))
    case = cases.RaggedCase(lens, 4, 2, 64, 16, q_lens=q_lens, sliding_window=window, config=cut)
    # Splits are of equal numbers of tiles; every multiple of a tile is a place where one may end.
    at = {"first": 0, "page end": 47, "page start": 48, "split end": 127, "split start": 128}
    data = inputs.make_ragged(case)
    # The oldest token that the first query in the window still sees, or the newest of all.
    window_edge = {seq: n - q - 149 for seq, (n, q) in enumerate(zip(lens, q_lens, strict=True))}
    positions = {
        seq: n - 1 if boundary == "own" else window_edge[seq] if window else at[boundary]
        for seq, n in enumerate(lens)
    }
    inputs.plant_ragged_needles(case, data, positions)
    check(case, data, *run(case, data, implementation))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_pages_and_lengths_poison_only_their_sequence(implementation):
    config = (("num_splits", 3), ("min_split_tokens", 16), ("target_programs", 64))
    case = cases.RaggedCase((300,) * 7, 4, 2, 64, 16, q_lens=(9, 1) * 3 + (30,), config=config)
    data = inputs.make_ragged(case)
    good, good_lse = (np.array(x) for x in run(case, data, implementation))
    data.block_tables[1, 0] = -1
    data.block_tables[2, 18] = data.key_cache.shape[0]  # the last page in use
    data.seq_lens[3] = data.block_tables.shape[1] * case.page_size + 1
    data.seq_lens[4] = -1
    data.block_tables[6, 10] = 2147480000
    out, lse = run(case, data, implementation)
    for seq in range(7):
        mine = slice(data.cu_q_lens[seq], data.cu_q_lens[seq + 1])
        if seq in (0, 5):
            np.testing.assert_allclose(np.float32(out[mine]), np.float32(good[mine]), atol=2e-2)
            np.testing.assert_allclose(lse[mine], good_lse[mine], atol=1e-4)
        else:
            assert np.isnan(np.float32(out[mine])).all(), f"sequence {seq} must be NaN"
            assert np.isnan(lse[mine]).all(), f"lse of sequence {seq} must be NaN"
    end = data.cu_q_lens[7]
    assert not np.float32(out[end:]).any()


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_that_contradict_each_other_read_nothing_outside(implementation):
    """cu_q_lens that decrease, or lead outside, give something, and no fault."""
    case = dataclasses.replace(PLAIN, config=())
    data = inputs.make_ragged(case)
    data.cu_q_lens[:] = [5, 40, 17, 2**31 - 1, -8, 60, 3, 9, 9, 9]
    out, _ = run(case, data, implementation)
    assert out.shape == data.query.shape


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_behind_the_window_may_be_anyones(implementation):
    case = cases.RaggedCase(
        (300, 70), 4, 2, 64, 16, q_lens=(20, 1), sliding_window=50, config=(("block_kv", 64),)
    )
    data = inputs.make_ragged(case)
    expected = data.copy()
    for seq, length in enumerate(case.seq_lens):
        unseen = ~inputs.visible(case.of(seq), length).any(axis=(0, 1))
        data.block_tables[seq, : int(unseen.sum()) // case.page_size] = inputs.GARBAGE_IDS[seq]
    out, lse = run(case, data, implementation)
    check(case, expected, out, lse)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", *ON_GPU])
def test_fp8_output(implementation):
    """By two scales: with one it takes half the format's range, with the other some of it saturates. The kernel's is
    tested with `prefix_prefill`, which has the same."""
    data = inputs.make_ragged(PLAIN)
    expected, _ = reference(PLAIN, data)
    plain = compiled(PLAIN, implementation).__wrapped__
    call = jax.jit(
        lambda scale: plain(*data.arguments(), **data.extras, out_dtype="float8_e4m3fn", out_scale=scale)
    )
    for part in (0.5, 2.0):
        scale = np.float32(np.abs(expected).max() / (448 * part))
        out, _ = call(scale)
        assert out.dtype == jnp.float8_e4m3fn
        np.testing.assert_allclose(np.float32(out), np.clip(expected / scale, -448, 448), rtol=0.1, atol=4)
        assert (np.abs(np.float32(out)).max() == 448) == (part > 1)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_traced_window_is_the_static_one(implementation):
    data = inputs.make_ragged(PLAIN)
    windows = jnp.array([300, 1, 30], jnp.int32)

    @jax.jit
    def layers(windows):
        call = functools.partial(run, PLAIN, data, implementation)
        return jax.lax.scan(lambda _, window: (None, call(sliding_window=window)), None, windows)[1]

    out, lse = layers(windows)
    for i, window in enumerate((300, 1, 30)):
        check(dataclasses.replace(PLAIN, sliding_window=window), data, out[i], lse[i])


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_same_inputs_same_bits(implementation):
    data = inputs.make_ragged(PLAIN)
    first, second = (run(PLAIN, data, implementation) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_decoding_alone_is_paged_attention(implementation):
    """Sequences of one token each, and nothing else: the other op's call."""
    case = cases.DecodeCase((77, 0, 300, 16), 8, 2, 64, 16, "float32")
    data = inputs.make(case)
    query, *caches, tables, lens = data.arguments()
    bounds = jnp.arange(5, dtype=jnp.int32)
    ragged = unchecked(pallas_attn.ragged_paged_attention)
    got = ragged(query, *caches, tables, lens, bounds, return_lse=True, implementation=implementation)
    expected = unchecked(pallas_attn.paged_attention)(query, *caches, tables, lens, return_lse=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_plain_implementation():
    """Those of the query, against differences."""
    case = cases.RaggedCase((20, 9), 2, 1, 8, 4, "float32", q_lens=(5, 1), padding=1, spare_seqs=0)
    data = inputs.make_ragged(case)
    data.query[6:] = 0
    query, *others = data.arguments()

    def loss(query):
        out = pallas_attn.ragged_paged_attention(query, *others, implementation="xla")
        return jnp.sum(jnp.sin(out))

    direction = jnp.asarray(np.random.default_rng(1).standard_normal(query.shape), jnp.float32)
    step = 1e-2
    by_difference = (loss(query + step * direction) - loss(query - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(query), direction), by_difference, rtol=1e-2)


@pytest.mark.once
def test_vmap():
    """Over queries: two sets of heads with the same pages."""
    data, one = inputs.make_ragged(PLAIN), RaggedAttentionConfig(RaggedTiles(32, 32, 1))
    query, *others = data.arguments()
    both = jnp.stack([query, -query])
    call = functools.partial(
        unchecked(pallas_attn.ragged_paged_attention), implementation="interpret", config=one
    )
    out = jax.jit(jax.vmap(lambda query: call(query, *others)))(both)
    for i in range(2):
        np.testing.assert_array_equal(np.float32(out[i]), np.float32(jax.jit(call)(both[i], *others)))
