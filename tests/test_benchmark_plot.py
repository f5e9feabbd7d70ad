"""benchmarks/plot.py: what is in the axes, not only that there is a file."""

import importlib

import pytest
from support import BENCHMARKS

pytestmark = pytest.mark.once
HEADER = "name,batch,seqlen,head,bw\n"
TABLE = HEADER + (
    "xla,128,2175,128,90\n"  # not in the order of lengths
    "xla,128,1151,128,80\n"
    "cuda,128,1151,128,2200\n"
    "cuda,128,2175,128,2500\n"
    "cuda,128,4223,128,2600\n"
)


@pytest.fixture
def plot(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("plot")


@pytest.fixture
def table(tmp_path):
    """write(text) -> the path of a CSV file of it."""

    def write(text: str):
        path = tmp_path / "all_perf.csv"
        path.write_text(text)
        return path

    return write


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}


def test_a_line_an_implementation(plot, table):
    figure = plot.figure(plot.read(table(TABLE)))
    (axes,) = figure.axes
    assert drawn(axes) == {
        "xla": [(1151, 80), (2175, 90)],
        "cuda": [(1151, 2200), (2175, 2500), (4223, 2600)],
    }
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_transform().base == 2
    assert axes.get_xticks().tolist() == [1151, 2175, 4223]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1151", "2175", "4223"]
    assert axes.get_title() == "MLA decode, batch 128, 128 heads"
    assert "GB/s" in axes.get_ylabel()
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 2600
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == ["cuda", "xla"]


def test_a_panel_a_head_count(plot, table):
    text = TABLE + "cuda,128,1151,16,2700\ncuda,128,8319,16,3000\nflash_mla,128,1151,16,2690\n"
    figure = plot.figure(plot.read(table(text)))
    few, many = figure.axes
    assert [axes.get_title() for axes in (few, many)] == [
        "MLA decode, batch 128, 16 heads",
        "MLA decode, batch 128, 128 heads",
    ]
    assert drawn(few) == {"cuda": [(1151, 2700), (8319, 3000)], "flash_mla": [(1151, 2690)]}
    assert drawn(many)["cuda"][-1] == (4223, 2600)
    assert few.get_xticks().tolist() == [1151, 8319]
    assert few.get_ylim() == many.get_ylim()
    colors = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in (few, many)]
    assert colors[0]["cuda"] == colors[1]["cuda"] != colors[1]["xla"]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"cuda", "xla", "flash_mla"}


def test_file_lies_beside_the_table_or_where_asked(plot, table, tmp_path, capsys):
    path = table(TABLE)
    plot.main([str(path)])
    beside = tmp_path / "all_perf_bandwidth_vs_seqlen.png"
    assert beside.read_bytes().startswith(b"\x89PNG")
    assert str(beside) in capsys.readouterr().out
    plot.main([str(path), "--out", str(tmp_path / "mine.svg")])
    assert "<svg" in (tmp_path / "mine.svg").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a CSV file, got 'No columns to parse from file'"),
        (HEADER, "expected at least one row, got only the header"),
        ("name,batch,seqlen,bw\nxla,1,2,3\n", "got name, batch, seqlen, bw (head is missing)"),
        (TABLE + "cuda,128,8319,128,fast\n", "bw: expected numbers from 0 up, got 'fast' in row 6"),
        (TABLE + "cuda,128,8319,128,inf\n", "bw: expected numbers from 0 up, got 'inf' in row 6"),
        (TABLE + "cuda,128,,128,1\n", "seqlen: expected numbers from 1 up, got '' in row 6"),
        (HEADER + "cuda,128,0,128,1\n", "seqlen: expected numbers from 1 up, got '0' in row 1"),
        (TABLE + "cuda,128,1,128,1,1,1\n", "expected a CSV file, got 'Error tokenizing data"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_such_table(plot, table, tmp_path, capsys, text, words):
    path = tmp_path / "none.csv" if text is None else table(text)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert path.name in line
    assert not list(tmp_path.glob("*.png"))


def test_picture_that_cannot_be_written(plot, table, tmp_path, capsys):
    path = table(TABLE)
    for out, words in (("picture.unknown", "'unknown' is not supported"), ("no/such.png", "No such file")):
        with pytest.raises(SystemExit) as stopped:
            plot.main([str(path), "--out", str(tmp_path / out)])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
