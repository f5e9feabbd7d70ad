"""Measured config files: which entry a call takes, and `pallas-attn tune`, which writes them."""

import dataclasses
import functools
import json
import math
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import LocalStride, paged_attention
from pallas_attn._call import configs
from pallas_attn._call.device import Device
from pallas_attn.cli import main
from pallas_attn.cli import tune as tune_command
from pallas_attn.ops.paged_attention import PagedAttentionConfig, api
from pallas_attn.ops.paged_attention.config import most_splits
from pallas_attn.tuning import points

KEY = {
    "head_dim": 16,
    "page_size": 16,
    "dtype": "bfloat16",
    "rows": [1, 16],
    "streams": [1, 8],
    "max_len": [65, None],
}
TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--num-seqs", "2"]


def resolved(monkeypatch, num_seqs: int = 2, max_pages: int = 8) -> PagedAttentionConfig:
    """The config that a call of 2 query heads over 1 KV head takes."""
    taken = []
    monkeypatch.setattr(
        api.dispatch,
        "resolve",
        lambda *_: (
            "interpret",
            lambda query, *_, config, **__: (taken.append(config), (query, query[..., 0]))[1],
        ),
    )
    pool = jnp.zeros((4, 16, 1, 16), jnp.bfloat16)
    query = jnp.zeros((num_seqs, 2, 16), jnp.bfloat16)
    paged_attention(
        query, pool, pool, jnp.zeros((num_seqs, max_pages), jnp.int32), jnp.zeros(num_seqs, jnp.int32)
    )
    monkeypatch.undo()
    return taken[0]


def write(folder, **config) -> Path:
    path = folder / api.current_device().slug / "paged_attention.json"
    configs.save(path, [{"key": KEY, "config": config}])
    return path


def test_a_call_takes_the_entry_whose_key_agrees(tmp_path, monkeypatch):
    heuristic = resolved(monkeypatch)
    write(tmp_path, block_kv=64, num_warps=2, num_stages=7)

    def take(**call):
        monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
        return resolved(monkeypatch, **call)

    measured = take()
    assert (measured.block_kv, measured.num_warps, measured.num_stages) == (64, 2, 7)
    assert measured.block_q == heuristic.block_q, "what the entry leaves out is the heuristic's"
    assert take(num_seqs=9).num_stages != 7, "beyond streams"
    assert take(max_pages=4).num_stages != 7, "below max_len"
    assert resolved(monkeypatch) == heuristic, "without the variable"


def test_splits_follow_the_call_not_the_file(tmp_path, monkeypatch):
    write(tmp_path, target_programs=64, min_split_tokens=16)
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    assert resolved(monkeypatch, max_pages=8).num_splits == 8
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    assert resolved(monkeypatch, max_pages=64).num_splits == most_splits(2, 1024, 64, 16) == 64


def test_writing_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "device" / "op.json"
    configs.save(path, [{"key": {}, "config": {"block_kv": 16}}], device="one")
    whole = path.read_text()
    monkeypatch.setattr(configs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        configs.save(path, [{"key": {}, "config": {"block_kv": 32}}])
    assert path.read_text() == whole
    assert json.loads(whole) == {"device": "one", "entries": [{"key": {}, "config": {"block_kv": 16}}]}


def test_everybody_may_read_what_was_measured(tmp_path):
    umask = os.umask(0o022)
    try:
        configs.save(tmp_path / "op.json", [])
    finally:
        os.umask(umask)
    assert (tmp_path / "op.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "\xff", '{"entries": [{}]}'),
        '{"entries": [{"key": {"nonsense": [1, 2]}, "config": {}}]}',
        '{"entries": [{"key": {}, "config": {"foo": 1}}]}',
        '{"entries": [{"key": {}, "config": {"block_kv": 1.5}}]}',
    ],
)
def test_a_file_that_holds_no_configs_is_named(text, tmp_path, monkeypatch):
    path = write(tmp_path, block_kv=16)
    path.write_bytes(text.encode("latin-1"))
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    configs._measured.cache_clear()
    with pytest.raises(ValueError, match=re.escape(str(path))):
        resolved(monkeypatch)
    configs._measured.cache_clear()


def test_ranges_meet_at_geometric_means():
    lengths = [1024, 8192, 32768]
    ranges = [tune_command._range(value, lengths) for value in lengths]
    assert ranges == [[1, 2896], [2897, 16384], [16385, None]]
    assert tune_command._range(8, [8]) == [1, None]


def entry(num_seqs: int, num_kv_heads: int, max_len: int, us: float, **key) -> dict:
    about = dict(num_seqs=num_seqs, num_kv_heads=num_kv_heads, max_len=max_len, us=us)
    return {"key": {**KEY, **key}, "config": {}, "measured": about}


def test_what_was_measured_before_stays_unless_measured_anew():
    old = [
        entry(1, 8, 1024, 10.0),
        entry(16, 8, 1024, 11.0),
        entry(1, 8, 1024, 12.0, dtype="int8"),
        {"key": KEY, "config": {}},  # nobody knows what for
    ]
    new = [entry(2, 64, 1024, 20.0), entry(1, 1, 1024, 21.0), entry(1, 1, 4096, 22.0)]
    merged = tune_command._merged(old, new)
    assert [e["measured"]["us"] for e in merged] == [21.0, 22.0, 10.0, 20.0, 12.0]
    assert [e["key"]["streams"] for e in merged] == [[1, 2], [1, 2], [3, 32], [33, None], KEY["streams"]]
    assert [e["key"]["max_len"] for e in merged[:3]] == [[1, 2048], [2049, None], [1, None]]
    assert merged[-1] == old[2], "of another kind"


