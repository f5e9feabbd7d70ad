"""benchmarks/run.py on the CPU: what is measured, written, refused and taken up again. The clock is faked."""

import functools
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
import results
import roofline
import run
import source
import workloads
from costs import Cost
from source import timing
from workloads.base import Runner, Target, Workload

import pallas_attn
from pallas_attn.testing import cases

pytestmark = pytest.mark.once  # the program; its clock is tested on both

ROOT = Path(__file__).parents[1]
SECONDS = 4e-3  # of every burst
CALLS = 2 + 2  # a round of two, and the two whose results are checked
ROOFS = 3


@pytest.fixture(autouse=True)
def clock(monkeypatch, tmp_path):
    """Every burst takes SECONDS, and the program runs in a folder of its own at commit "here"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: [SECONDS] * repeats)
    monkeypatch.setattr(timing, "warm_up", lambda run: None)
    monkeypatch.setattr(source, "commit", lambda directory: "here")


@pytest.fixture(scope="session")
def compiled():
    return {}


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch, compiled):
    """The loop and the reference of a cell, once for all tests that leave the library as it is."""
    for name in ("compile", "compile_expected"):
        made = getattr(workloads.paged_attention.PagedAttention, name)

        def cached(self, case, *rest, made=made, name=name):
            key = (name, type(self).__name__, case, *rest, self.library.paged_attention)
            if key not in compiled:
                compiled[key] = made(self, case, *rest)
            return compiled[key]

        monkeypatch.setattr(workloads.paged_attention.PagedAttention, name, cached)


def tiny(*options: str, op: str = "paged_attention", out: str = "out.csv") -> int:
    return run.main(["--op", op, "--tiny", "--out", out, *options])


def rows(out: str = "out.csv") -> list[results.Row]:
    return [row for row in results.read(Path(out)) if row.op != roofline.OP]


def test_figures_of_a_row(capsys):
    assert tiny("--cells", "uneven") == 0
    roofs = [row for row in results.read(Path("out.csv")) if row.op == "roof"]
    assert [row.case for row in roofs] == ["copy", "read", "bf16-product"]
    (row,) = rows()
    assert row.place == (jax.devices()[0].device_kind, jax.__version__, "here", "tiny")
    assert (row.op, row.implementation) == ("paged_attention", "ours")
    assert "uneven" in row.case
    us = SECONDS / CALLS * 1e6
    assert (row.median_us, row.p20_us, row.p80_us) == (us, us, us)
    tokens = 70 + 33 + 5
    num_bytes = 2 * 2 * 2 * 16 * tokens + 2 * 2 * 3 * 4 * 16
    assert row.gbs == pytest.approx(num_bytes / us / 1e3, rel=1e-4)
    roof = max(results.read(Path("out.csv"))[i].gbs for i in (0, 1))
    assert roof > 0
    assert (row.batch, row.seqlen, row.heads, row.kv_heads, row.q_len) == (3, 36, 4, 2, 1)
    assert (row.method, row.dtype, row.ok) == ("loop", "bfloat16", True)
    assert 0 < row.error < row.limit == 8e-3
    assert row.peak_mib > 0
    printed = capsys.readouterr().out
    assert "[1/1, 0:00 left]" in printed
    assert "1000.00 us" in printed


def test_roof_percent_is_of_the_least_time():
    figures = results.timed([3.0, 1.0, 2.0], flops=10, num_bytes=20, roof_seconds=0.5)
    assert figures["median_us"] == 2e6
    assert figures["roof_percent"] == 25
    assert (figures["p20_us"], figures["p80_us"]) == pytest.approx((1.4e6, 2.6e6))


def test_repro_measures_the_row_again():
    assert tiny("--cells", "uneven", "--quick") == 0
    (row,) = rows()
    words = shlex.split(row.repro)
    assert words[:2] == ["python", "benchmarks/run.py"]
    assert run.main([*words[2:], "--out", "again.csv"]) == 0
    assert rows("again.csv") == [row]
    assert run.main([*words[2:], "--out", "out.csv"]) == 0
    assert rows() == [row], "in place of the one before"


def test_repro_of_a_cell_of_ones_own(monkeypatch):
    monkeypatch.setattr(workloads.paged_attention.PagedAttention, "compile", fake_compile)
    monkeypatch.setattr(workloads.paged_attention.PagedAttention, "compile_expected", fake_expected)
    own = ["--op", "paged_attention", "--tiny", "--batch", "2", "--seqlens", "32", "48", "--heads", "4"]
    assert run.main([*own, "--kv-heads", "2", "--q-len", "3", "--out", "out.csv"]) == 0
    first, second = rows()
    assert [(row.batch, row.seqlen, row.heads, row.kv_heads, row.q_len) for row in (first, second)] == [
        (2, 32, 4, 2, 3),
        (2, 48, 4, 2, 3),
    ]
    assert run.main([*shlex.split(second.repro)[2:], "--out", "again.csv"]) == 0
    assert rows("again.csv") == [second]


def fake_compile(self, case, target):
    return lambda inputs: Runner(lambda: [jnp.ones(2)], lambda: 1e-3, lambda: None, None, "loop")


def fake_expected(self, case):
    return lambda inputs: [jnp.ones(2)]


def test_a_stopped_run_goes_on_where_it_was(monkeypatch, capsys):
    assert tiny("--cells", "s64-|uneven") == 0
    whole = rows()
    Path("out.csv").unlink()
    add = run.Table.add

    def stopped(table, row):
        if row.op == "paged_attention" and rows():
            raise KeyboardInterrupt
        add(table, row)

    monkeypatch.setattr(run.Table, "add", stopped)
    assert tiny("--cells", "s64-|uneven") == 130
    assert "4 rows are new in out.csv; the same command goes on" in capsys.readouterr().out
    assert rows() == whole[:1]
    written = []
    monkeypatch.setattr(run.Table, "add", lambda table, row: (written.append(row), add(table, row)))
    assert tiny("--cells", "s64-|uneven") == 0
    assert "1 kept" in capsys.readouterr().out
    assert [row.case for row in written] == [whole[1].case], "the roofs are kept too"
    assert rows() == whole
    assert [path.name for path in Path().iterdir()] == ["out.csv"], "nothing half-written is left"

    for again in (["--fresh"], ["--quick"], ["--commit", "other"]):
        written.clear()
        assert tiny("--cells", "s64-|uneven", *again) == 0
        assert [row.case for row in written if row.op != "roof"] == [row.case for row in whole], again
    assert len(rows()) == 6, "--fresh is in place of what was there; options and commits are beside it"


def test_where_git_does_not_know_the_commit_nothing_is_kept(monkeypatch, capsys):
    monkeypatch.setattr(source, "commit", lambda directory: None)
    for _ in range(2):
        assert tiny("--cells", "uneven") == 0
    assert "kept" not in capsys.readouterr().out


@pytest.mark.parametrize("call", [0, -1], ids=["first call", "last call"])
@pytest.mark.parametrize("damage", [1.1, np.nan])
@pytest.mark.control
def test_what_is_wrong_gets_no_figure(monkeypatch, capsys, call, damage):
    """One sequence of the first or the last call."""
    made = workloads.paged_attention.PagedAttention.compile

    def damaged(self, case, target):
        def runner(inputs):
            right = made(self, case, target)(inputs)

            def outputs():
                outs = list(right.outputs())
                outs[call] = outs[call].at[-1].multiply(damage)
                return outs

            return right._replace(outputs=outputs, sample=lambda: pytest.fail("it was timed"))

        return runner

    monkeypatch.setattr(workloads.paged_attention.PagedAttention, "compile", damaged)
    assert tiny("--cells", "s64-|uneven") == 1
    for row in rows():
        assert not row.ok
        assert row.median_us is row.gbs is None
        assert row.note.startswith("WRONG: error ")
    assert "no figure: WRONG" in capsys.readouterr().out
    monkeypatch.setattr(workloads.paged_attention.PagedAttention, "compile", made)
    assert tiny("--cells", "s64-|uneven") == 0, "what has no figure is measured again"
    assert all(row.ok for row in rows())


@pytest.mark.control
def test_a_library_that_is_wrong_gets_no_figure(monkeypatch):
    """Through the real loop: a call that forgets the newest token."""
    attend = pallas_attn.paged_attention

    def forgetful(query, keys, values, table, lengths, **options):
        return attend(query, keys, values, table, lengths - 1, **options)

    monkeypatch.setattr(pallas_attn, "paged_attention", forgetful)
    assert tiny("--cells", "uneven") == 1
    (row,) = rows()
    assert row.note.startswith("WRONG")
    assert row.median_us is None


@pytest.mark.parametrize("limits", [(1e-9, 1e9), (1e9, 1e-9)])
def test_what_is_too_fast_is_marked(monkeypatch, limits, capsys):
    monkeypatch.setitem(roofline.STATED, "cpu", limits)
    assert tiny("--cells", "uneven") == 1
    (row,) = rows()
    assert not row.ok
    assert row.note.startswith("broken: ")
    assert "broken" in capsys.readouterr().out


def test_a_clock_that_saw_no_time_is_no_figure(monkeypatch):
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: [-1e-6] * repeats)
    assert tiny("--cells", "uneven") == 1
    assert not rows()[0].ok


def test_compare_and_export(capsys):
    assert tiny("--cells", "uneven", "--compare", "--export-bw", "bw.csv") == 0
    assert {row.implementation for row in rows()} == {"ours", "ours, plain jnp"}
    assert "ours: 1.000 x ours, plain jnp" in capsys.readouterr().out
    header, *lines = Path("bw.csv").read_text().splitlines()
    assert header == "name,batch,seqlen,head,bw"
    assert sorted(line.rsplit(",", 1)[0] for line in lines) == ["auto,3,36,4", "xla,3,36,4"]


def test_all_lists_what_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(run.baselines, "PEERS", ("flash_mla", "fa3", "jax_nn"))
    assert tiny("--cells", "uneven", "--all") == 0
    printed = capsys.readouterr().out
    assert "pallas cannot run here: needs an NVIDIA GPU" in printed
    assert "fa3 cannot run here: " in printed
    assert "flash_mla" not in printed, "a peer for the other op"
    assert {row.implementation for row in rows()} == {"ours, plain jnp", "jax.nn, pages gathered"}
    assert tiny("--cells", "w20", "--all") == 0, "a peer without a window is no failure"
    (refused,) = [row for row in rows() if not row.ok]
    assert "cannot serve this case: is set up for one query token" in refused.note
    assert tiny("--cells", "w20", "--target", "jax_nn") == 1, "unless it was named"


def test_implementations_take_turns():
    turns = []

    def contender(name):
        runner = Runner(lambda: [jnp.ones(2)], lambda: turns.append(name) or 1.0, lambda: None, None, "loop")
        done = functools.partial(future, lambda inputs: runner)
        return measure.Candidate(name, name, 1e-3, {"": done()}, future(lambda inputs: [jnp.ones(2)]), None)

    workload = workloads.paged_attention.PagedAttention(pallas_attn, True)
    found = [contender("a"), contender("b")]
    outcomes = dict(measure.outcomes(workload, workload.tiny()[0], found, rounds=3))
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert outcomes["a"].samples == [1.0] * 3


def test_who_is_not_settled_has_all_go_on():
    def contender(name, seconds):
        drawn = iter(seconds)
        runner = Runner(lambda: [jnp.ones(2)], lambda: next(drawn), lambda: None, None, "loop")
        done = future(lambda inputs: runner)
        return measure.Candidate(name, name, 1e-3, {"": done}, future(lambda inputs: [jnp.ones(2)]), None)

    workload = workloads.paged_attention.PagedAttention(pallas_attn, True)

    def samples(*seconds):
        found = [contender(name, own) for name, own in zip("ab", seconds, strict=True)]
        return {name: one.samples for name, one in measure.outcomes(workload, workload.tiny()[0], found, 3)}

    steady, new = [1.0] * 20, [1.3, 1.2, 1.1, *[1.0] * 17]
    ends = samples(steady, new)
    assert ends["b"] == new[: len(ends["a"])], "in the same rounds"
    assert sorted(ends["b"])[len(ends["b"]) // 2] == 1.0
    assert [len(own) for own in samples(steady, [1.0, 1.2] * 10).values()] == [measure.MOST_ROUNDS] * 2
    assert [len(own) for own in samples(steady, [1.0, 1.01, 1.02]).values()] == [3, 3]


def future(value):
    made = measure.Future()
    made.set_result(value)
    return made


def test_the_fastest_right_variant_counts():
    def variant(output, seconds):
        return future(
            lambda inputs: Runner(lambda: [jnp.full(2, output)], lambda: seconds, lambda: None, 5, "graph")
        )

    compiled = {"slow": variant(1.0, 3.0), "fast": variant(1.0, 2.0), "fast and wrong": variant(2.0, 1.0)}
    candidate = measure.Candidate("x", "X", 1e-3, compiled, future(lambda inputs: [jnp.ones(2)]), None)
    workload = workloads.paged_attention.PagedAttention(pallas_attn, True)
    ((_, outcome),) = measure.outcomes(workload, workload.tiny()[0], [candidate], rounds=2)
    assert (outcome.note, outcome.samples, outcome.peak_bytes) == ("fast", [2.0, 2.0], 5)


def test_out_of_memory_is_a_row_without_a_figure(monkeypatch, capsys):
    def full(self, case):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(workloads.paged_attention.PagedAttention, "inputs", full)
    assert tiny("--cells", "uneven") == 1
    assert rows()[0].note == "out of memory for the inputs"


def test_a_new_op_needs_a_line_in_the_registry(monkeypatch):
    """With its time and its memory."""

    class Doubled(Workload):
        op = "doubled"
        targets = {"auto": Target("ours", None)}  # noqa: RUF012
        error_limit = 1e-3

        def cells(self):
            return [cases.served(1, 32, 2, 2, 16, 16)]

        tiny = cells

        def made(self, batch, seqlen, heads, kv_heads, q_len):
            return cases.served(batch, seqlen, heads, kv_heads or heads, 16, 16)

        def cost(self, case):
            return Cost(100, 1000)

        def inputs(self, case):
            return jnp.ones(4)

        def compile(self, case, target):
            return lambda inputs: Runner(lambda: [inputs * 2], lambda: 1e-6, lambda: None, 3 << 20, "loop")

        def compile_expected(self, case):
            return lambda inputs: [jnp.full(4, 2.0)]

    monkeypatch.setitem(workloads.WORKLOADS, "doubled", Doubled)
    assert tiny(op="doubled") == 0
    (row,) = rows()
    assert (row.op, row.median_us, row.gbs, row.peak_mib) == ("doubled", 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("op", "cells"),
    [
        ("mla_decode", "qlen2"),
        ("mla_decode", "kve4m3"),
        ("mla_step", ""),
        ("sparse_mla_decode", "qlen2"),
        ("sparse_mla_decode", "kve4m3"),
        ("sparse_mla_prefill", ""),
    ],
)
def test_the_other_ops(op, cells):
    assert tiny("--cells", cells, op=op) == 0
    (row,) = rows()
    assert row.ok
    assert row.error < row.limit


@pytest.mark.parametrize("op", ["flash_attention_gradients", "blocksparse_attention_gradients"])
@pytest.mark.sweep(op=None)
def test_references_of_gradients(op):
    """Of rows that see nothing, too: their softmax has no gradients of its own."""
    assert tiny("--target", "xla", "--quick", op=op) == 0
    assert len(rows()) > 1
    assert all(row.ok and 0 < row.error < row.limit for row in rows())
