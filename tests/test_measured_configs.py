"""Measured config files: which entry a call takes, and what stays in a file that is written anew."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from configs_support import resolved

from pallas_attn._call import configs
from pallas_attn._call.device import current_device
from pallas_attn.ops.paged_attention import PagedAttentionConfig
from pallas_attn.tuning import entries

KEY = dict(head_dim=16, page_size=16, dtype="bfloat16", rows=[1, 16], streams=[1, 8], max_len=[65, None])
TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--num-seqs", "2"]


def write(folder, **config) -> Path:
    path = folder / current_device().slug / "paged_attention.json"
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
    """Short sequences are left whole; all others are cut as their lengths ask for."""

    def splits(target_programs, max_pages):
        write(tmp_path, target_programs=target_programs, min_split_tokens=16)
        monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
        config = resolved(monkeypatch, max_pages=max_pages)
        assert (config.target_programs, config.min_split_tokens) == (target_programs, 16), "the entry's"
        return config.num_splits

    assert splits(8, 8) == 1
    assert splits(8, 4096) == 0


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
        *("", "{", "[]", "{}", "\xff", '{"entries": [{}]}', '{"entries": 5}', '{"entries": null}'),
        '{"entries": [{"key": {"nonsense": [1, 2]}, "config": {}}]}',
        '{"entries": [{"key": {}, "config": {"foo": 1}}]}',
        '{"entries": [{"key": {}, "config": {"block_kv": 1.5}}]}',
        '{"entries": [{"key": {}, "config": {"num_warps": 0}}]}',
        # The heuristic would take it for the call's.
        '{"entries": [{"key": {}, "config": {"rows": 3}}]}',
        '{"entries": [{"key": {}, "config": {}, "measured": {"num_seqs": 2}}]}',
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


def test_one_entry_of_a_folder_hides_no_packaged_one(tmp_path, monkeypatch):
    heuristic = resolved(monkeypatch)
    user, packaged = tmp_path / "user", tmp_path / "packaged"
    monkeypatch.setattr(configs, "packaged_configs", lambda: packaged)
    configs._measured.cache_clear()
    for folder, kinds in ((packaged, {"bfloat16": 7, "float16": 6}), (user, {"float32": 5, "bfloat16": 2})):
        found = [{"key": {"dtype": name}, "config": {"num_stages": n}} for name, n in kinds.items()]
        configs.save(folder / current_device().slug / "paged_attention.json", found)
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(user))

    def stages(dtype: str) -> int:
        key, guess = {"dtype": dtype}, lambda **fields: dataclasses.replace(heuristic, **fields)
        return configs.resolve("paged_attention", PagedAttentionConfig, None, key, guess).num_stages

    assert [stages(name) for name in ("float32", "float16")] == [5, 6]
    assert stages("bfloat16") == 2, "for the same calls the user's own comes first"
    assert stages("int8") == heuristic.num_stages
    configs._measured.cache_clear()


def test_ranges_meet_at_geometric_means():
    lengths = {1024, 8192, 32768}
    ranges = [entries._range(value, lengths) for value in sorted(lengths)]
    assert ranges == [[256, 2896], [2897, 16384], [16385, 131072]]


def test_an_entry_serves_nothing_far_from_what_was_measured():
    """What lies between is the heuristic's."""
    assert entries._range(8, {8}) == [2, 32]
    assert entries._range(1, {1}) == [1, 4]
    assert [entries._range(value, {1, 512}) for value in (1, 512)] == [[1, 4], [128, 2048]]


@pytest.mark.parametrize(
    ("rows", "served"),
    [(1, [1, 16]), (16, [1, 16]), (17, [17, 32]), (64, [33, 64]), (65, [65, None]), (128, [65, None])],
)
def test_an_entry_is_for_the_rows_that_fill_the_same_tile(rows, served):
    assert entries._rows(rows) == served
    assert rows in range(served[0], (served[1] or rows) + 1), "its own among them"


def entry(num_seqs: int, num_kv_heads: int, max_len: int, us: float, **key) -> dict:
    about = dict(num_seqs=num_seqs, num_kv_heads=num_kv_heads, rows=4, max_len=max_len, us=us)
    return {"key": {**KEY, **key}, "config": {}, "measured": about}


def test_what_was_measured_before_stays_unless_measured_anew():
    old = [
        entry(1, 8, 1024, 10.0),
        entry(16, 8, 1024, 11.0),
        entry(1, 8, 1024, 12.0, dtype="int8"),
        {"key": KEY, "config": {}},  # written by hand
    ]
    new = [entry(2, 64, 1024, 20.0), entry(1, 1, 1024, 21.0), entry(1, 1, 4096, 22.0)]
    first, *shared, last = entries.merged(old, new)
    assert (first, last) == (old[2], old[3]), "of another kind, and by hand"
    assert [e["measured"]["us"] for e in shared] == [21.0, 22.0, 10.0, 20.0]
    assert [e["key"]["streams"] for e in shared] == [[1, 2], [1, 2], [3, 32], [33, 512]]
    assert [e["key"]["max_len"] for e in shared[:3]] == [[256, 2048], [2049, 16384], [256, 4096]]


def test_a_point_measured_for_a_folder_leaves_the_packaged_ones_their_share():
    packaged = entries.merged([], [entry(1, n, m, 0.0) for n in (1, 8, 64) for m in (1024, 8192)])
    own = entries.merged([], [entry(1, 8, 2048, 1.0), entry(1, 16, 8192, 2.0)], packaged)
    assert [e["measured"]["us"] for e in own] == [1.0, 2.0], "theirs are not copied"
    assert own[0]["key"]["streams"] == [3, 11]
    assert own[0]["key"]["max_len"] == [1449, 4096]

    def taken(streams: int, max_len: int) -> dict:
        for e in [*own, *packaged]:
            (least, most), (short, long) = e["key"]["streams"], e["key"]["max_len"]
            if least <= streams <= (most or streams) and short <= max_len <= (long or max_len):
                return e["measured"]
        raise AssertionError("nothing for this call")

    for e in [*own, *packaged]:
        about = e["measured"]
        assert taken(about["num_kv_heads"], about["max_len"]) is about
