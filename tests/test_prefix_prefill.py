"""`prefix_prefill`: new tokens beside the cache, against float64 torch; its outputs; its refusals."""

import dataclasses
import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from references.paged_attention_torch import _dequantised
from references.ragged_attention_torch import ragged_paged_attention as reference
from support import ON_GPU, unchecked

import pallas_attn
from pallas_attn import RaggedAttentionConfig, RaggedTiles
from pallas_attn.testing import cases, compare

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]
CUT = RaggedAttentionConfig(
    *(RaggedTiles(rows, 32, 3, min_split_tokens=16, target_programs=64) for rows in (32, 16))
)
UNCUT = RaggedAttentionConfig(RaggedTiles(32, 32, 1), RaggedTiles(16, 32, 1))
WHOLE = RaggedAttentionConfig(RaggedTiles(32, 16, 1))
# A chunk behind a long context, no query, decoding without context, a prompt, decoding, a chunk.
SIZES = {"q_lens": (17, 0, 1, 70, 1, 33), "seq_lens": (300, 40, 1, 70, 129, 65)}


def make_case(
    num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", layout="NHD", **options
):
    return cases.RaggedCase(
        SIZES["seq_lens"], num_heads, num_kv_heads, head_dim, page_size, dtype, layout, q_lens=SIZES["q_lens"],
        **options,
    )  # fmt: skip


MARKS = pytest.mark.once
CASES = [
    (make_case(), CUT),
    (make_case(head_dim=80, dtype="float16", layout="HND", sliding_window=40), WHOLE),
    (make_case(head_dim=32, page_size=24, dtype="float32", causal=False, softcap=3.0, value_dim=64), WHOLE),
    (make_case(num_heads=6, layout="PACKED", cache_dtype="float8_e4m3fn", scale_per_head=True), WHOLE),
    (
        make_case(
            dtype="float32", cache_dtype="int8", sliding_window=90, alibi=True, sinks=True, softcap=20.0
        ),
        CUT,
    ),
    (make_case(cache_dtype="float8_e4m3fn", scale_per_page=True), UNCUT),
    (
        make_case(head_dim=32, dtype="float32", tree="positions", max_tree=33, alibi=True, sliding_window=30),
        WHOLE,
    ),
]


def make_apart(
    case: cases.RaggedCase,
) -> tuple[inputs.RaggedInputs, np.ndarray, np.ndarray, inputs.RaggedInputs]:
    """(data, key, value, data for the reference, whose cache holds the new tokens too): where they would be in the
    cache is NaN, and so are the padding's keys and values."""
    data = inputs.make_ragged(case)
    for name in ("k_scale", "v_scale"):
        if name in data.extras:  # so that what was stored is exact in the query's dtype
            data.extras[name] = np.exp2(np.round(np.log2(data.extras[name])))
    whole = data.copy()
    new = []
    for which, pool in (("key", data.key_cache), ("value", data.value_cache)):
        tokens = _dequantised(pool, case, which, data.extras.get(f"{which[0]}_scale")).numpy()
        made = np.full((case.num_tokens, *tokens.shape[2:]), np.nan)
        for seq, length in enumerate(case.seq_lens):
            first, end = data.cu_q_lens[seq : seq + 2]
            page, offset = inputs.token_places(data.block_tables[seq], length, case.page_size)
            mine = slice(length - (end - first), length)
            made[first:end] = tokens[page[mine], offset[mine]]
            raw = pool.view(np.uint8).reshape(*pool.shape, pool.dtype.itemsize)
            nothing = (
                np.uint8(0x7F) if case.cache_dtype else np.array(np.nan, pool.dtype)[None].view(np.uint8)
            )
            for p, o in zip(page[mine], offset[mine], strict=True):
                raw[
                    {"NHD": (p, o), "HND": (p, slice(None), o)}.get(
                        case.layout, (p, slice(None), slice(None), o)
                    )
                ] = nothing
        new.append(made.astype(jnp.dtype(case.dtype)))
    return data, *new, whole


@functools.cache
def compiled(case: cases.RaggedCase, implementation: str, config, **static):
    call = functools.partial(
        pallas_attn.prefix_prefill,
        return_lse=True,
        layout=case.layout,
        softcap=case.softcap,
        causal=case.causal,
        sliding_window=case.sliding_window,
        implementation=implementation,
        config=None if implementation == "xla" else config,
    )
    return jax.jit(functools.partial(call, **static))


def run(
    case: cases.RaggedCase,
    data: inputs.RaggedInputs,
    key,
    value,
    implementation: str,
    config=WHOLE,
    **options,
):
    static = {name: options.pop(name) for name in ("skip_decode", "out_dtype") if name in options}
    query, *others = data.arguments()
    call = compiled(case, implementation, config, **static)
    return call(query, jnp.asarray(key), jnp.asarray(value), *others, **data.extras, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("case", "config"),
    # The newest jax has the last, with the most features.
    [*(pytest.param(*both, marks=MARKS) for both in CASES[:-1]), CASES[-1]],
    ids=lambda value: getattr(value, "id", ""),
)
def test_matches_reference(case, config, implementation):
    data, key, value, whole = make_apart(case)
    out, lse = run(case, data, key, value, implementation, config)
    expected, expected_lse = reference(case, whole)
    rounded, _ = reference(case, whole, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id, rounded_reference=rounded)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoded_sequences_are_left_to_others(implementation):
    case, config = CASES[0][0], UNCUT
    data, key, value, whole = make_apart(case)
    kept = jnp.full((case.num_tokens, case.num_heads, case.head_dim), 7, jnp.bfloat16)
    expected, _ = reference(case, whole)
    decoded = np.repeat(np.array(case.q_lens) == 1, case.q_lens)
    decoded = np.concatenate([decoded, np.zeros(case.padding, bool)])
    for out, value_kept in ((kept, 7), (None, 0)):
        options = {} if out is None else {"out": out}
        got, lse = run(case, data, key, value, implementation, config, skip_decode=True, **options)
        np.testing.assert_array_equal(np.float32(got[decoded]), value_kept)
        assert np.isneginf(lse[decoded]).all()
        compare.assert_rows_close(got[~decoded], expected[~decoded], dtype="bfloat16", case_id=case.id)
    # Without skip_decode nothing of it is left.
    got, _ = run(case, data, key, value, implementation, config, out=kept)
    compare.assert_rows_close(got, expected, dtype="bfloat16", case_id=case.id)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "config"), [("float8_e4m3fn", CUT), ("float8_e5m2", UNCUT)])
