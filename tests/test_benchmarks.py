"""The benchmark programs, on shapes that a CPU can do, and what counts as device time."""

import csv
import functools
import importlib
import json

import jax
import numpy as np
import pytest
from support import BENCHMARKS, TINY

from pallas_attn.tuning import points, timing


class FakeDevice:
    """A clock and a queue: dispatch takes the host's time, work the device's, and waiting ends late."""

    def __init__(self, monkeypatch, *, dispatch: float, work: float, wake_up: float):
        self.now = self.free = 0.0
        self.dispatch, self.work, self.wake_up = dispatch, work, wake_up
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "sleep", self.sleep)
        monkeypatch.setattr(timing.jax, "block_until_ready", self.wait)

    def run(self) -> None:
        self.now += self.dispatch
        self.free = max(self.free, self.now) + self.work

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, _) -> None:
        self.now = max(self.now, self.free) + self.wake_up


@pytest.mark.parametrize("repeats", [1, 5])
def test_dispatch_and_waking_up_do_not_count(monkeypatch, repeats):
    device = FakeDevice(monkeypatch, dispatch=3e-4, work=20e-3, wake_up=5e-4)
    assert timing.device_seconds(device.run, repeats) == pytest.approx(20e-3, rel=1e-9)
    assert timing._queued_seconds(device.run, 1) == pytest.approx(20.8e-3, rel=1e-9), "what a stop watch says"


def test_one_late_burst_does_not_count(monkeypatch):
    device = FakeDevice(monkeypatch, dispatch=3e-4, work=20e-3, wake_up=5e-4)
    runs = []

    def run():
        runs.append(None)
        device.run()
        if len(runs) == 2:
            device.free += 1.0

    assert timing.device_seconds(run) == pytest.approx(20e-3, rel=1e-9)
    assert len(runs) == timing.REPEATS * (timing.QUEUED + 2)


def test_warm_up_lasts(monkeypatch):
    device = FakeDevice(monkeypatch, dispatch=3e-4, work=20e-3, wake_up=5e-4)
    timing.warm_up(device.run)
    assert timing.WARM_UP_SECONDS <= device.now < timing.WARM_UP_SECONDS + 0.03


