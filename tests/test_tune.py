"""`pallas-attn tune`, which writes measured config files."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest
from configs_support import resolved

from pallas_attn import LocalStride, mla_decode, paged_attention
from pallas_attn._call import configs, dispatch
from pallas_attn._call.device import Device, current_device
from pallas_attn.cli import main
from pallas_attn.cli import tune as tune_command
from pallas_attn.cli.tune import TuneOptions, run_tune
from pallas_attn.ops.mla_decode import MLADecodeConfig
from pallas_attn.ops.mla_decode import api as mla_api
from pallas_attn.ops.mla_decode import config as mla_config
from pallas_attn.ops.paged_attention import config as paged_config
from pallas_attn.testing import cases
from pallas_attn.tuning import errors, paged, points, registry, timing
from pallas_attn.tuning import mla_decode as tuned_mla_decode
from pallas_attn.tuning import paged_attention as tuned_paged_attention
from pallas_attn.tuning import ragged_attention as tuned_ragged_attention
from pallas_attn.tuning.mla_decode import MLADecodePoint
from pallas_attn.tuning.paged_attention import PagedAttentionPoint
from pallas_attn.tuning.ragged_attention import RaggedAttentionPoint

KEY = dict(head_dim=16, page_size=16, dtype="bfloat16", rows=[1, 16], streams=[1, 8], max_len=[65, None])
TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--num-seqs", "2"]


def paged_point(num_seqs: int, max_len: int, num_heads: int = 2, num_kv_heads: int = 1, **sizes):
    defaults = dict(head_dim=16, page_size=16)
    case = cases.served(num_seqs, max_len, num_heads, num_kv_heads, **{**defaults, **sizes})
    return PagedAttentionPoint(case=case)


def mla_point(num_seqs: int, max_len: int, num_heads: int = 2, scheduled: bool = True) -> MLADecodePoint:
    case = cases.MLADecodeCase((max_len,) * num_seqs, num_heads, spare_pages=0)
    return MLADecodePoint(case=case, scheduled=scheduled)


@pytest.fixture
def h100(monkeypatch):
    device = Device("gpu", "one", 132, 90)
    for module in (tuned_paged_attention, tuned_mla_decode, tuned_ragged_attention, paged_config, mla_config):
        monkeypatch.setattr(module, "current_device", lambda: device)


@pytest.mark.parametrize(
    "point",
    [
        *(paged_point(n, m, cache_dtype="float8_e4m3fn") for n, m in ((2, 64), (8, 8192), (512, 8192))),
        *(mla_point(2, 4096, heads, way) for heads in (16, 32, 128) for way in (True, False)),
    ],
    ids=lambda point: f"{point.case.id}-{point.kind}",
)
def test_candidates_are_distinct_and_begin_with_the_heuristic(point, h100):
    configs = [point.config(**fields) for fields in point.candidates()]
    assert configs[0] == point.config()
    assert len(set(configs)) == len(configs) > 3


def test_a_schedule_decides_the_splits_so_only_tiles_are_tried_with_one(h100):
    def splits(scheduled: bool) -> set[tuple[int, int]]:
        point = mla_point(2, 4096, 16, scheduled)
        configs = [point.config(**fields) for fields in point.candidates()]
        return {(config.target_programs, config.min_split_tokens) for config in configs}

    assert len(splits(scheduled=True)) == 1
    assert len(splits(scheduled=False)) == 3


def test_candidates_for_one_long_stream_cut_it_finely(h100):
    def least(num_kv_heads: int, max_len: int) -> set[int]:
        point = paged_point(1, max_len, num_kv_heads, num_kv_heads)
        return {fields["min_split_tokens"] for fields in point.candidates() if "min_split_tokens" in fields}

    assert least(1, 8192) == {64, 128}
    assert least(8, 4096) == {128, 256}
    assert least(8, 8192) == {256}
    assert least(8, 1024) == {64}


@pytest.fixture
def small(monkeypatch):
    """One set of pages, two calls a round, two runs a repeat."""
    for module, name in ((timing, "MOST_SETS"), (timing, "QUEUED"), (points, "REPEATS")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(timing, "LEAST_CALLS", 2)
    monkeypatch.setattr(paged, "BLOCK", 1 << 14)


@pytest.mark.once
@pytest.mark.parametrize(
    "point", [paged_point(3, 64, 4, n, head_dim=64) for n in (1, 2, 4)] + [mla_point(3, 64, 4)]
)
def test_inputs_let_every_token_count(point, small, monkeypatch):
    """Else a lost page could pass the check."""
    monkeypatch.setattr(paged, "BLOCK", 1 << 18)
    inputs = point.inputs()
    query, pool, *_ = inputs.operands
    head_dim = query.shape[-1]
    queries, keys = (array.astype(jnp.float32).reshape(-1, head_dim) for array in (query, pool))
    logits = queries @ keys.T * head_dim**-0.5
    assert 0.9 < jnp.std(logits) < 1.1
    assert jnp.max(logits) < 6, "8 if a query were a key"


def test_calls_take_turns_among_pages_that_no_cache_holds_together(monkeypatch):
    monkeypatch.setattr(timing, "ROTATE_BYTES", 5 * 2 * 3 * 64 * 16 * 2)
    monkeypatch.setattr(paged, "BLOCK", 1 << 10)
    tables = paged_point(3, 64).inputs().tables
    assert len(tables) == 5
    pages = [set(table.reshape(-1).tolist()) for table in tables]
    assert len(set.union(*pages)) == sum(map(len, pages)) == 5 * 3 * 4


@pytest.fixture
def two_candidates(small, monkeypatch):
    for point in registry.OPS.values():
        monkeypatch.setattr(point, "candidates", lambda self: [{}, {"block_kv": 16}])


def tune(*options: str, op: str = "paged_attention", sizes: list[str] = TINY) -> int:
    return main(["tune", "--op", op, *sizes, "--max-len", "64", "--implementation", "interpret", *options])


@pytest.mark.once
def test_tune_writes_what_calls_then_read(two_candidates, tmp_path, monkeypatch, capsys):
    path = tmp_path / current_device().slug / "paged_attention.json"
    kept = [
        {"key": {**KEY, "dtype": "int8"}, "config": {"block_kv": 32}},
        {"key": {**KEY, "max_len": [33, None]}, "config": {"block_kv": 128}},
    ]
    configs.save(path, kept)
    assert tune("--output", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert f"\nwrote {path}\n" in printed
    assert f" PALLAS_ATTN_CONFIGS={tmp_path} " in printed
    other, ours, same = json.loads(path.read_text())["entries"]
    assert [other, same] == kept, "that for the same call behind what was measured"
    assert ours["key"] == {
        **KEY,
        "query_itemsize": 2,
        "layout": "NHD",
        "streams": [1, 8],
        "max_len": [16, 256],
    }
    assert ours["measured"]["us"] <= ours["measured"]["heuristic_us"]
    assert 0 < ours["measured"]["error"] < errors.LARGEST_ERROR["bfloat16"]
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    assert resolved(monkeypatch).block_kv == ours["config"]["block_kv"]


def test_an_op_is_an_entry_of_the_registry(small, tmp_path, monkeypatch):
    """Whatever it is called and reads: this one's file, key and config are its own."""

    class Point(PagedAttentionPoint):
        def key(self) -> dict:
            return {"color": "red"}

        def candidates(self) -> list[points.Fields]:
            return [{"block_kv": 16}]

    monkeypatch.setitem(registry.OPS, "red_attention", Point)
    sizes = dict(num_heads=2, num_kv_heads=1, head_dim=16)
    run_tune(TuneOptions("red_attention", sizes, [2], [64], tmp_path, "interpret"))
    [found] = json.loads((tmp_path / current_device().slug / "red_attention.json").read_text())["entries"]
    assert found["key"] == {"color": "red", "rows": [1, 16], "streams": [1, 8], "max_len": [16, 256]}
    assert found["config"]["block_kv"] == 16