def test_fp8_output(dtype, config, implementation):
    """Rounded once, from float32, and saturating; where splits are merged, too."""
    case = dataclasses.replace(CASES[0][0], dtype="float32")
    data, key, value, whole = make_apart(case)
    expected, _ = reference(case, whole)
    largest = float(jnp.finfo(dtype).max)
    scale = np.abs(expected).max() / largest * 2  # half the range; then twice what it holds
    for out_scale in (scale, scale / 4):
        out, _ = run(
            case, data, key, value, implementation, config, out_dtype=dtype, out_scale=jnp.float32(out_scale)
        )
        assert out.dtype == jnp.dtype(dtype)
        stored = np.clip(expected / out_scale, -largest, largest)
        nearest = np.float32(jnp.asarray(stored, jnp.float32).astype(dtype))
        # A value between two representable ones may go either way for an error in the last bit.
        off = np.float32(out) != nearest
        assert off.mean() < 1e-3
        np.testing.assert_allclose(np.float32(out), stored, rtol=0.13, atol=largest / 100)
        assert np.isfinite(np.float32(out)).all()
    assert (np.abs(np.float32(out)) == largest).any(), "nothing saturated"


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_that_cannot_be_right_are_nan(implementation):
    case, config = CASES[0]
    data, key, value, _ = make_apart(case)
    data.seq_lens[0] = 16  # less than its new tokens
    data.seq_lens[3] = 2**31 - 1
    data.block_tables[5, 0] = -1
    out, lse = run(case, data, key, value, implementation, config)
    for seq in range(case.num_seqs):
        mine = slice(data.cu_q_lens[seq], data.cu_q_lens[seq + 1])
        assert np.isnan(np.float32(out[mine])).all() == (seq in (0, 3, 5) or case.q_lens[seq] == 0)
        assert np.isnan(lse[mine]).any() == (seq in (0, 3, 5))


def arguments(**changes):
    f32, i32 = jnp.float32, jnp.int32
    new, pool = jnp.zeros((6, 2, 64), f32), jnp.zeros((10, 16, 2, 64), f32)
    given = {
        "query": jnp.zeros((6, 4, 64), f32), "key": new, "value": new, "key_cache": pool, "value_cache": pool,
        "block_tables": jnp.zeros((2, 3), i32), "seq_lens": jnp.zeros(2, i32), "cu_q_lens": jnp.zeros(3, i32),
    }  # fmt: skip
    return given | changes


BAD = {
    "key dtype": (
        {"key": jnp.zeros((6, 2, 64), jnp.bfloat16)}, TypeError, "'key': expected dtype float32, got bfloat16"
    ),
    "value shape": (
        {"value": jnp.zeros((6, 2, 32))}, ValueError,
        r"'value': expected shape \[total_tokens=6 \(as query\), num_kv_heads=2 \(as key_cache\), "
        r"value_dim=64 \(as value_cache\)\], got \[6, 2, 32\]",
    ),
    "skip_decode": ({"skip_decode": 1}, TypeError, "'skip_decode': expected True or False, got 1 of type int"),
    "out dtype": (
        {"out": jnp.zeros((6, 4, 64), jnp.float16)}, TypeError,
        "'out': expected dtype float32 or float8_e4m3fn or float8_e5m2, got float16",
    ),
    "out is not out_dtype": (
        {"out": jnp.zeros((6, 4, 64)), "out_dtype": jnp.float8_e5m2}, TypeError,
        "'out': expected dtype float8_e5m2, got float32",
    ),
    "out shape": ({"out": jnp.zeros((6, 4, 32))}, ValueError, r"'out': expected shape \[total_tokens=6 \(as query\)"),
    "out_dtype": ({"out_dtype": "int8"}, ValueError, "'out_dtype': expected one of float32, float8_e4m3fn"),
    "scale of no fp8": ({"out_scale": 1.0}, ValueError, "'out_scale': expected None for an output of float32"),
    "scale 0": (
        {"out_scale": 0.0, "out_dtype": "float8_e5m2"}, ValueError, "'out_scale': expected a finite number above 0"
    ),
    "scale shape": (
        {"out_scale": jnp.ones(2), "out_dtype": "float8_e5m2"}, ValueError, r"'out_scale': expected shape \[\], got"
    ),
    "scale type": (
        {"out_scale": "1", "out_dtype": "float8_e5m2"}, TypeError, "'out_scale': expected a number, a float32 scalar"
    ),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=f"^prefix_prefill: argument {message}"):
        unchecked(pallas_attn.prefix_prefill)(**arguments(**changes))
