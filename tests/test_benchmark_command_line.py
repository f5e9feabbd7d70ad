"""benchmarks/run.py: what its command line refuses and shows, and how it measures another checkout."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import results
import roofline
import run
import source
import workloads
from support import ON_GPU

import pallas_attn

pytestmark = pytest.mark.once  # the program; its clock is tested on both

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--op", "flash"], "invalid choice: 'flash' (choose from"),
        ([], "the following arguments are required: --op"),
        (
            ["--target", "fast"],
            "one of auto, pallas, triton, xla, fa3, flashinfer, vllm_triton, jax_triton",
        ),
        (["--compare", "--baseline", "flash"], "got 'flash'"),
        (["--baseline", "xla"], "--baseline is for --compare"),
        (["--all", "--target", "xla"], "--all takes everything"),
        (["--compare", "--target", "xla"], "expected different implementations, got xla xla"),
        (["--target", "pallas"], "pallas cannot run here: needs an NVIDIA GPU"),
        (["--cells", "nothing"], "--cells: expected to find some of b1-s1024-"),
        (["--cells", "("], "--cells: expected a regular expression, got '('"),
        (["--op", "mla_step", "--options"], "--options: mla_step has no cells of this kind"),
        (["--heads", "16"], "expected --seqlens with --heads"),
        (["--seqlens", "0"], "expected a whole number above 0, got '0'"),
        (
            ["--seqlens", "16", "--cells", "b1"],
            "expected cells from the list (--cells) or your own (--seqlens)",
        ),
        (["--seqlens", "4", "--q-len", "5"], "--q-len: expected at most the shortest of --seqlens"),
        (
            ["--op", "flash_attention", "--seqlens", "64", "--q-len", "3"],
            "--q-len: expected 64, as --seqlens, for flash_attention; got 3",
        ),
        (
            ["--seqlens", "64", "--heads", "5", "--kv-heads", "2"],
            "--heads: expected a multiple of --kv-heads",
        ),
        (["--tiny", "--out", "no/such/folder.csv"], "No such file or directory"),
        (
            ["--tiny", "--source", "nowhere"],
            "--source: expected a checkout that holds pallas_attn/, got 'nowhere'",
        ),
        (["--one", "--all"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(capsys, options, words):
    with pytest.raises(SystemExit) as stopped:
        run.main(options if "--op" in options or not options else ["--op", "paged_attention", *options])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run.py: error: ")
    assert words in line
    assert not list(Path().glob("*.csv"))


def test_a_file_that_is_no_table_is_left_alone(capsys):
    Path("out.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        run.main(["--op", "paged_attention", "--tiny", "--out", "out.csv"])
    assert "expected a table of run.py" in capsys.readouterr().err
    assert Path("out.csv").read_text() == "a,b\n1,2\n"


def test_list_and_help(capsys):
    assert run.main(["--op", "mla_decode", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "58 cells" in printed
    assert "pallas-unscheduled  ours, Pallas without a schedule" in printed
    assert run.main(["--op", "paged_attention", "--list"]) == 0
    assert "47 cells" in capsys.readouterr().out
    assert run.main(["--op", "paged_attention", "--options", "--list"]) == 0
    assert "kve4m3" in capsys.readouterr().out
    assert run.main(["--op", "sparse_mla_decode", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "10 cells" in printed
    # Whatever implementations the op comes to have, a row each.
    for name in pallas_attn.available_implementations()["sparse_mla_decode"]:
        assert (f"\n  {name:20}ours, " in printed) == (name != "interpret")
    assert not list(Path().iterdir())
    with pytest.raises(SystemExit):
        run.main(["--help"])
    printed = capsys.readouterr().out
    for words in ("--compare --baseline flash_mla", "--export-bw", "Exit status"):
        assert words in printed


OTHER = '''"""Another checkout: the argument's name of old, and a result that is off."""
import jax.numpy as jnp
def available_implementations():
    return {"mla_decode": {"xla": None}}
def mla_schedule(lengths, *, num_heads, num_kv_heads=1, s_q=1):
    return lengths * s_q
def mla_decode(query, cache, table, lengths, *, schedule, causal, return_lse, implementation):
    assert implementation is None and schedule.shape == lengths.shape
    out = query[..., :512] * jnp.bfloat16(2)
    return out, out[..., 0].astype(jnp.float32)
'''


@pytest.mark.slow
def test_another_checkout(tmp_path):
    """In a process of its own: it replaces the package."""
    package = tmp_path / "before" / "pallas_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(OTHER)
    options = ["--op", "mla_decode", "--tiny", "--cells", "uneven", "--source", "before", "--commit", "old"]
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *options]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "no figure: WRONG" in done.stdout
    (row,) = [row for row in results.read(Path("mla_decode.csv")) if row.op != roofline.OP]
    assert row.commit == "old"
    assert "--source before --commit old" in row.repro


def test_commit_of_a_checkout(tmp_path):
    git = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    assert source.commit(tmp_path) is None
    (tmp_path / "pallas_attn").mkdir()
    (tmp_path / "pallas_attn" / "a.py").write_text("1")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        git(["git", *arguments])
    clean = source.commit(tmp_path)
    assert len(clean) >= 7
    (tmp_path / "pallas_attn" / "a.py").write_text("2")
    changed = source.commit(tmp_path)
    assert changed.startswith(f"{clean}+")
    (tmp_path / "pallas_attn" / "a.py").write_text("3")
    assert source.commit(tmp_path) not in (clean, changed)
    assert source.commit(tmp_path / "pallas_attn") is None


@pytest.mark.parametrize("op", list(workloads.WORKLOADS))
def test_cases_told_to_another_process(op):
    workload = workloads.WORKLOADS[op](pallas_attn, False)
    told = [*workload.cells(), *workload.options(), *workload.tiny()]
    heard = source.heard(source.told(told), pallas_attn)
    assert [case.id for case in heard] == [case.id for case in told]
    # A layout of more tokens takes seconds to count, and has nothing that these have not.
    counted = [
        i for i, case in enumerate(told) if max((k for _, k in getattr(case, "lens", ())), default=0) <= 8192
    ]
    assert counted
    assert [workload.cost(heard[i]) for i in counted] == [workload.cost(told[i]) for i in counted]
    patterns = [[getattr(case, "block_sparse", None) for case in cases] for cases in (heard, told)]
    assert patterns[0] == patterns[1]


@pytest.mark.parametrize("implementation", ON_GPU)
@pytest.mark.parametrize("op", ["paged_attention", "mla_decode"])
def test_on_a_gpu(op, implementation):
    targets = ["auto", implementation] + [f"{implementation}-unscheduled"] * (op == "mla_decode")
    assert run.main(["--op", op, "--tiny", "--quick", "--target", *targets, "--out", "out.csv"]) == 0
    rows = results.read(Path("out.csv"))
    # Not the roofs, which may be anything where others use the GPU too.
    assert len(rows) > 3
    assert all(row.ok and row.error < row.limit for row in rows if row.op == op)