def ragged_point(q_len: int) -> RaggedAttentionPoint:
    return next(
        p
        for p in RaggedAttentionPoint.variants(64, 4096, **RaggedAttentionPoint.sizes)
        if p.case.q_len == q_len
    )


@pytest.mark.parametrize(("q_len", "launch", "other"), [(512, "long", "short"), (1, "short", "long")])
def test_ragged_points_are_of_one_launch(q_len, launch, other, h100):
    """What an entry keeps is of the launch that was measured; the other stays the heuristic's."""
    point = ragged_point(q_len)
    candidates = point.candidates()
    made = [point.config(**fields) for fields in candidates]
    assert made[0] == point.config()
    assert len(set(made)) == len(made) > 3
    assert len({getattr(config, other) for config in made}) == 1
    kept = point.chosen(candidates[1])
    assert kept.keys() == {launch}
    assert point.config(**point.fields_of(kept)) == made[1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_kb'"):
        point.config(block_kb=16)


@pytest.mark.slow
@pytest.mark.once
def test_tune_serves_ragged_attention_too(small, tmp_path, monkeypatch):
    monkeypatch.setattr(RaggedAttentionPoint, "candidates", lambda self: [{}])
    op = "ragged_paged_attention"
    assert tune("--output", str(tmp_path), op=op) == 0
    found = json.loads((tmp_path / current_device().slug / f"{op}.json").read_text())["entries"]
    assert [e["key"]["rows"] for e in found] == [[1, 16], [65, None]]
    assert all("block_kv" in e["config"]["long"] for e in found), "two decoded sequences have one launch"
    assert all(0 < e["measured"]["error"] < errors.LARGEST_ERROR["bfloat16"] for e in found)


@pytest.mark.once
@pytest.mark.slow
def test_tune_serves_mla_decode_too(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MLADecodePoint, "candidates", lambda self: [{}])
    sizes = ["--num-heads", "2", "--num-seqs", "2"]
    assert tune("--output", str(tmp_path), op="mla_decode", sizes=sizes) == 0
    found = json.loads((tmp_path / current_device().slug / "mla_decode.json").read_text())["entries"]
    assert [e["key"]["scheduled"] for e in found] == [False, True]
    assert all(0 < e["measured"]["error"] < errors.LARGEST_ERROR["bfloat16"] for e in found)
    assert "with a schedule" in capsys.readouterr().out


@pytest.mark.parametrize("num_seqs", [2, 9])
def test_calls_of_mla_decode_read_measured_configs(num_seqs, tmp_path, monkeypatch):
    key = dict(
        page_size=64, dtype="bfloat16", scheduled=False, rows=[1, 16], streams=[1, 8], max_len=[64, None]
    )
    path = tmp_path / current_device().slug / "mla_decode.json"
    configs.save(path, [{"key": key, "config": {"num_stages": 9}}])
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    taken = []

    def kernel(operands, *, config: MLADecodeConfig):
        taken.append(config)
        return operands.query[..., :512], operands.query[..., 0]

    monkeypatch.setitem(mla_api.OP.implementations, "xla", dispatch.Implementation(kernel))
    query, pool = jnp.zeros((num_seqs, 1, 2, 576), jnp.bfloat16), jnp.zeros((1, 64, 1, 576), jnp.bfloat16)
    mla_decode(query, pool, jnp.zeros((num_seqs, 1), jnp.int32), jnp.zeros(num_seqs, jnp.int32))
    assert (taken[0].num_stages == 9) == (num_seqs == 2), "9 sequences are beyond streams"


@pytest.mark.once
def test_only_what_may_be_the_fastest_is_timed_again(small, monkeypatch):
    """A fifth slower is out at once; 3% may be chance, and then the median of all counts."""
    monkeypatch.setattr(points, "REPEATS", 3)
    taken = iter([[1.2], [1.0], [1.03], [0.8, 1.1], [0.9, 0.95]])
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: next(taken))
    choices = [{"block_kv": size} for size in (16, 17, 32, 64)]
    timings = list(points.measure(paged_point(2, 64), choices, "interpret"))
    calls = timing.num_calls(1, timing.LEAST_CALLS)
    assert [t.microseconds * calls / 1e6 for t in timings] == pytest.approx([1.2, math.inf, 1.0, 0.95])
    assert next(taken, None) is None


