"""The comparison must be able to fail: every plausible fault of a kernel is caught."""

import dataclasses

import inputs
import numpy as np
import pytest
from references.mla_decode_torch import mla_decode as mla_reference
from references.paged_attention_torch import paged_attention as reference

from pallas_attn import LocalStride
from pallas_attn.testing import cases, compare

pytestmark = pytest.mark.control
CASE = cases.DecodeCase((4096, 2048, 300), 4, 2, 64, 16)
NEEDLES = {0: 4095, 1: 1024, 2: 15}


@pytest.fixture(scope="module")
def data() -> inputs.PagedInputs:
    made = inputs.make(CASE)
    inputs.plant_needles(CASE, made, NEEDLES)
    return made


def dropped(data: inputs.PagedInputs, tokens: dict[int, slice]) -> np.ndarray:
    """What a kernel would give that lost some tokens of each sequence: their keys score nothing."""
    outs = []
    for seq, length in enumerate(CASE.seq_lens):
        page, offset = inputs.token_places(data.block_tables[seq], length, CASE.page_size)
        keep = np.ones(length, bool)
        keep[tokens.get(seq, slice(0, 0))] = False
        k, v = data.key_cache[page, offset][keep], data.value_cache[page, offset][keep]
        outs.append(_attend(data.query[seq], k, v))
    return np.stack(outs)


