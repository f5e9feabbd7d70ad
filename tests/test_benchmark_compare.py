"""benchmarks/compare.py: what counts as slower, and what it says and returns."""

import compare
import pytest
import results
from benchmark_rows import row

pytestmark = pytest.mark.once


@pytest.fixture
def compared(tmp_path, capsys):
    """compared(old rows, new rows, *options) -> (exit status, what was printed)."""

    def run(old, new, *options):
        for name, rows in (("old.csv", old), ("new.csv", new)):
            results.write(tmp_path / name, rows)
        status = compare.main([str(tmp_path / "old.csv"), str(tmp_path / "new.csv"), *options])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (row("a", 100), row("a", 104.9), 0),
        (row("a", 100), row("a", 105.1), 1),
        (row("a", 100), row("a", 50), 0),
        # 5% beyond the spread: 101 x 1.05 against 0.99 x 107.
        (row("a", 100, 0.01), row("a", 107, 0.01), 0),
        (row("a", 100, 0.01), row("a", 107.3, 0.01), 1),
        (row("a", 100, 0.2), row("a", 130, 0.01), 1),
        (row("a", 100, 0.25), row("a", 130, 0.01), 0),
    ],
)
def test_what_is_slower(compared, old, new, status):
    found, printed = compared([old], [new])
    assert found == status
    assert ("SLOWER" in printed) == bool(status)
    assert ("--cells '^(a)$'" in printed) == bool(status)


def test_threshold(compared):
    old, new = [row("a", 100)], [row("a", 103)]
    assert compared(old, new)[0] == 0
    for threshold in ("2%", "0.02"):
        assert compared(old, new, "--threshold", threshold)[0] == 1
    for threshold in ("fast", "-1%", "100%"):
        with pytest.raises(SystemExit) as stopped:
            compared(old, new, "--threshold", threshold)
        assert stopped.value.code == 2


def test_cells_are_told_apart_by_op_and_implementation(compared):
    old = [row("a", 100), row("a", 10, implementation="FlashMLA"), row("a", 1, op="paged_attention")]
    new = [row("a", 100), row("a", 10, implementation="FlashMLA"), row("a", 2, op="paged_attention")]
    status, printed = compared(old, new)
    assert status == 1
    assert printed.count("SLOWER") == 1
    assert "paged_attention" in next(line for line in printed.splitlines() if "SLOWER" in line)
    assert "3 cells compared: 1 slower and 0 faster" in printed
    assert "new / old 1.260" in printed, "the geometric mean of 1, 1 and 2"


@pytest.mark.control
def test_a_figure_that_was_lost_fails(compared):
    status, printed = compared(
        [row("a", 100), row("b", 100)], [row("a", 100), row("b", None, note="WRONG: error 1")]
    )
    assert status == 1
    (line,) = [line for line in printed.splitlines() if line.startswith("LOST")]
    assert "WRONG: error 1" in line
    status, printed = compared([row("a", 100), row("b", 100)], [row("a", 100)])
    assert status == 0, "a table of fewer cells"
    assert "1 cells in the old table only: b ours" in printed


def test_broken_figures_and_roofs_do_not_count(compared):
    status, printed = compared(
        [row("a", 100), row("b", 1), row("read", 100, op="roof")],
        [row("a", 100), row("b", 5, ok=False), row("read", 900, op="roof")],
    )
    assert status == 1
    assert "1 cells compared: 0 slower" in printed
    assert "LOST" in printed


def test_the_newest_row_of_a_cell_counts(compared):
    assert compared([row("a", 200), row("a", 100, commit="d")], [row("a", 100)], "--all")[0] == 0
    assert compared([row("a", 100), row("a", 200, commit="d")], [row("a", 150)])[0] == 0


def test_faster_is_shown_and_all_shows_the_rest(compared):
    old, new = [row("a", 100), row("b", 100)], [row("a", 80), row("b", 101)]
    status, printed = compared(old, new)
    assert status == 0
    assert "faster" in printed
    assert " b " not in printed
    assert " b " in compared(old, new, "--all")[1]


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n", "\xff\xfe"])
def test_what_is_no_table(tmp_path, capsys, text):
    path = tmp_path / "old.csv"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as stopped:
        compare.main([str(path), str(path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare.py: error: ")
    assert "old.csv" in line


@pytest.mark.parametrize("new", [row("b", 1), row("a", 1, device="H200"), row("a", 1, options="quick")])
def test_nothing_in_common(compared, new):
    status, printed = compared([row("a", 1)], [new])
    assert status == 2
    assert "no cell in common" in printed
    assert new.device in printed


def test_devices_of_one_table_are_told_apart(compared):
    """The other's row is the newest of the cell in both."""
    other = row("a", 50, device="H200")
    status, printed = compared([row("a", 100), other], [row("a", 200), other])
    assert status == 1
    assert "2 cells compared: 1 slower" in printed


@pytest.mark.parametrize(
    ("column", "text", "words"),
    [
        ("median_us", "fast", "line 2: median_us: expected a number, got 'fast'"),
        ("batch", "1.5", "batch: expected a number"),
        ("ok", "maybe", "ok: expected yes or no, got 'maybe'"),
    ],
)
def test_a_cell_of_a_table_that_cannot_be_read(tmp_path, column, text, words):
    path = tmp_path / "t.csv"
    results.write(path, [row("a", 7)])
    header, line = path.read_text().splitlines()
    values = line.split(",")
    values[header.split(",").index(column)] = text
    path.write_text(f"{header}\n{','.join(values)}\n")
    with pytest.raises(ValueError, match=words):
        results.read(path)


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "t.csv"
    rows = [
        row(
            "a",
            7.25,
            note='with, a "comma"',
            peak_mib=3.0,
            error=1e-3,
            limit=5e-3,
            repro="run.py --cells '^a$'",
        ),
        row("b", None, note="WRONG"),
    ]
    results.write(path, rows)
    assert results.read(path) == rows
    assert not [p for p in tmp_path.iterdir() if p != path]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    results.write(path, [row("a", 1)])

    def rows():
        yield row("a", 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.write(path, rows())
    assert results.read(path) == [row("a", 1)]
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