@pytest.mark.parametrize("failure", ["wrong", "refused"])
def test_the_time_of_a_candidate_that_fails_does_not_count(failure, small, monkeypatch):
    if failure == "wrong":
        monkeypatch.setitem(errors.LARGEST_ERROR, "bfloat16", 1e-9)
    fields = {"block_kv": 16} if failure == "wrong" else {"block_kv": 17}
    (timing,) = points.measure(paged_point(2, 64), [fields], "interpret")
    assert timing.microseconds == math.inf
    assert timing.problem is not None
    assert ("wrong: error" if failure == "wrong" else "a power of two >= 16, got 17") in timing.problem


@pytest.mark.parametrize(
    ("samples", "expected"), [([[0.0], [-1.0], [2.0], [2.0]], 2.0), ([[0.0], [-1.0], [0.0]], math.inf)]
)
def test_no_time_is_never_the_fastest(samples, expected, small, monkeypatch):
    """It is measured again, and fails in words where that does not help."""
    monkeypatch.setattr(points, "REPEATS", 2)
    taken = iter(samples)
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: next(taken))
    [found] = points.measure(paged_point(2, 64), [{}], "interpret")
    calls = timing.num_calls(1, timing.LEAST_CALLS)
    assert found.microseconds * calls / 1e6 == pytest.approx(expected)
    assert (found.problem is None) == math.isfinite(expected)
    assert next(taken, None) is None


