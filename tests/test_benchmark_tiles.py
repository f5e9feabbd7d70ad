"""benchmarks/tiles.py and its kinds of lengths, on the CPU. The clock is faked."""

import re

import lengths
import pytest
import tiles
from source import timing

from pallas_attn.testing.cases import served

pytestmark = pytest.mark.once

CASE = served(16, 1024, 32, 8, 128, 16)


@pytest.mark.parametrize("kind", lengths.KINDS)
def test_lengths_fit_the_table_and_are_the_same_again(kind):
    found = lengths.drawn(kind, 64, 1024)
    assert len(found) == 64
    assert min(found) >= 1
    assert max(found) <= 1024
    assert (max(found) == 1024) == (kind != "uniform")
    assert found == lengths.drawn(kind, 64, 1024)
    assert lengths.drawn(kind, 3, 1) == (1, 1, 1)


def test_kinds_are_what_they_are_called():
    assert lengths.drawn("giants", 16, 1024).count(1024) == 4
    assert sorted(set(lengths.drawn("bimodal", 16, 1000))) == [50, 1000]
    means = {kind: sum(lengths.drawn(kind, 4096, 8192)) / 4096 for kind in lengths.KINDS}
    assert means["equal"] > means["uniform"] > means["exponential"] > means["giants"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("64x4s5", dict(block_kv=64, num_warps=4, num_stages=5)),
        ("64x4s5/396", dict(target_programs=396, num_splits=0)),
        ("64x4s5/W", dict(target_programs=128, num_splits=0)),
        ("32x2s7/1.4W", dict(block_kv=32, num_warps=2, num_stages=7, target_programs=179, num_splits=0)),
        ("64x4s5//whole", dict(num_splits=1)),
        ("64x4s5/W/whole", dict(target_programs=128, num_splits=1)),
    ],
)
def test_tiles_are_read(name, fields):
    config = tiles.config_of(CASE, name)
    assert {field: getattr(config, field) for field in fields} == fields
    assert config.block_q == 16, "filled in"


def test_cells_are_read():
    sizes = dict(heads=8, kv_heads=2, head_dim=64, page_size=32)
    case = tiles.case_of("16xgiants1024", sizes)
    assert case.seq_lens == lengths.drawn("giants", 16, 1024)
    assert (case.num_heads, case.num_kv_heads, case.head_dim, case.page_size) == (8, 2, 64, 32)
    assert tiles.case_of("3x50", sizes).seq_lens == (50,) * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --cells, such as 16x1024"),
        (["--cells", "16x"], r"--cells: expected SEQUENCESx\[KIND\]TOKENS, KIND one of equal, .*; got '16x'"),
        (["--cells", "0x64"], "--cells: expected .*; got '0x64'"),
        (["--cells", "2xwide64"], "--cells: expected .*; got '2xwide64'"),
        (["--cells", "2x64", "--tiles", "64x4"], r"--tiles: expected TOKENSx.*, got '64x4'"),
        (["--cells", "2x64", "--tiles", "64x4s5/W/half"], "--tiles: expected .*, got '64x4s5/W/half'"),
        (["--cells", "2x64", "--tiles", "48x4s5"], "'block_kv': expected a power of two >= 16, got 48"),
        (
            ["--cells", "2x64", "--tiny", "--heads", "5"],
            "--heads: expected a multiple of --kv-heads, 2; got 5",
        ),
        (["--cells", "2x64", "--peers", "nobody"], "expected different ones of auto, .*; got 'nobody'"),
        (["--cells", "2x64", "--tiles", "32x4s5", "32x4s5"], "expected different ones of .*; got '32x4s5'"),
        (["--cells", "2x64", "--peers", "fa3"], "fa3 cannot run here: "),
    ],
)
def test_what_cannot_begin_is_said_in_a_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        tiles.main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tiles.py: error: ")
    assert said.count("\n") == 1
    assert re.search(message, said), said


def test_counts_are_refused_by_the_program_s_name(capsys):
    with pytest.raises(SystemExit):
        tiles.main(["--cells", "2x64", "--rounds", "0"])
    assert capsys.readouterr().err == (
        "tiles.py: error: argument --rounds: expected a whole number above 0, got '0'\n"
    )


@pytest.mark.slow
def test_cells_are_timed_beside_auto(monkeypatch, capsys):
    seconds = iter([1.0, 2.0] * 3)
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: [next(seconds)] * repeats)
    monkeypatch.setattr(timing, "warm_up", lambda run: None)
    monkeypatch.setattr(tiles.measure, "settled", lambda contender: False)
    assert tiles.main(["--tiny", "--cells", "2xgiants40", "--tiles", "16x1s1/W", "--rounds", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "b2-giants40-q4kv2 | auto " in line
    assert "16x1s1/W " in line
    assert line.count("(") == 2


@pytest.mark.control
def test_what_is_wrong_has_no_figure_and_a_status(monkeypatch, capsys):
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: [1.0] * repeats)
    monkeypatch.setattr(timing, "warm_up", lambda run: None)
    monkeypatch.setattr(tiles.PagedAttention, "error_limit", -1.0)
    assert tiles.main(["--tiny", "--cells", "2x40", "--tiles", "--rounds", "1"]) == 1
    assert "auto no figure: " in capsys.readouterr().out
