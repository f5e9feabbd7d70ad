"""The comparison must be able to fail: what a ragged kernel would give that ignored a feature, or lost something."""

import dataclasses

import inputs
import numpy as np
import pytest
from references.ragged_attention_torch import ragged_paged_attention as reference

from pallas_attn.testing import cases, compare

pytestmark = [pytest.mark.once, pytest.mark.control]
SIZES = {"q_lens": (17, 1, 40), "seq_lens": (300, 129, 65)}
BASE = cases.RaggedCase(SIZES["seq_lens"], 4, 2, 64, 16, q_lens=SIZES["q_lens"])
IGNORED = {
    "window": {"sliding_window": 40},
    "soft cap": {"softcap": 2.0},
    "non-causal": {"causal": False},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "tree": {"tree": "slots", "max_tree": 17},
    "positions in a tree": {"tree": "positions", "max_tree": 17, "sliding_window": 30},
}


def assert_caught(out: np.ndarray, case: cases.RaggedCase, data: inputs.RaggedInputs) -> None:
    expected, _ = reference(case, data)
    compare.assert_rows_close(expected, expected, dtype=case.dtype, case_id=case.id)
    with pytest.raises(AssertionError):
        compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)


@pytest.mark.parametrize("feature", IGNORED)
def test_an_ignored_feature_is_caught(feature):
    case = dataclasses.replace(BASE, **IGNORED[feature])
    data = inputs.make_ragged(case)
    for pool in (data.key_cache, data.value_cache):
        pool[np.isnan(pool)] = 0  # it is not the poison that tells
        pool[pool == 1e4] = 0
    if feature == "positions in a tree":
        without = {"tree_mask": data.extras["tree_mask"]}
        slots = dataclasses.replace(case, tree="slots")
        assert_caught(reference(slots, dataclasses.replace(data, extras=without))[0], case, data)
    else:
        assert_caught(reference(BASE, dataclasses.replace(data, extras={}))[0], case, data)


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_an_ignored_scale_is_caught(scale):
    case = dataclasses.replace(BASE, cache_dtype="int8", scale_per_head=True)
    data = inputs.make_ragged(case)
    others = dict(data.extras, **{scale: data.extras[scale][::-1].copy()})
    assert_caught(reference(case, dataclasses.replace(data, extras=others))[0], case, data)


def test_what_is_lost_is_caught():
    data = inputs.make_ragged(BASE)
    inputs.plant_ragged_needles(BASE, data, {0: 250, 1: 128, 2: 64})
    expected, _ = reference(BASE, data)
    assert_caught(np.zeros_like(expected), BASE, data)
    for seq, (first, end) in enumerate(
        zip(data.cu_q_lens, data.cu_q_lens[1 : BASE.num_seqs + 1], strict=False)
    ):
        lost = expected.copy()
        lost[end - 1] = 0  # one row
        assert_caught(lost, BASE, data)
        other = expected.copy()
        other[first:end] = np.roll(expected[first:end], 1, axis=1)  # another head's
        assert_caught(other, BASE, data)
        # The token with the most weight, in the middle, the newest of all, and the last row's own.
        shorter = data.copy()
        page, offset = inputs.token_places(data.block_tables[seq], BASE.seq_lens[seq], BASE.page_size)
        at = (250, 128, 64)[seq]
        shorter.key_cache[page[at], offset[at]] = -data.key_cache[page[at], offset[at]]
        assert_caught(reference(BASE, shorter)[0], BASE, data)


def test_padding_that_is_not_empty_is_caught():
    data = inputs.make_ragged(BASE)
    expected, _ = reference(BASE, data)
    wrong = expected.copy()
    wrong[-1] = np.nan
    assert_caught(wrong, BASE, data)
