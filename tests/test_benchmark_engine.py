"""benchmarks/engine.py: its requests, and that its check fails where a token is wrong."""

import csv
import io
import types

import engine as bench
import pytest

pytestmark = pytest.mark.once


def test_requests_have_the_lengths_that_are_promised():
    load = bench.arriving(64, 49152, 1024, 512)
    prompts = list(map(len, load.prompts))
    assert len(prompts) == 64
    assert 16 <= min(prompts) < 100 < 900 < max(prompts) <= 1024
    assert 8 <= min(load.answers) < 30 < 400 < max(load.answers) <= 512
    assert load.tokens == sum(load.answers)
    parts = bench.in_batches(load)
    assert [len(part.prompts) for part in parts] == [16] * 4
    assert [prompt for part in parts for prompt in part.prompts] == load.prompts


@pytest.mark.parametrize(("wrong", "status"), [(None, 0), (5, 1)])
@pytest.mark.control
def test_a_wrong_token_is_an_error(monkeypatch, tmp_path, capsys, wrong, status):
    def alone(model, prompts, max_new_tokens, prefill_chunk=None, page_size=16):
        (prompt,) = prompts
        answer = [(sum(prompt) + i) % 97 for i in range(max_new_tokens)]
        return types.SimpleNamespace(row=lambda index: answer)

    def serve(engine, load):
        answers = [alone(None, [p], n).row(0) for p, n in zip(load.prompts, load.answers, strict=True)]
        if wrong is not None:
            answers[0][wrong] += 1
        return 2.0, answers

    monkeypatch.setattr(bench, "generate", alone)
    monkeypatch.setattr(bench, "serve", serve)
    monkeypatch.setattr(bench, "engine_for", lambda *_: types.SimpleNamespace(compile=lambda: None))
    out = tmp_path / "figures.csv"
    sizes = ["--tiny", "--requests", "6", "--checked", "3", "--commit", "abc"]
    assert bench.main(["--what", "check", *sizes, "--out", str(out)]) == status
    (row,) = csv.DictReader(io.StringIO(out.read_text()))
    assert row["note"].startswith(f"{3 - status} of 3 requests")
    assert (row["commit"], row["what"], row["dtype"], float(row["seconds"])) == ("abc", "check", "float32", 2)
    assert (f"parts after {wrong} of" in capsys.readouterr().out) == bool(status)