def test_candidates_are_distinct_and_begin_with_the_heuristic(monkeypatch):
    monkeypatch.setattr(points, "current_device", lambda: Device("gpu", "one", 132, 90))
    for num_seqs, max_len in ((2, 64), (8, 8192), (512, 8192)):
        point = points.Point(num_seqs, max_len, 2, 1, 16, 16, "bfloat16", "float8_e4m3fn")
        configs = [point.config(**fields) for fields in points.candidates(point)]
        assert configs[0] == point.config()
        assert len(set(configs)) == len(configs) > 3


def test_candidates_for_one_long_stream_cut_it_finely(monkeypatch):
    def least(num_kv_heads: int, max_len: int) -> set[int]:
        point = points.Point(1, max_len, num_kv_heads, num_kv_heads, 16, 16, "bfloat16", "bfloat16")
        return {config.min_split_tokens for config in (point.config(**f) for f in points.candidates(point))}

    device = dataclasses.replace(points.current_device(), num_cores=132)
    monkeypatch.setattr(points, "current_device", lambda: device)
    assert least(1, 8192) > {64, 128}
    assert least(8, 4096) == {128, 256}
    assert least(8, 8192) == {256}
    assert least(8, 1024) == {64}


def test_calls_that_read_little_take_turns_among_more_pages():
    """Else the window of a long table would be timed out of a cache."""
    window = points.Point(1, 32768, 8, 8, 128, 16, "bfloat16", "bfloat16", tokens_read=1024)
    short, long = (dataclasses.replace(window, max_len=n, tokens_read=None) for n in (1024, 32768))
    assert (
        len(points.input_shapes(window).tables) == len(points.input_shapes(short).tables) == points.MOST_SETS
    )
    assert len(points.input_shapes(long).tables) < 16


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_inputs_let_every_token_count(num_kv_heads, monkeypatch):
    """Else a lost page could pass the check."""
    monkeypatch.setattr(points, "MOST_SETS", 1)
    inputs = points.inputs_of(points.Point(3, 64, 4, num_kv_heads, 64, 16, "bfloat16", "bfloat16"))
    queries = inputs.query.astype(jnp.float32).reshape(-1, 64)
    keys = inputs.key_cache.astype(jnp.float32).reshape(-1, 64)
    logits = queries @ keys.T / 8
    assert 0.9 < jnp.std(logits) < 1.1
    assert jnp.max(logits) < 6, "8 if a query were a key"


@pytest.fixture
def two_candidates(monkeypatch):
    small = [{}, {"block_kv": 16}]
    monkeypatch.setattr(tune_command, "candidates", lambda point: small)
    monkeypatch.setattr(points, "MOST_SETS", 1)


def test_tune_writes_what_calls_then_read(two_candidates, tmp_path, monkeypatch, capsys):
    path = tmp_path / api.current_device().slug / "paged_attention.json"
    other = {"key": {**KEY, "dtype": "int8"}, "config": {"block_kv": 32}}
    configs.save(path, [other, {"key": KEY, "config": {"block_kv": 128}}])
    command = ["tune", *TINY, "--max-len", "64", "--output", str(tmp_path), "--implementation", "interpret"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"wrote {path}" in printed.replace("\n", "")
    assert f"PALLAS_ATTN_CONFIGS={tmp_path}" in printed.replace("\n", "")
    ours, kept = json.loads(path.read_text())["entries"]
    assert kept == other
    assert ours["key"] == {**KEY, "streams": [1, None], "max_len": [1, None]}
    assert ours["measured"]["us"] <= ours["measured"]["heuristic_us"]
    assert 0 < ours["measured"]["error"] < points.LARGEST_ERROR["bfloat16"]
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    assert resolved(monkeypatch).block_kv == ours["config"]["block_kv"]


@pytest.mark.parametrize("failure", ["wrong", "refused"])
def test_the_time_of_a_candidate_that_fails_does_not_count(failure, monkeypatch):
    point = points.Point(2, 64, 2, 1, 16, 16, "bfloat16", "bfloat16")
    monkeypatch.setattr(points, "MOST_SETS", 1)
    if failure == "wrong":
        monkeypatch.setitem(points.LARGEST_ERROR, "bfloat16", 1e-9)
    fields = {"block_kv": 16} if failure == "wrong" else {"block_kv": 17}
    (timing,) = points.measure(point, [fields], "interpret")
    assert timing.microseconds == math.inf
    assert timing.problem is not None
    assert ("wrong: error" if failure == "wrong" else "a power of two >= 16, got 17") in timing.problem


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is nothing to refuse")
def test_tune_without_a_gpu_is_one_line(capsys):
    assert main(["tune"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.err
        == "pallas-attn: error: tune: argument 'device': expected an NVIDIA GPU to measure on, got 'cpu'\n"
    )
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-seqs", "0"], "argument '--num-seqs': expected at least 1, got 0"),
        (
            ["--num-heads", "3", "--num-kv-heads", "2"],
            "'--num-heads': expected a multiple of --num-kv-heads (2), got 3",
        ),
        (["--output", "/dev/null/here"], "Not a directory"),
    ],
)
def test_tune_refuses(arguments, message, capsys):
    assert main(["tune", "--implementation", "interpret", *arguments]) == 1
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
