"""benchmarks/mla_prefill.py: its table, its picture, and that forms which differ get no figure."""

import mla_prefill as benchmark
import pytest

pytestmark = pytest.mark.once


@pytest.mark.slow
def test_a_table_and_its_picture(tmp_path, capsys):
    table = tmp_path / "forms.csv"
    benchmark.main(["--tiny", "--out", str(table)])
    rows = benchmark.load(table)
    assert [(row["new_tokens"], row["form"]) for row in rows] == [
        (new, form) for new in ("1", "8") for form in benchmark.FORMS
    ]
    assert all(float(row["us"]) > 0 and float(row["apart"]) < benchmark.APART for row in rows)
    assert "8 new on    128: absorbed" in capsys.readouterr().out
    picture = table.with_suffix(".svg")
    picture.unlink()
    benchmark.main(["--draw", str(table)])
    assert picture.read_text().count("<svg") == 1


def test_forms_that_differ_get_no_figure(monkeypatch):
    right = benchmark.mla_prefill
    monkeypatch.setattr(
        benchmark,
        "mla_prefill",
        lambda *arrays, form, **ups: right(*arrays, form=form, **ups) * (1 + 0.1 * (form == "absorbed")),
    )
    rows = benchmark.measured(benchmark.TINY, 1, 128)
    assert [row["us"] for row in rows] == ["", ""]
