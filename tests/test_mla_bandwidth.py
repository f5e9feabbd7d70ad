"""benchmarks/mla_bandwidth.py on the CPU: modes, figures, and what is not written. Implementations other than xla are
xla under another name here, the timer is faked."""

import functools
import importlib

import numpy as np
import pytest
from support import BENCHMARKS, TINY

SECONDS = 4e-7  # of a loop of two calls and two more: 0.1 us each
SMALL = ["--batch", "3", "--seqlens", "20", "60", "--heads", "4"]
# By hand: 576 numbers a token, 576 + 512 a row, two bytes each, in 0.1 us. Lengths are 20 + 22 + 24 and 60 + 62 + 64.
BANDWIDTHS = [round(2 * (tokens * 576 + 3 * 4 * (576 + 512)) / 1e-7 / 1e9) for tokens in (66, 186)]


@pytest.fixture(scope="module")
def compiled():
    """{(shape, way): what build gave}, once for all tests."""
    return {}


@pytest.fixture
def bandwidth(monkeypatch, tmp_path, compiled):
    """The program's module, in a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("mla_bandwidth")
    mla_decode, build = module.mla_decode, module.mla_decode.build
    for constant in TINY.keys() & vars(mla_decode).keys():
        monkeypatch.setattr(mla_decode, constant, TINY[constant])

    def build_once(shape, way):
        key = shape, way
        compiled[key] = compiled.get(key) or build(*key)
        return compiled[key]

    monkeypatch.setattr(mla_decode, "build", build_once)
    monkeypatch.setattr(mla_decode, "device_seconds", lambda run, repeats: SECONDS)
    monkeypatch.setattr(mla_decode, "warm_up", lambda run: None)
    monkeypatch.setitem(module.WAYS, "grid", ("xla", False))
    return module


def spoil(monkeypatch, module, way: str, change) -> None:
    """change(out) -> what a call of `way` gives instead."""
    build = module.mla_decode.build

    def spoiled(shape, name):
        run, schedule = build(shape, name)
        if name != way:
            return run, schedule
        return lambda *inputs: [change(out) for out in run(*inputs)], schedule

    monkeypatch.setattr(module.mla_decode, "build", spoiled)


def lines(path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("mode", [[], ["--one"]])
def test_one_writes_the_target(bandwidth, tmp_path, capsys, mode):
    assert bandwidth.main([*mode, *SMALL]) == 0
    expected = ["name,batch,seqlen,head,bw", f"xla,3,22,4,{BANDWIDTHS[0]}", f"xla,3,62,4,{BANDWIDTHS[1]}"]
    assert lines(tmp_path / "xla_perf.csv") == expected
    printed = capsys.readouterr().out
    for figure in (
        "0.1 us",
        f"{BANDWIDTHS[0]} GB/s",
        f"{2 * 4 * 186 * (576 + 512) / 1e-7 / 1e12:.0f} TFLOPS",
    ):
        assert figure in printed


def test_figures_of_several_heads_and_query_tokens(bandwidth, tmp_path):
    options = ["--batch", "2", "--seqlens", "33", "--heads", "2", "5", "--q-len", "2", "--out", "mine.csv"]
    assert bandwidth.main(["--target", "grid", *options]) == 0
    figures = [2 * (68 * 576 + 2 * 2 * heads * 1088) / 1e-7 / 1e9 for heads in (2, 5)]
    assert lines(tmp_path / "mine.csv")[1:] == [
        f"grid,2,34,2,{figures[0]:.0f}",
        f"grid,2,34,5,{figures[1]:.0f}",
    ]


def test_compare_writes_both(bandwidth, tmp_path):
    assert bandwidth.main(["--compare", "--target", "grid", *SMALL]) == 0
    assert lines(tmp_path / "xla_vs_grid_perf.csv")[1:] == [
        f"{name},3,{length},4,{figure}"
        for length, figure in zip((22, 62), BANDWIDTHS, strict=True)
        for name in ("xla", "grid")
    ]


def test_all_writes_what_can_run_and_says_why_not(bandwidth, tmp_path, capsys):
    assert bandwidth.main(["--all", *SMALL]) == 0
    rows = lines(tmp_path / "all_perf.csv")[1:]
    assert [row.split(",")[0] for row in rows] == ["grid", "xla"] * 2
    printed = capsys.readouterr().out
    for name, reason in (
        ("cuda", "needs an sm_90 GPU (H100, H200), the device is 'cpu'"),
        ("pallas", "needs an NVIDIA GPU"),
        ("flash_mla", "package 'flash_mla' is not installed"),
        ("flash_infer", "package 'flashinfer' is not installed"),
    ):
        assert f"{name:12}cannot run here: {reason}" in printed


def test_shapes_are_flash_mlas(bandwidth, monkeypatch):
    seen = []

    def write(file, shapes, groups):
        seen.extend(shapes)
        return 1, []

    monkeypatch.setattr(bandwidth, "write", write)
    bandwidth.main(["--target", "xla"])
    assert [shape.lengths[0] for shape in seen] == [1024, 2048, 4096, 8192, 16384, 32768]
    for shape in seen:
        assert np.diff(shape.lengths).tolist() == [2] * 127
        assert (shape.heads, shape.q_len, shape.page_size) == (128, 1, 64)
        assert bandwidth.mean_length(shape) == shape.lengths[0] + 127


@pytest.mark.parametrize("target", ["cuda", "pallas", "flash_mla", "flash_infer"])
@pytest.mark.parametrize("options", [["--target"], ["--compare", "--target"], ["--compare", "--baseline"]])
def test_named_implementation_that_cannot_run(bandwidth, tmp_path, capsys, target, options):
    with pytest.raises(SystemExit) as stopped:
        bandwidth.main([*options, target, *SMALL])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{target} cannot run here: " in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("request_", [0, 2])
@pytest.mark.parametrize("factor", [1.1, 0.0, np.nan])
def test_wrong_result_is_not_written(bandwidth, monkeypatch, tmp_path, capsys, request_, factor):
    spoil(monkeypatch, bandwidth, "grid", lambda out: out.at[request_].multiply(factor))
    assert bandwidth.main(["--all", *SMALL]) == 1
    assert [row.split(",")[0] for row in lines(tmp_path / "all_perf.csv")[1:]] == ["xla", "xla"]
    assert capsys.readouterr().out.count("WRONG by") == 2


@pytest.mark.parametrize(
    "change", [lambda out: out.at[1].multiply(1.1), lambda out: out.at[1, 0, 3].set(0.0)]
)
def test_outputs_that_disagree_are_not_written(bandwidth, monkeypatch, tmp_path, capsys, change):
    """In a request that the reference is not asked about."""
    spoil(monkeypatch, bandwidth, "grid", change)
    assert bandwidth.main(["--target", "grid", "--out", "one.csv", *SMALL]) == 0
    assert bandwidth.main(["--compare", "--target", "grid", *SMALL]) == 1
    assert lines(tmp_path / "xla_vs_grid_perf.csv") == ["name,batch,seqlen,head,bw"]
    assert "xla and grid disagree: " in capsys.readouterr().out


def test_disagreement_in_small_numbers_and_in_single_elements(bandwidth):
    disagreement = functools.partial(bandwidth.disagreement, ("a", "b"))
    noise = np.random.default_rng(0).standard_normal((2, 1, 3, 512)).astype(np.float32)
    assert disagreement(noise, noise * 1.002) is None
    assert "elements" in disagreement(noise * 1e-3, np.zeros_like(noise)), (
        "zeros are within 0.01 of all elements"
    )
    single = noise * 10
    single[1, 0, 2, 7] += 0.3
    assert "1 of 3072" in disagreement(noise * 10, single), "within 0.01 of the row"
    single[1, 0, 2, 7] = np.nan
    assert disagreement(noise * 10, single)
    assert disagreement(single, single), "NaN agrees with nothing"


@pytest.mark.parametrize("words", ["RESOURCE_EXHAUSTED: while allocating", "CUDA out of memory. Tried 2 GiB"])
def test_out_of_memory_at_one_shape_is_a_missing_row(bandwidth, monkeypatch, tmp_path, capsys, words):
    build = bandwidth.mla_decode.build

    def tight(shape, way):
        if way == "grid" and shape.lengths[0] == 60:
            raise RuntimeError(words)
        return build(shape, way)

    monkeypatch.setattr(bandwidth.mla_decode, "build", tight)
    assert bandwidth.main(["--all", *SMALL]) == 0
    rows = lines(tmp_path / "all_perf.csv")[1:]
    assert [row.rsplit(",", 1)[0] for row in rows] == ["grid,3,22,4", "xla,3,22,4", "xla,3,62,4"]
    assert "seqlen 62     head 4    no figure: out of memory\n" in capsys.readouterr().out
    assert bandwidth.main(["--target", "grid", *SMALL]) == 1, "asked for by name"
    assert lines(tmp_path / "grid_perf.csv")[1:] == [f"grid,3,22,4,{BANDWIDTHS[0]}"]


def test_inputs_out_of_memory_are_missing_rows(bandwidth, monkeypatch, tmp_path, capsys):
    def tight(shape):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(bandwidth, "inputs_of", tight)
    assert bandwidth.main(["--all", *SMALL]) == 1, "nothing at all was measured"
    assert capsys.readouterr().out.count("no figure: out of memory for the inputs") == 4


def test_refused_shapes_have_reasons_and_other_errors_are_raised(bandwidth, monkeypatch, capsys):
    def fail(shape, way):
        raise ValueError(message)

    monkeypatch.setattr(bandwidth.mla_decode, "build", fail)
    message = "mla_decode: implementation 'cuda' cannot serve this call: page_size is 16"
    assert bandwidth.main(["--target", "xla", *SMALL]) == 1
    assert f"no figure: {message}" in capsys.readouterr().out
    message = "operands could not be broadcast"
    with pytest.raises(ValueError, match="broadcast"):
        bandwidth.main(["--all", *SMALL])


def test_rows_are_flushed_as_they_are_measured(bandwidth, monkeypatch, tmp_path):
    seen = []

    def seconds(run, repeats):
        seen.append(len(lines(tmp_path / "all_perf.csv")) if (tmp_path / "all_perf.csv").exists() else None)
        return SECONDS

    monkeypatch.setattr(bandwidth.mla_decode, "device_seconds", seconds)
    bandwidth.main(["--all", *SMALL])
    assert seen == [0, 2, 3, 4], "the first row takes the header with it"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--all", "--one"], "not allowed with argument"),
        (["--compare", "--all"], "not allowed with argument"),
        (["--baseline", "xla"], "--baseline is for --compare"),
        (["--all", "--target", "xla"], "--target is for --one and --compare"),
        (["--compare", "--target", "xla"], "expected two implementations, got xla as baseline and as target"),
        (["--target", "torch"], "invalid choice: 'torch'"),
        (["--batch", "0"], "expected a whole number above 0, got '0'"),
        (["--seqlens", "1k"], "expected a whole number above 0, got '1k'"),
        (["--q-len", "3", "--seqlens", "8", "2"], "expected at most the shortest of --seqlens, 2, got 3"),
        (["--target", "xla", "--out", "no/such/folder.csv"], "No such file or directory"),
    ],
)
def test_options_that_do_not_fit(bandwidth, tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as stopped:
        bandwidth.main(options)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_default_target_is_the_first_that_can_run(bandwidth, monkeypatch, tmp_path):
    monkeypatch.setattr(bandwidth, "write", lambda file, shapes, groups: (1, []))
    for able, expected in (
        (["cuda", "pallas", "xla"], "cuda"),
        (["pallas", "xla"], "pallas"),
        (["xla"], "xla"),
    ):
        monkeypatch.setattr(bandwidth, "refusal", lambda name, able=able: None if name in able else "no")
        bandwidth.main([])
        assert (tmp_path / f"{expected}_perf.csv").exists()
        if expected != "xla":
            bandwidth.main(["--compare"])
            assert (tmp_path / f"xla_vs_{expected}_perf.csv").exists()


def test_bar_on_a_terminal_leaves_the_lines_whole(bandwidth, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(bandwidth.sys.stdout, "isatty", lambda: True)
    assert bandwidth.main(SMALL) == 0
    assert f"{BANDWIDTHS[1]} GB/s\n" in capsys.readouterr().out


def test_plot_right_after(bandwidth, tmp_path, capsys):
    assert bandwidth.main(["--plot", *SMALL]) == 0
    assert (tmp_path / "xla_perf_bandwidth_vs_seqlen.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_its_packages(bandwidth, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bandwidth.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        bandwidth.main(["--plot", *SMALL])
    assert stopped.value.code == 2
    assert "--plot needs pandas and matplotlib: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_names_modes_and_implementations(bandwidth, capsys):
    with pytest.raises(SystemExit):
        bandwidth.main(["--help"])
    printed = capsys.readouterr().out
    for words in ("--one", "--compare", "--all", "flash_infer", "name, batch, seqlen", "Exit codes"):
        assert words in printed
