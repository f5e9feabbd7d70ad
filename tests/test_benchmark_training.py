"""benchmarks/training.py: what it packs, that it learns, and when it says that implementations differ."""

import numpy as np
import pytest
import training

pytestmark = pytest.mark.once


def test_documents_are_packed_whole_and_in_order():
    batch = training.packed(4, training.TINY, 0)
    tokens, document, position = (part.reshape(-1) for part in batch)
    assert tokens.shape == (4 * 2 * 64,)
    first = np.flatnonzero(np.diff(document, prepend=-1))
    np.testing.assert_array_equal(position[first], 0)
    same = np.diff(document) == 0
    np.testing.assert_array_equal(np.diff(position)[same], 1)
    texts = {text.encode() for text in training.topics.values()}
    start = tokens[document == document[0]].tobytes()
    assert any(text.startswith(start) for text in texts)


def test_a_tiny_model_learns(tmp_path, capsys):
    out = tmp_path / "t.csv"
    assert (
        training.main(
            ["--tiny", "--steps", "40", "--implementations", "xla", "--seeds", "0", "--out", str(out)]
        )
        == 1
    )
    assert "nothing to compare" in capsys.readouterr().out
    losses = [float(line.rpartition(",")[2]) for line in out.read_text().splitlines()[1:]]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < losses[0] - 0.3
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_counts_as_agreement():
    flat = {(name, seed): np.full(30, 2.0 + 0.1 * seed) for name in ("xla", "pallas") for seed in (0, 1)}
    assert training.compared(flat) == (0.0, pytest.approx(0.1))
    flat["pallas", 1] = flat["pallas", 1] + 0.5
    between, noise = training.compared(flat)
    assert between == pytest.approx(0.5)
    assert noise == pytest.approx(0.1), "the noise is the first implementation's"
