"""`ragged_paged_attention` by the CUDA kernel of csrc/attention: against float64 on the GPU, and what it refuses."""

import dataclasses
import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
import test_ragged_attention as ragged
from lowering import lower_for_gpu

import pallas_attn
from pallas_attn._call import hopper_widen
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.hopper_forward import Sequences
from pallas_attn.ops.ragged_attention import arguments, cuda
from pallas_attn.testing.cases import RaggedCase

gpu = pytest.mark.gpu
# Chunks of prompts, no query, decoding, whole prompts, queries before the start.
LENS, Q_LENS = (300, 40, 1, 700, 3, 1290, 65), (17, 0, 1, 260, 7, 130, 33)
MANY = (("block_q", 32),)
CASES = [
    RaggedCase(LENS, 8, 2, 128, 16, q_lens=Q_LENS),
    RaggedCase(LENS, 8, 2, 128, 1, q_lens=Q_LENS, short=False),
    RaggedCase(LENS, 4, 4, 128, 4, "float16", "HND", q_lens=Q_LENS),
    RaggedCase(LENS, 6, 2, 120, 5, q_lens=Q_LENS, sliding_window=70, config=MANY),
    RaggedCase(LENS, 7, 1, 64, 8, q_lens=Q_LENS, softcap=9.0, sinks=True),
    RaggedCase(LENS, 8, 1, 80, 24, "float16", "HND", q_lens=Q_LENS, alibi=True, padding=300),
    RaggedCase(LENS, 16, 1, 96, 3, q_lens=Q_LENS, causal=False, sliding_window=50, sinks=True),
    RaggedCase(LENS, 3, 1, 192, 64, q_lens=Q_LENS, value_dim=128, padding=0, spare_seqs=0),
    RaggedCase(LENS, 4, 2, 192, 32, q_lens=Q_LENS, softcap=20.0, alibi=True, sinks=True, sliding_window=200),
    RaggedCase(LENS, 4, 1, 256, 16, "float16", q_lens=Q_LENS),
    RaggedCase(LENS, 4, 2, 256, 2, "bfloat16", "HND", q_lens=Q_LENS, sliding_window=90),
    RaggedCase(LENS, 4, 2, 128, 256, q_lens=Q_LENS),
    # Long contexts under few queries: their keys are split.
    RaggedCase((9000, 20, 5000), 8, 1, 128, 16, q_lens=(40, 20, 3)),
    RaggedCase((9000, 20, 5000), 4, 2, 256, 7, "float16", q_lens=(17, 20, 100), sinks=True),
    # Caches of bytes: by tensor, head and page, and with pages that are copied token by token.
    RaggedCase(LENS, 8, 2, 128, 16, q_lens=Q_LENS, cache_dtype="float8_e4m3fn"),
    RaggedCase(LENS, 8, 2, 128, 16, q_lens=Q_LENS, cache_dtype="int8", scale_per_head=True, softcap=9.0),
    RaggedCase(LENS, 4, 2, 128, 1, "float16", q_lens=Q_LENS, cache_dtype="float8_e4m3fn", scale_per_head=True),
    RaggedCase(LENS, 4, 2, 64, 5, "float16", "HND", q_lens=Q_LENS, cache_dtype="int8", scale_per_page=True),
    RaggedCase(LENS, 4, 1, 96, 16, q_lens=Q_LENS, cache_dtype="float8_e4m3fn", scale_per_page=True, causal=False),
    RaggedCase(LENS, 3, 1, 192, 32, q_lens=Q_LENS, cache_dtype="int8", value_dim=128, scale_per_head=True),
    RaggedCase(LENS, 4, 2, 192, 16, q_lens=Q_LENS, cache_dtype="float8_e4m3fn", scale_per_head=True, sinks=True),
    RaggedCase(LENS, 4, 1, 256, 16, q_lens=Q_LENS, cache_dtype="int8", scale_per_head=True, sliding_window=90),
    RaggedCase((9000, 20, 5000), 8, 1, 128, 16, q_lens=(40, 20, 3), cache_dtype="int8", scale_per_head=True),
    # Many sequences, most of them short.
    RaggedCase((5, 130, 64, 1, 300) * 60, 4, 2, 128, 16, q_lens=(5, 130, 1, 1, 20) * 60),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(case):
    data = inputs.make_ragged(case)
    out, lse = ragged.run(case, data, "cuda")
    assert out.dtype == jnp.dtype(case.dtype)
    ragged.check(case, data, out, lse)
    again = ragged.run(case, data, "cuda")
    for first, second in zip((out, lse), again, strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


# Of 8-bit caches, sequences of 1024 rows and more: those of 260 queries, with eight heads of 130, and of 600.
MANY_LENS, MANY_Q_LENS = (300, 2100, 40, 1, 700, 3, 1290, 65), (17, 600, 0, 1, 260, 7, 130, 33)
WIDENED = [
    RaggedCase(MANY_LENS, 8, 2, 128, 16, q_lens=MANY_Q_LENS, cache_dtype="float8_e4m3fn"),
    RaggedCase(
        MANY_LENS, 8, 2, 128, 5, "float16", "HND", q_lens=MANY_Q_LENS, cache_dtype="int8", scale_per_head=True,
        sinks=True, softcap=9.0,
    ),
    RaggedCase(MANY_LENS, 16, 2, 128, 1, q_lens=MANY_Q_LENS, cache_dtype="int8", sliding_window=200),
    RaggedCase(
        MANY_LENS, 8, 1, 64, 24, q_lens=MANY_Q_LENS, cache_dtype="float8_e4m3fn", scale_per_head=True, alibi=True,
        padding=300,
    ),
    RaggedCase(
        MANY_LENS, 8, 2, 96, 16, q_lens=MANY_Q_LENS, cache_dtype="int8", scale_per_head=True, causal=False,
        sliding_window=50, sinks=True,
    ),
    RaggedCase(
        MANY_LENS, 12, 3, 192, 64, q_lens=MANY_Q_LENS, cache_dtype="int8", value_dim=128, scale_per_head=True,
    ),
    RaggedCase(
        MANY_LENS, 8, 2, 192, 8, "bfloat16", "HND", q_lens=MANY_Q_LENS, cache_dtype="float8_e4m3fn",
        scale_per_head=True, softcap=20.0, alibi=True, sinks=True,
    ),
    RaggedCase(
        MANY_LENS, 8, 2, 256, 32, "float16", q_lens=MANY_Q_LENS, cache_dtype="float8_e4m3fn", scale_per_head=True,
        sliding_window=90,
    ),
    # Keys are split; queries before the start.
    RaggedCase((9000, 20, 5000), 8, 1, 128, 16, q_lens=(130, 20, 300), cache_dtype="int8", scale_per_head=True),
    RaggedCase((100, 2000, 30), 8, 1, 128, 16, q_lens=(400, 128, 20), cache_dtype="float8_e4m3fn", sinks=True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small calls are widened."""
    monkeypatch.setattr(hopper_widen, "LEAST_PAIRS", 1)


def taken_of(case: RaggedCase) -> list[int]:
    rows = hopper_widen.LEAST_ROWS
    return [i for i, new in enumerate(case.q_lens) if new * case.group >= rows and case.seq_lens[i] > 0]


@gpu
@pytest.mark.parametrize("case", WIDENED, ids=lambda case: case.id)
def test_long_prompts_over_bytes(case):
    """Of calls of which some sequences are widened, and some are not."""
    assert 0 < len(taken_of(case)) < case.num_seqs
    test_matches_reference(case)


def widened(case: RaggedCase, data: inputs.RaggedInputs, tokens: int) -> hopper_widen.Widened:
    left = -1 if case.sliding_window is None else case.sliding_window - 1
    query, key, value, tables, lens, bounds, num_seqs = data.arguments()
    sequences = Sequences(q_bounds=bounds, block_tables=tables, seq_lens=lens, num_seqs=num_seqs[None])
    return hopper_widen.widen(
        key, value, sequences, window=jnp.asarray([left, 0], jnp.int32), dtype=query.dtype, tokens=tokens,
        query_tokens=len(query), group=case.group, heads_first=case.layout == "HND",
    )  # fmt: skip


@gpu
@pytest.mark.parametrize("case", [WIDENED[0], WIDENED[1], WIDENED[5]], ids=lambda case: case.id)
def test_rows_are_what_pages_hold(case):
    data, taken = inputs.make_ragged(case), taken_of(case)
    rows = widened(case, data, tokens=sum(case.seq_lens[seq] for seq in taken))
    assert np.flatnonzero(rows.taken).tolist() == taken
    at = 0
    for seq in taken:
        page, offset = inputs.token_places(data.block_tables[seq], case.seq_lens[seq], case.page_size)
        assert rows.k_table[0, seq].tolist() == [at, at + len(page), 1]
        for made, pool in ((rows.key, data.key_cache), (rows.value, data.value_cache)):
            stored = np.moveaxis(pool, 1, 2) if case.layout == "HND" else pool
            expected = stored[page, offset].astype(made.dtype).swapaxes(0, 1)
            np.testing.assert_array_equal(np.asarray(made)[0, :, at : at + len(page)], expected)
        at += len(page)


@gpu
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_room_for_some_of_them(taken):
    case = WIDENED[1]
    tokens = sum(case.seq_lens[seq] for seq in taken_of(case)[:taken])
    room = tokens * case.num_kv_heads * 2 * case.head_dim * hopper_widen.ELEMENT_BYTES
    data = inputs.make_ragged(case)
    if tokens:
        made = widened(case, data, tokens)
        assert np.flatnonzero(made.taken).tolist() == taken_of(case)[:taken]
    call = functools.partial(
        ragged.compiled(case, "cuda").__wrapped__,
        config=dataclasses.replace(ragged.config_of(case), widened_bytes=room),
    )
    ragged.check(case, data, *jax.jit(call)(*data.arguments(), **data.extras))


@gpu
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_a_bad_page_of_a_long_prompt_spoils_rows_that_see_it_and_no_others(cache_dtype):
    case = RaggedCase(
        (400, 400), 8, 2, 128, 16, q_lens=(400, 400), cache_dtype=cache_dtype, scale_per_head=True
    )
    assert taken_of(case) == [0, 1]
    data = inputs.make_ragged(case)
    data.block_tables[0, 12] = -5
    out, lse = ragged.run(case, data, "cuda")
    rows, first = np.float32(out), 12 * 16
    assert np.isfinite(rows[:first]).all()
    assert np.isfinite(rows[400:800]).all()
    assert np.isnan(rows[first:400]).all()
    assert np.isnan(lse[first:400]).all()
    # Lengths that cannot be right are the other call's, which says so.
    data = inputs.make_ragged(case)
    data.seq_lens[1] = 10**6
    out, lse = ragged.run(case, data, "cuda")
    assert np.isfinite(np.float32(out[:400])).all()
    assert np.isnan(np.float32(out[400:800])).all()
    assert np.isnan(lse[400:800]).all()
    assert not np.float32(out[800:]).any()


@gpu
def test_fewer_long_prompts_than_there_is_room_for():
    """One compiled function for any number of sequences."""
    case = WIDENED[0]
    data = inputs.make_ragged(case)
    for num_seqs in (8, 5, 2, 0):
        fewer = data.copy(num_seqs=np.asarray(num_seqs, np.int32))
        out, lse = ragged.run(case, fewer, "cuda")
        end = int(data.cu_q_lens[num_seqs])
        assert not np.float32(out[end:]).any()
        assert np.isneginf(lse[end:]).all()
        ragged.check(case, fewer, out, lse)


@gpu
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.control
def test_a_dropped_feature_is_caught(page_size):
    """The comparison notices what a kernel that ignores an option would make."""
    case = RaggedCase(LENS, 8, 2, 128, page_size, q_lens=Q_LENS, softcap=5.0, sinks=True, sliding_window=100)
    data = inputs.make_ragged(case)
    for change in ({"softcap": None}, {"sliding_window": None}, {"sliding_window": 101}, {"causal": False}):
        other = dataclasses.replace(case, **change)
        out, lse = ragged.run(other, data, "cuda")
        with pytest.raises(AssertionError):
            ragged.check(case, data, out, lse)


@gpu
@pytest.mark.parametrize(
    "boundary", ["first", "page end", "page start", "split end", "split start", "own", "window"]
)
def test_no_boundary_token_is_lost(boundary):
    ragged.test_no_boundary_token_is_lost(boundary, "cuda")


@gpu
@pytest.mark.parametrize(
    "test",
    [
        ragged.test_padding_is_empty_and_num_seqs_may_change,
        ragged.test_bad_pages_and_lengths_poison_only_their_sequence,
        ragged.test_lengths_that_contradict_each_other_read_nothing_outside,
        ragged.test_pages_behind_the_window_may_be_anyones,
        ragged.test_a_traced_window_is_the_static_one,
    ],
    ids=lambda test: test.__name__,
)
def test_promises(test):
    test("cuda")


@gpu
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("page_size", [16, 3])
def test_a_bad_page_spoils_rows_that_see_it_and_no_others(page_size, cache_dtype):
    """Queries in front of the page do not see it; scores are NaN for those behind it."""
    case = RaggedCase(
        (300, 300), 4, 2, 128, page_size, q_lens=(300, 300), short=False, cache_dtype=cache_dtype,
        scale_per_head=cache_dtype is not None,
    )  # fmt: skip
    data = inputs.make_ragged(case)
    data.block_tables[0, 100 // page_size] = -5
    out, lse = ragged.run(case, data, "cuda")
    first = 100 // page_size * page_size
    rows = np.float32(out)
    assert np.isfinite(rows[:first]).all()
    assert np.isfinite(rows[300:600]).all()
    assert np.isnan(rows[first:300]).all()
    assert np.isnan(lse[first:300]).all()


@gpu
def test_scan_and_vmap():
    case = CASES[0]
    data = inputs.make_ragged(case)
    query, *others = data.arguments()
    call = ragged.compiled(case, "cuda").__wrapped__
    alone, _ = jax.jit(call)(query, *others, **data.extras)
    both, _ = jax.jit(jax.vmap(lambda q: call(q, *others, **data.extras)))(jnp.stack([query, query]))
    _, (layers, _) = jax.jit(
        lambda q: jax.lax.scan(lambda c, _: (c, call(c, *others, **data.extras)), q, None, length=2)
    )(query)
    for out in (*both, *layers):
        np.testing.assert_array_equal(np.float32(out), np.float32(alone))


def lowered(monkeypatch, case: RaggedCase, **options):
    support.as_if_cuda(monkeypatch)
    data = inputs.make_ragged(case)
    return lower_for_gpu(
        lambda *operands: pallas_attn.ragged_paged_attention(*operands, layout=case.layout, **options),
        *data.arguments(),
    ).as_text()


@pytest.mark.parametrize("case", [CASES[0], CASES[15]], ids=lambda case: case.id)
def test_a_hopper_gpu_takes_it_by_itself(monkeypatch, case):
    assert "pallas_attn_attention_forward_sm90" in lowered(monkeypatch, case)


@pytest.mark.parametrize(
    ("dim", "cache_dtype", "apart"), [(128, None, False), (128, "int8", True), (192, None, True)]
)
def test_which_decoded_sequences_are_the_other_kernels(monkeypatch, dim, cache_dtype, apart):
    case = RaggedCase(LENS, 8, 2, dim, 16, q_lens=Q_LENS, cache_dtype=cache_dtype)
    text = lowered(monkeypatch, case, implementation="cuda")
    assert "pallas_attn_attention_forward_sm90" in text
    assert ("pallas_attn_ragged_attention_short" in text) == apart


WIDEN = "custom_call @pallas_attn_attention_widen_sm90"


def test_rows_take_so_much_memory(monkeypatch):
    """Of an 8-bit cache: what a call's sequences can hold, no more than the config says, and none if none is long."""
    case = WIDENED[1]
    text = lowered(monkeypatch, case, implementation="cuda", **scales(case))
    assert text.count(WIDEN) == 1
    assert text.count("custom_call @pallas_attn_attention_forward_sm90") == 2
    # 1048 queries of four heads: at most four sequences of 1024 rows.
    tokens = 4 * inputs.make_ragged(case).block_tables.shape[1] * case.page_size
    assert f"tensor<1x2x{tokens}x128xf16>" in text
    config = dataclasses.replace(ragged.config_of(case), widened_bytes=10**6)
    text = lowered(monkeypatch, case, implementation="cuda", config=config, **scales(case))
    assert f"tensor<1x2x{10**6 // (2 * 2 * 256)}x128xf16>" in text
    config = dataclasses.replace(config, widened_bytes=0)
    assert WIDEN not in lowered(monkeypatch, case, implementation="cuda", config=config, **scales(case))


@pytest.mark.parametrize(("tokens", "widened"), [(4000, False), (4096, True)])
def test_calls_that_widening_takes_longer_than_are_not(monkeypatch, tokens, widened):
    """4096 queries of 8 heads with as many keys of two: 2 x 128 x 32 pairs."""
    monkeypatch.undo()
    assert hopper_widen.LEAST_PAIRS == 8192
    room = hopper_widen.room(
        2**40, kv_heads=2, dims=256, query_tokens=tokens, group=4, num_seqs=1, max_len=tokens
    )
    assert (room > 0) == widened


def scales(case: RaggedCase) -> dict[str, np.ndarray]:
    extras = inputs.make_ragged(case).extras
    return {name: extras[name] for name in ("k_scale", "v_scale")}


@pytest.mark.parametrize(
    "case",
    [
        RaggedCase((900,), 4, 2, 128, 16, q_lens=(500,), cache_dtype="int8", padding=11, spare_seqs=0),
        RaggedCase((900,), 4, 2, 128, 16, q_lens=(600,), cache_dtype="int8", scale_per_page=True),
        RaggedCase((900,), 4, 2, 128, 16, q_lens=(600,)),
    ],
    ids=["short", "scales by page", "16 bits"],
)
def test_what_is_not_widened(monkeypatch, case):
    options = scales(case) if case.cache_dtype else {}
    text = lowered(monkeypatch, case, implementation="cuda", **options)
    assert WIDEN not in text
    assert text.count("custom_call @pallas_attn_attention_forward_sm90") == 1


@pytest.mark.parametrize(
    "case",
    [CASES[4], RaggedCase((9, 9), 8, 2, 128, 16, q_lens=(1, 1), padding=0), CASES[21]],
    ids=lambda case: case.id,
)
def test_what_pallas_is_as_fast_at_is_left_to_it(monkeypatch, case):
    assert "attention_forward_sm90" not in lowered(monkeypatch, case)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            RaggedCase(LENS, 8, 2, 128, 16, q_lens=Q_LENS, cache_dtype="float8_e5m2"),
            "a cache of one of bfloat16, float8_e4m3fn, int8, got float8_e5m2",
        ),
        (
            RaggedCase(LENS, 8, 2, 120, 16, q_lens=Q_LENS, cache_dtype="int8"),
            "a head_dim of at most 256, a multiple of 16, got 120",
        ),
        (RaggedCase(LENS, 8, 2, 128, 16, "float32", q_lens=Q_LENS), "bfloat16 or float16"),
        (RaggedCase(LENS, 8, 2, 128, 16, "bfloat16", "PACKED", q_lens=Q_LENS), "'PACKED'"),
        (RaggedCase(LENS, 8, 2, 100, 16, q_lens=Q_LENS), "multiple of 8"),
        (RaggedCase(LENS, 8, 2, 128, 16, q_lens=Q_LENS, tree="slots", max_tree=17), "tree_mask"),
        (RaggedCase((9,), 200, 1, 64, 16, q_lens=(3,)), "at most 128 query heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_what_it_does_not_serve_it_says(case, reason):
    data = inputs.make_ragged(case)
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "cu_q_lens", "num_seqs")
    given = dict(zip(names, data.arguments(), strict=True)) | data.extras
    check = ArgumentChecker("ragged_paged_attention")
    given["num_seqs"] = arguments.check_arrays(check, *(given[name] for name in names), case.layout)
    dtype = given["query"].dtype
    refusal = cuda.unsupported(arguments.made(check, **given, layout=case.layout, out_dtype=dtype))
    assert refusal is not None
    assert reason in refusal
