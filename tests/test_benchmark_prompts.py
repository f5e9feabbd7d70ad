"""benchmarks/prompts.py: the calls that its seeds draw. Nothing is measured."""

import prompts
import pytest

pytestmark = pytest.mark.once


def test_drawn_calls_fit_and_are_the_same_each_time():
    cases = [prompts.drawn(seed) for seed in range(10)]
    assert cases == [prompts.drawn(seed) for seed in range(10)]
    assert len({case.num_heads for case in cases}) > 1
    for case in cases:
        assert 1 <= case.num_seqs <= 64
        assert sum(case.q_lens) <= prompts.MOST_QUERIES
        assert sum(case.seq_lens) <= prompts.MOST_KEYS
        assert all(0 < new <= length for new, length in zip(case.q_lens, case.seq_lens, strict=True))