def test_no_time_in_a_repeat_does_not_count_either(monkeypatch):
    taken = iter([[1.0, 0.0], [-1.0], [0.0]])
    monkeypatch.setattr(timing, "device_samples", lambda run, repeats: next(taken))
    [found] = points._repeated([points._Contender({}, lambda: None, 0.0, [1.0])], 1)
    assert found.problem == "RuntimeError: no time above 0 in 3 measurements: the host is disturbed"
    assert found.microseconds == math.inf


def test_what_no_memory_holds_is_one_line(tmp_path, monkeypatch, capsys):
    def inputs(self):
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(PagedAttentionPoint, "inputs", inputs)
    assert tune("--output", str(tmp_path)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("could be timed, nothing is written: MemoryError: Unable to allocate 8.00 TiB")


@pytest.mark.parametrize("op", registry.OPS)
def test_float16_is_tuned(op, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tune_command, "measure", lambda point, choices, _: [points.Timing(choices[0], 3.0, 1e-3, None)]
    )
    options = ["--dtype", "float16", "--num-seqs", "2", "--num-heads", "8"]
    assert tune("--output", str(tmp_path), op=op, sizes=options) == 0
    found = json.loads((tmp_path / current_device().slug / f"{op}.json").read_text())["entries"]
    assert {entry["key"]["dtype"] for entry in found} == {"float16"}


def test_tune_of_which_nothing_came_writes_nothing(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PagedAttentionPoint, "candidates", lambda self: [{"block_kv": 17}])
    path = tmp_path / current_device().slug / "paged_attention.json"
    configs.save(path, [{"key": KEY, "config": {"block_kv": 32}}])
    before = path.read_text()
    assert tune("--output", str(tmp_path)) == 1
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith(
        "pallas-attn: error: tune: no config of paged_attention could be timed, nothing is written: "
    )
    assert last.endswith("a power of two >= 16, got 17")
    assert (path.read_text(), captured.out) == (before, "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is nothing to refuse")
@pytest.mark.parametrize("named", [[], ["--implementation", "triton"]])
def test_tune_without_a_gpu_is_one_line(named, capsys):
    assert main(["tune", *named]) == 1
    captured = capsys.readouterr()
    assert (
        captured.err
        == "pallas-attn: error: tune: argument 'device': expected an NVIDIA GPU to measure on, got 'cpu'\n"
    )
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--num-seqs", "0"], 1, "argument '--num-seqs': expected at least 1, got 0"),
        (
            ["--max-len", "99999999999"],
            1,
            "argument '--max-len': expected at most 2147483647, got 99999999999",
        ),
        (["--page-size", "0"], 1, "argument '--page-size': expected at least 1, got 0"),
        (
            ["--num-heads", "3", "--num-kv-heads", "2"],
            1,
            "'--num-heads': expected a multiple of --num-kv-heads (2), got 3",
        ),
        (
            ["--op", "mla_decode", "--head-dim", "64"],
            1,
            "'--head-dim': expected none with --op mla_decode, got 64",
        ),
        (["--output", "/dev/null/here"], 1, "Not a directory"),
        (["--op", "foo"], 2, "'foo' is not one of 'paged_attention', 'ragged_paged_attention', 'mla_"),
        (["--implementation", "foo"], 2, "'foo' is not one of 'pallas', 'triton', 'interpret'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_tune_refuses(arguments, status, message, capsys):
    assert main(["tune", "--implementation", "interpret", *arguments]) == status
    assert message in capsys.readouterr().err


def test_what_a_call_walks_over_decides_its_config(monkeypatch):
    seen = []

    def resolve(op, kind, explicit, key, default):
        seen.append(key["max_len"])
        return default()

    monkeypatch.setattr(configs, "resolve", resolve)

    def length_of(**rules) -> int:
        pool = jax.ShapeDtypeStruct((8, 16, 2, 64), jnp.float32)
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 2048), (1,))]
        query = jax.ShapeDtypeStruct((1, 4, 64), jnp.float32)
        call = functools.partial(paged_attention, implementation="interpret", **rules)
        jax.eval_shape(call, query, pool, pool, *shapes)
        return seen[-1]

    assert length_of() == 2048 * 16
    assert length_of(sliding_window=1024) == 1024
    assert length_of(block_sparse=LocalStride(64, 2, 8)) == 2048 * 16 // 8 + 2 * 64
    # Two heads a group, each with blocks of its own.
    assert length_of(block_sparse=LocalStride(64, 1, 8, head_sliding_step=1)) == 2 * 2048 * 16 // 8 + 64
    assert length_of(block_sparse=LocalStride(64, 2, 8), sliding_window=1024) == 1024 // 8 + 2 * 64