SECONDS = 2e-3  # what the timer says of every loop here
SHAPES = {
    "gqa_decode": [
        {"id": "gqa-b2", "b": 2, "s": 64, "hq": 4, "hkv": 2, "d": 16, "page": 16},
        {"id": "gqa-b1", "b": 1, "s": 64, "hq": 2, "hkv": 2, "d": 16, "page": 16},
    ],
    "mla_decode": [{"id": "mla-lens", "b": 3, "s": 100, "lens": [100, 64, 37], "h": 3, "sq": 2, "page": 16}],
}
PROGRAMS = {
    "paged_attention": ["--implementation", "xla", "--ids", "b2"],
    "paged_attention_deprecated": ["--interpret", "--ids", "b2"],
    "mla_decode": ["--ways", "xla"],
}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """load(name) -> (module, its run over `SHAPES`, which gives the rows of the table)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str):
        module = importlib.import_module(name)
        for owner in (module, points):
            for constant in TINY.keys() & vars(owner).keys():
                monkeypatch.setattr(owner, constant, TINY[constant])
        monkeypatch.setattr(module, "device_seconds", lambda run, repeats=5: SECONDS)
        monkeypatch.setattr(module, "warm_up", lambda run: None)

        def run(*options: str) -> list[dict[str, str]]:
            shapes, out = tmp_path / "shapes.json", tmp_path / "out.csv"
            shapes.write_text(json.dumps(SHAPES))
            module.main(["--shapes", str(shapes), "--out", str(out), *PROGRAMS[name], *options])
            with out.open(newline="") as file:
                return list(csv.DictReader(file))

        return module, run

    return load


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("paged_attention", "pallas-attn"),
        ("paged_attention_deprecated", "jax-deprecated"),
        ("mla_decode", "pallas_attn-xla"),
    ],
)
def test_benchmark_writes_what_it_checked_and_marks_what_is_wrong(program, monkeypatch, name, peer):
    module, run = program(name)
    if name == "paged_attention_deprecated":
        monkeypatch.setattr(module, "variants", lambda point: [dict(k_splits=2, num_warps=4)])
    compiled, compile_ = {}, module.build

    def build(*arguments):
        """Once for all runs of this test."""
        key = str(arguments)
        compiled[key] = compiled.get(key) or compile_(*arguments)
        return compiled[key]

    monkeypatch.setattr(module, "build", build)
    (row,) = run()
    op = "mla_decode" if name == "mla_decode" else "gqa_decode"
    about = [row[column] for column in ("id", "device", "jax", "peer", "op", "method")]
    assert about == [SHAPES[op][0]["id"], jax.devices()[0].device_kind, jax.__version__, peer, op, "loop"]
    calls = 2 + 2 * (name == "mla_decode")  # of whose loop nothing is kept
    assert row["us"] == f"{SECONDS / calls * 1e6:.2f}", "of one call"
    assert 0 <= float(row["err"]) < 8e-3
    assert "WRONG" not in row["note"]
    assert run("--max-seconds", "-1") == []

    for call, sequence in ((0, 0), (-1, -1)):

        def broken(*arguments, call=call, sequence=sequence):
            """One sequence of one call is 10% off."""
            built = build(*arguments)
            run = built[0] if isinstance(built, tuple) else built

            def wrong(*inputs):
                outs = list(run(*inputs))
                outs[call] = outs[call].at[sequence].multiply(1.1)
                return tuple(outs)

            if name == "paged_attention":
                return built._replace(run=wrong)
            return (wrong, *built[1:]) if isinstance(built, tuple) else wrong

        monkeypatch.setattr(module, "build", broken)
        (row,) = run()
        assert row["note"] == "WRONG"


def test_nan_in_any_call_is_an_error(program):
    module, _ = program("mla_decode")
    right = np.ones((2, 1, 3, 4), np.float32)
    for call in (0, 1):
        outs = [right.copy(), right.copy()]
        assert module.worst_error(outs, [right, right]) == 0
        outs[call][1, 0, 2, 3] = np.nan
        assert np.isnan(module.worst_error(outs, [right, right]))


def test_the_timed_loop_of_plain_jnp_keeps_both_products(program, monkeypatch):
    """XLA drops what only an unused output needs."""
    module, _ = program("mla_decode")
    monkeypatch.setattr(module, "MOST_SETS", 3)
    shape = module.Shape("", (100, 64), 3, 1, 16)
    call, schedule = module.attend(shape, "xla")
    query, cache, tables, lengths = module.input_shapes(shape)
    dots = call.lower(query, cache, tables[0], lengths, schedule).compile().as_text().count(" dot(")
    assert dots >= 2
    # Of the loop's call, which is there once for all tables, and of the two behind it.
    assert module.build(shape, "xla")[0].as_text().count(" dot(") == 3 * dots
    unguarded = jax.jit(functools.partial(module.looped, call, shape.num_rounds, False))
    compiled = unguarded.lower(module.input_shapes(shape), schedule).compile()
    assert compiled.as_text().count(" dot(") == 3 * (dots - 1) + 2 * dots, "and so it would be without care"


def test_ids_say_what_comes_first(program, tmp_path):
    module, _ = program("paged_attention")
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    for ids, expected in (
        ([""], ["gqa-b2", "gqa-b1"]),
        (["b1", "gqa"], ["gqa-b1", "gqa-b2"]),
        (["b1"], ["gqa-b1"]),
    ):
        assert [cell.id for cell in module.shape_cells(path, ids)] == expected


def test_deprecated_takes_the_fastest_variant_that_is_right(program, monkeypatch):
    module, run = program("paged_attention_deprecated")
    monkeypatch.setattr(module, "variants", lambda point: [dict(k_splits=k) for k in (1, 2, 4)])
    monkeypatch.setattr(module, "build", lambda *_: lambda inputs: (inputs.query,) * 2)
    errors = iter([1e-3] * 4 + [1.0] * 4 + [1e-3] * 4)
    seconds = iter([3e-3, 1e-3, 2e-3])
    monkeypatch.setattr(module.tune, "worst_error", lambda *_: next(errors))
    monkeypatch.setattr(module, "device_seconds", lambda run, repeats: next(seconds))
    (row,) = run()
    assert (row["us"], row["note"]) == ("1000.00", "k_splits=4")


def test_variants_of_the_deprecated_kernel_fit_the_table(program):
    module, _ = program("paged_attention_deprecated")
    for b, s in ((1, 1024), (1, 8192), (64, 32768), (256, 1024)):
        found = module.variants(points.Point(b, s, 32, 8, 128, 16, "bfloat16", "bfloat16"))
        assert len({tuple(variant.items()) for variant in found}) == 2
        for variant in found:
            pages = s // 16 // variant["k_splits"]
            assert pages % min(pages, variant["pages_per_compute_block"]) == 0


def test_shapes_of_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    shapes = importlib.import_module("shapes")
    mla = importlib.import_module("mla_decode").shapes_of(None, "sn4096-h16-q1|b8-")
    assert [shape.id for shape in mla][:2] == ["mla-b128-sn4096-h16-q1", "mla-b8-s1024-h16-q1"]
    assert 1000 < np.std(mla[0].lengths) < 3000
    assert len({s["id"] for s in shapes.mla_decode()}) == 58
    cells = importlib.import_module("paged_attention").shape_cells(None, [""])
    assert len(cells) == len({cell.id for cell in cells}) == 47
