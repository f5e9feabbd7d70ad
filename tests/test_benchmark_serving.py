"""benchmarks/serving.py: what its clients measure, and that its soak notices a wrong answer and a lost page."""

import argparse
import csv
import http.client

import pytest
import serving as bench
from serve_support import running, scripted

pytestmark = pytest.mark.once

OPTIONS = argparse.Namespace(max_prompt=100, max_answer=50, out=None, commit="abc", size="tiny", dtype="float32",
                             clients=4, processes=1, duration=0.1, seed=0,
                             batch_invariant=False)  # fmt: skip


def test_turns_have_equal_lengths_and_other_tokens():
    one, other = (bench.drawn(50, 97, OPTIONS, seed) for seed in (1, 2))
    assert [(len(ask.prompt), ask.tokens) for ask in one] == [(len(ask.prompt), ask.tokens) for ask in other]
    assert [ask.prompt for ask in one] != [ask.prompt for ask in other]
    assert max(ask.tokens for ask in one) <= 50
    assert 16 <= min(len(ask.prompt) for ask in one) <= max(len(ask.prompt) for ask in one) <= 100


def test_a_visit():
    with running(served_=scripted("0123456789", seconds=0.02, ends=False)) as server:
        connection = http.client.HTTPConnection(*server.address)
        whole = bench.visit(bench.Ask([9], 10), connection)
        streamed = bench.visit(bench.Ask([9], 10, stream=True), connection)
        gone = bench.visit(bench.Ask([9], 10, leaves=0.001), connection)
        connection.close()
        assert (whole.text, streamed.text, gone.text) == ("0123456789", "0123456789", None)
        assert whole.first is None
        assert streamed.first > 0.015


@pytest.mark.parametrize(("text", "free", "right"), [("x", 7, True), ("y", 7, False), ("x", 6, False)])
@pytest.mark.control
def test_a_soak_notices(monkeypatch, tmp_path, capsys, text, free, right):
    stats = dict(
        running=0, waiting=0, pages=9, free_pages=free, cached_pages=2, finished={}, device_bytes=0, rss=0
    )

    class Process:
        about = {"vocab_size": 97, "device": "cpu", "jax": "0"}  # noqa: RUF012

        def ask(self, name, *arguments):
            return stats if name == "stats" else {"texts": ["x"] * bench.CHECKED}

    def load(server, asks, *_):
        return 1.0, [bench.Told(ask, None if ask.leaves else text, None) for ask in asks[:20]]

    monkeypatch.setattr(bench, "load", load)
    options = argparse.Namespace(**{**vars(OPTIONS), "out": tmp_path / "out.csv"})
    report = bench.Report(options, Process.about)
    assert bench.soak(Process(), options, report) == right
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert (row["what"], row["size"], row["commit"], row["requests"]) == ("soak", "tiny", "abc", "20")
    assert ("0 wrong" in row["note"]) == (text == "x")
