"""`pallas-attn show-mask`: pictures of masks."""

import sys

import pytest

from pallas_attn.cli import main

NEAR = """
def near(batch, head, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < 64 * (head + 1))
"""


def test_draws_a_mask(capsys):
    assert main(["show-mask", "causal", "--q-len", "256", "--block-q", "64", "--block-kv", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all heads: 62% of blocks visited, 38% without a mask"
    assert lines[1:5] == ["▒···", "█▒··", "██▒·", "███▒"]


def test_draws_a_mask_of_the_users_by_head(capsys, tmp_path, monkeypatch):
    (tmp_path / "masks_to_show.py").write_text(NEAR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "masks_to_show", raising=False)
    options = ["--q-len", "256", "--block-q", "64", "--block-kv", "64", "--num-heads", "2"]
    assert main(["show-mask", "masks_to_show:near", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == ["▒···", "▒▒··", "·▒▒·", "··▒▒"]
    assert lines[6:10] == ["▒···", "█▒··", "▒█▒·", "·▒█▒"]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("round", "expected module:name or one of causal, sliding_window"),
        ("sliding_window", "expected sliding_window of left, right, got missing a required argument: 'left'"),
        ("causal:offset=far", "expected causal:name=number, got 'offset=far'"),
        ("no_such_module:mask", "No module named 'no_such_module'"),
        ("math:sin", "argument 'mask_mod': expected a function of"),
    ],
)
def test_says_in_one_line_what_is_wrong(mask, words, capsys):
    assert main(["show-mask", mask]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