def _attend(query: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    k, v = (np.repeat(x.astype(np.float64), CASE.group, axis=1) for x in (k, v))
    logits = np.einsum("hd,khd->hk", query.astype(np.float64), k) * CASE.head_dim**-0.5
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def assert_caught(out: np.ndarray, data: inputs.PagedInputs) -> None:
    expected, _ = reference(CASE, data)
    with pytest.raises(AssertionError):
        compare.assert_rows_close(
            out, expected, dtype=CASE.dtype, case_id=CASE.id, lengths=CASE.seq_lens, page_size=16
        )


def test_the_right_answer_passes(data):
    expected, _ = reference(CASE, data)
    np.testing.assert_allclose(dropped(data, {}), expected, atol=1e-12)
    compare.assert_rows_close(dropped(data, {}), expected, dtype=CASE.dtype, case_id=CASE.id)


@pytest.mark.parametrize(
    "tokens",
    [{seq: slice(at, at + 1)} for seq, at in NEEDLES.items()],
    ids=["last token", "first token of a split", "last token of a page"],
)
def test_one_lost_boundary_token(data, tokens):
    assert_caught(dropped(data, tokens), data)


def test_one_lost_page_of_a_long_sequence():
    """Without needles: the faintest fault that random data alone must show."""
    plain = inputs.make(CASE)
    assert_caught(dropped(plain, {0: slice(32, 48)}), plain)


def test_a_lost_split(data):
    assert_caught(dropped(data, {1: slice(0, 1024)}), data)


def test_zeros(data):
    assert_caught(np.zeros(data.query.shape), data)


def test_keys_taken_for_values(data):
    swapped = inputs.PagedInputs(**{**vars(data), "value_cache": data.key_cache})
    assert_caught(reference(CASE, swapped)[0], data)


def test_scale_ignored(data):
    assert_caught(reference(CASE, data, scale=1.0)[0], data)


def test_wrong_kv_head_for_a_group(data):
    expected, _ = reference(CASE, data)
    assert_caught(expected[:, [0, 2, 1, 3]], data)


FEATURES = {
    "window": {"sliding_window": 100},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "block-sparse": {"block_sparse": LocalStride(64, 2, 4)},
    "head sliding step": {"block_sparse": LocalStride(64, 2, 4, 1)},
    "tensor-parallel rank": {"block_sparse": LocalStride(64, 2, 3, 1, tp_rank=1)},
    "several queries": {"q_len": 3},
    "tree_mask": {"q_len": 5, "tree": "slots", "seq_lens": (40, 23)},
    "query_positions": {"q_len": 5, "tree": "positions", "alibi": True, "seq_lens": (40, 23)},
    "layout": {"layout": "HND", "num_heads": 16, "num_kv_heads": 16},
    "k_scale and v_scale": {"cache_dtype": "float8_e4m3fn"},
    "scales of each head": {"cache_dtype": "int8", "scale_per_head": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_ignored(feature):
    """What a kernel would give that accepts an option and does nothing with it."""
    case = dataclasses.replace(CASE, **{"seq_lens": (700, 300), **FEATURES[feature]})
    data = inputs.make(case)
    ignorant, seen = _without(case, data, feature)
    expected, _ = reference(case, data)
    wrong, _ = reference(ignorant, seen)
    with pytest.raises(AssertionError):
        compare.assert_rows_close(wrong, expected, dtype="bfloat16", case_id=case.id)


def _without(case: cases.DecodeCase, data: inputs.PagedInputs, feature: str):
    """The case and data as something that ignores the feature takes them."""
    seen = data.copy()
    match feature:
        case "sinks" | "alibi":
            seen.extras.clear()
        case "tree_mask" | "query_positions":
            del seen.extras[feature]
        case "k_scale and v_scale":
            seen.extras["v_scale"] = np.float32(1)
        case "scales of each head":
            seen.extras["v_scale"] = np.full_like(seen.extras["v_scale"], seen.extras["v_scale"].mean())
        case "layout":
            return dataclasses.replace(case, layout="NHD"), seen
        case "head sliding step":
            return dataclasses.replace(case, block_sparse=LocalStride(64, 2, 4)), seen
        case "tensor-parallel rank":
            return dataclasses.replace(case, block_sparse=LocalStride(64, 2, 3, 1)), seen
        case "several queries":  # every query at the newest position
            seen.query = np.ascontiguousarray(seen.query[:, ::-1])
        case _:
            return dataclasses.replace(case, sliding_window=None, softcap=None, block_sparse=None), seen
    return case, seen


def test_nan_leaking_from_a_tail(data):
    expected, _ = reference(CASE, data)
    leaked = expected.copy()
    leaked[1, 2, 3] = np.nan
    with pytest.raises(AssertionError, match=r"NaN unexpected at \(1, 2, 3\) \(sequence 1, length 2048"):
        compare.assert_rows_close(
            leaked, expected, dtype="bfloat16", case_id="leak", lengths=CASE.seq_lens, page_size=16
        )


def test_a_row_that_should_be_nan(data):
    expected, _ = reference(CASE, data)
    marked = expected.copy()
    marked[0] = np.nan
    with pytest.raises(AssertionError, match="NaN missing"):
        compare.assert_rows_close(expected, marked, dtype="bfloat16", case_id="missing")


def test_base_2_lse_for_natural(data):
    _, lse = reference(CASE, data)
    with pytest.raises(AssertionError, match="lse is off"):
        compare.assert_lse_close(lse / np.log(2), lse, dtype="bfloat16", case_id="base")


def test_lse_of_an_empty_row_with_the_wrong_sign():
    with pytest.raises(AssertionError, match="Inf in the wrong places"):
        compare.assert_lse_close(np.array([np.inf]), np.array([-np.inf]), dtype="bfloat16", case_id="sign")


def test_budget_follows_the_rounded_reference(data):
    """An error under the cap fails all the same when the dtype could do much better."""
    expected, _ = reference(CASE, data)
    out = expected * (1 + 7e-3)
    compare.assert_rows_close(out, expected, dtype="bfloat16", case_id="cap")
    with pytest.raises(AssertionError, match="exceeds"):
        compare.assert_rows_close(
            out, expected, dtype="bfloat16", case_id="budget", rounded_reference=expected
        )


LATENT_CASE = cases.MLADecodeCase((700, 130, 64, 513), 4, q_len=2, causal=True, page_size=16)


def latent_data() -> inputs.LatentInputs:
    made = inputs.make(LATENT_CASE)
    # The last two tokens are what causality and the last token's presence are about: both carry weight.
    inputs.plant_needles(LATENT_CASE, made, {seq: n - 1 for seq, n in enumerate(LATENT_CASE.seq_lens)})
    return made


def wrong_latent_outputs(data: inputs.LatentInputs) -> dict[str, np.ndarray]:
    """What kernels would give that have one fault each."""

    def attend(causal=True, scale=None, **changes):
        return mla_reference(data.copy(**changes), causal=causal, scale=scale)[0]

    def moved(array: np.ndarray, places, other) -> np.ndarray:
        array = array.copy()
        array[places] = other
        return array

    lens, tables, cache, query = data.seq_lens, data.block_tables, data.latent_cache, data.query
    other_page = moved(tables, np.s_[:, 1], tables[::-1, 1])
    shorter = np.maximum(lens - 16, 1)
    # Without one page, or one token: what is behind moves up.
    one_less = np.concatenate([tables[:, :2], tables[:, 3:], tables[:, :1]], axis=1)
    dropped = cache.copy()
    page, offset = inputs.token_places(tables[0], 700, 16)
    needle = page[-1], offset[-1]
    dropped[needle] = 0
    values = moved(cache, np.s_[..., :512], cache[..., 64:])
    out = attend()
    return {
        "zeros": np.zeros_like(out),
        "causality ignored": attend(causal=False),
        "last token dropped": attend(seq_lens=np.maximum(lens - 1, 1)),
        "key of a token lost": attend(latent_cache=dropped),
        "second split lost": attend(seq_lens=(lens + 1) // 2),
        "a page dropped": attend(block_tables=one_less, seq_lens=shorter),
        "another sequence's page": attend(block_tables=other_page),
        "values taken from the rotary end": attend(latent_cache=values),
        "rotary part ignored": attend(query=moved(query, np.s_[..., 512:], 0)),
        "scaled by 512": attend(scale=512**-0.5),
        "heads swapped": out[:, :, ::-1],
    }


def test_faults_of_an_mla_kernel_are_caught():
    data = latent_data()
    expected, _ = mla_reference(data, causal=True)
    about = dict(dtype="bfloat16", case_id=LATENT_CASE.id, lengths=LATENT_CASE.seq_lens)
    compare.assert_rows_close(expected, expected, **about)
    passed = []
    for fault, out in wrong_latent_outputs(data).items():
        try:
            compare.assert_rows_close(out, expected, **about)
        except AssertionError:
            continue
        passed.append(fault)
    assert passed == []
