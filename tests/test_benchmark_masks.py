"""benchmarks/masks.py: who is timed, and which functions."""

import functools

import masks
import numpy as np
import pytest

pytestmark = pytest.mark.once
WAYS = "ours", "built-in"


def test_wrong_results_are_not_timed(capsys):
    def contender(value):
        return masks.Contender(lambda: value, lambda result: None, lambda result: [np.full(3, result)])

    results = {"first": 1.0, "near": 1.001, "far": 1.1, "nowhere": float("nan")}
    times = masks.race({name: contender(value) for name, value in results.items()}, calls=2)
    assert list(times) == ["first", "near"]
    assert {len(each) for each in times.values()} == {masks.ROUNDS}
    assert "far: WRONG" in capsys.readouterr().out


def test_each_function_is_what_its_name_says():
    found = {}
    for case in masks.cases(2048, (2048,), 4, 16):
        mask, score = case.functions((case.documents, case.slopes))
        at = np.arange(2048)
        found[case.name] = np.broadcast_to(mask(0, 0, at[:, None], at[None]), (2048, 2048)).sum(axis=1)
        assert (score is None) == (case.name != "ALiBi")
    np.testing.assert_array_equal(found["causal"], at + 1)
    np.testing.assert_array_equal(found["ALiBi"], at + 1)
    np.testing.assert_array_equal(found["window"], np.minimum(at + 1, 1024))
    np.testing.assert_array_equal(found["documents"], np.bincount(case.documents)[case.documents])


def test_ways_that_serve_have_a_column_each():
    assert masks.ways_of(True, list(masks.WAYS)) == ["ours", "pallas", "cuda", "tiled", "built-in"]
    assert masks.ways_of(False, list(masks.WAYS)) == ["ours", "pallas", "built-in"]


def test_built_in_options_say_what_functions_say():
    times = {}
    for case in masks.cases(256, (128,), 2, 16):
        made = [masks.ours(case, masks.blocks_of(case), masks.drawn(case), way, True, True) for way in WAYS]
        calls = {
            way: masks.Contender(functools.partial(one[0].compile(), *one[1]), lambda x: x, masks.as_numpy)
            for way, one in zip(WAYS, made, strict=True)
            if one
        }
        times[case.name] = list(masks.race(calls, calls=1))
    with_built_in = dict.fromkeys(("causal", "documents", "window"), 2)
    assert {name: len(each) for name, each in times.items()} == {**with_built_in, "ALiBi": 1}


def test_block_masks_have_room_for_all_that_is_seen_in_part():
    _, documents, *_ = masks.cases(1024, (1024,), 4, 16)
    blocks = masks.blocks_of(documents)
    assert len(blocks.bits.words) == (blocks.kinds() == 1).sum() > 0
