"""benchmarks/prompts.py: the calls that its seeds draw, and that what is timed is checked. Nothing is measured."""

import dataclasses
import math

import jax
import prompts
import pytest

SHORT = dataclasses.replace(prompts.made("short", (40, 0), (9, 30), (4, 2), 16), head_dim=64)
CELLS = {
    "pages": lambda: prompts.OverPages(SHORT),
    "e4m3": lambda: prompts.OverBytes(SHORT, "e4m3"),
    "int8": lambda: prompts.OverBytes(SHORT, "int8"),
    "documents": prompts.Documents,
}


@pytest.mark.once
def test_drawn_calls_fit_and_are_the_same_each_time():
    cases = [prompts.drawn(seed) for seed in range(10)]
    assert cases == [prompts.drawn(seed) for seed in range(10)]
    assert len({case.num_heads for case in cases}) > 1
    for case in cases:
        assert 1 <= case.num_seqs <= 64
        assert sum(case.q_lens) <= prompts.MOST_QUERIES
        assert sum(case.seq_lens) <= prompts.MOST_KEYS
        assert all(0 < new <= length for new, length in zip(case.q_lens, case.seq_lens, strict=True))


@pytest.mark.parametrize("name", CELLS)
def test_what_is_timed_is_checked(name, monkeypatch):
    """The program's output is right; rows of others are wrong, and one that is NaN shows."""
    monkeypatch.setattr(prompts, "DOCUMENTS", 3)
    monkeypatch.setattr(prompts, "DOCUMENT_TOKENS", 96)
    cell = CELLS[name]()
    program, arrays = cell.lowered(), cell.arrays()
    first, last = program.lowered.compile()(*arrays)
    assert program.calls == prompts.CALLS + prompts.timing.CHECKED_CALLS
    assert max(cell.error(first, *arrays), cell.error(last, *arrays)) < 0.01
    flipped = jax.numpy.flip(first, 1 if name == "documents" else 0)
    assert cell.error(flipped, *arrays) > 0.1
    assert math.isnan(cell.error(first.at[(0,) * first.ndim].set(jax.numpy.nan), *arrays))
