"""What `pallas-attn tune` keeps of the entries that calls take today, and which calls an entry is for."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_attn._call import configs
from pallas_attn._call.device import Device, current_device
from pallas_attn._call.pools import PoolShape, array_shape
from pallas_attn._tile.band import Band
from pallas_attn._tile.masking import Rules
from pallas_attn.cli import main, tune
from pallas_attn.ops.flash_attention import api as flash
from pallas_attn.ops.paged_attention import config
from pallas_attn.ops.paged_attention.api import OP
from pallas_attn.ops.paged_attention.operands import Operands
from pallas_attn.tuning import entries, points
from pallas_attn.tuning.registry import OPS

TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--num-seqs", "2"]
# By hand: for fewer rows and streams than `tune` would say, with a field that it does not write.
CONFIG = {"block_q": 16, "block_kv": 16, "num_warps": 2, "num_stages": 9, "target_programs": 8}
SIZES = dict(head_dim=16, page_size=16, dtype="bfloat16")
BEFORE = {
    "key": {**SIZES, "rows": [1, 5], "streams": [2, 3], "max_len": [33, 100]},
    "config": CONFIG,
    "measured": {"num_seqs": 2, "num_kv_heads": 1, "max_len": 64, "us": 9.0},
}


@pytest.fixture
def times(monkeypatch):
    """Microseconds of what has that many stages; all else takes 5."""
    found: dict[int, float] = {}

    def measure(point, choices, _):
        for fields in choices:
            yield points.Timing(fields, found.get(point.tiles(fields).num_stages, 5.0), 1e-3, None)

    monkeypatch.setattr(tune, "measure", measure)
    return found


def tuned(folder, old: list, *options: str) -> list:
    path = folder / current_device().slug / "paged_attention.json"
    configs.save(path, old)
    command = ["tune", *TINY, "--implementation", "interpret", "--output", str(folder)]
    assert main([*command, *(options or ["--max-len", "64"])]) == 0
    return json.loads(path.read_text())["entries"]


def test_what_calls_take_today_is_kept_whole_where_it_is_the_fastest(times, tmp_path):
    times[9] = 4.0
    ours, theirs = tuned(tmp_path, [BEFORE])
    assert (ours["config"], theirs) == (CONFIG, BEFORE)
    assert (ours["measured"]["us"], ours["measured"]["heuristic_us"]) == (4.0, 5.0)
    assert tuned(tmp_path, [ours]) == [ours], "and again"


def test_what_is_slower_gives_way(times, tmp_path):
    times[9] = 6.0
    ours, _ = tuned(tmp_path, [BEFORE])
    assert ours["config"]["num_stages"] != 9
    assert "target_programs" not in ours["config"]
    assert ours["key"]["rows"] == [1, 16]


def test_a_packaged_config_is_a_candidate_too(times, tmp_path, monkeypatch):
    packaged = tmp_path / "packaged"
    configs.save(packaged / current_device().slug / "paged_attention.json", [BEFORE])
    monkeypatch.setattr(configs, "packaged_configs", lambda: packaged)
    times[9] = 4.0
    [ours] = tuned(tmp_path / "own", [])
    assert ours["config"] == CONFIG


def test_an_entry_is_kept_where_it_is_the_fastest_and_no_further(tmp_path, monkeypatch):
    wide = {**BEFORE, "key": {**BEFORE["key"], "max_len": [33, 1000]}}

    def measure(point, choices, _):
        for fields in choices:
            fast = point.tiles(fields).num_stages == 9 and point.max_len == 64
            yield points.Timing(fields, 4.0 if fast else 5.0, 1e-3, None)

    monkeypatch.setattr(tune, "measure", measure)
    kept, other, _ = tuned(tmp_path, [wide], "--max-len", "64", "--max-len", "256")
    assert (kept["config"], kept["key"]["max_len"]) == (CONFIG, [16, 128])
    assert other["config"] != CONFIG
    assert other["key"]["max_len"] == [129, 1024]


def test_entries_by_hand_stay_where_they_serve(times, tmp_path):
    """In front of what reaches over their calls, if no call that was measured is theirs; else behind it."""
    far = {**BEFORE, "key": {**BEFORE["key"], "max_len": [101, 200]}}
    over_all = {"key": {"head_dim": 16}, "config": CONFIG}
    first, second, third = tuned(tmp_path, [far, over_all])
    assert (first, third) == (far, over_all)
    assert second["key"]["max_len"] == [16, 256]


def test_an_entry_that_is_none_is_named_before_the_work(tmp_path, capsys):
    path = tmp_path / current_device().slug / "paged_attention.json"
    configs.save(path, [{**BEFORE, "config": {"block_kv": 17}}])
    command = ["tune", *TINY, "--max-len", "64", "--implementation", "interpret", "--output", str(tmp_path)]
    assert main(command) == 1
    assert "error: tune: not an entry of measured configs: {'key'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "config"),
    [
        ("paged_attention", {"bogus": 1}),
        ("flash_attention", {"bogus": 1}),
        ("flash_attention", {"forward": {"bogus": 1}}),
        ("ragged_paged_attention", {"long_block_kv": 16}),
    ],
)
def test_what_calls_refuse_is_named_before_the_work(op, config, tmp_path, capsys):
    path = tmp_path / current_device().slug / f"{op}.json"
    configs.save(path, [{"key": {"head_dim": 16}, "config": config}])
    command = ["tune", "--op", op, *TINY, "--max-len", "64", "--implementation", "interpret"]
    assert main([*command, "--output", str(tmp_path)]) == 1
    assert "error: tune: not an entry of measured configs: {'key'" in capsys.readouterr().err


@pytest.mark.parametrize("key", [{"rows": [1, 2, 3]}, {"rows": ["a", 3]}, {"dtype": "float99"}])
def test_keys_that_are_none_are_named_with_their_file(key, tmp_path, capsys):
    path = tmp_path / current_device().slug / "paged_attention.json"
    configs.save(path, [{**BEFORE, "key": {**BEFORE["key"], **key}}])
    command = ["tune", *TINY, "--max-len", "64", "--implementation", "interpret", "--output", str(tmp_path)]
    assert main(command) == 1
    assert f"error: {path}: expected measured configs" in capsys.readouterr().err


def test_calls_of_flash_attention_take_a_part_of_the_tiles(tmp_path, monkeypatch):
    entry = {"key": {"head_dim": 16}, "config": {"forward": {"num_warps": 2}}}
    configs.save(tmp_path / current_device().slug / "flash_attention.json", [entry])
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    query, key = (jnp.zeros((1, 64, 2, *group, 16), jnp.bfloat16) for group in ((1,), ()))
    rules = flash.Rules("BTNH", 0.25, None, Band(None, 0, 0))
    operands = flash.Operands(query=query, key=key, value=key, rules=rules)
    found = flash.OP.tiles(operands)
    monkeypatch.delenv(configs.CONFIGS_VARIABLE)
    expected = flash.OP.tiles(operands)
    assert found == dataclasses.replace(expected, forward=dataclasses.replace(expected.forward, num_warps=2))


@pytest.mark.parametrize("op", OPS)
def test_a_whole_entry_is_what_fields_make(op):
    """Of every op, `fields_of` undoes `chosen`."""
    kind = OPS[op]
    for point in kind.variants(2, 1024, **kind.sizes):
        fields = point.candidates()[1]
        again = point.fields_of(point.chosen(fields))
        assert point.chosen(again) == point.chosen(fields)


def test_what_was_measured_before_the_keys_said_more_shares_calls_with_what_is_new():
    def entry(max_len: int, **key) -> dict:
        about = dict(num_seqs=1, num_kv_heads=1, rows=4, max_len=max_len)
        key = {**SIZES, "rows": [1, 16], "streams": [1, 4], "max_len": [1, None], **key}
        return {"key": key, "config": {}, "measured": about}

    today = dict(layout="NHD", query_itemsize=2)
    older, newer = entries.merged([entry(1024)], [entry(4096, **today)])
    assert [e["key"]["max_len"] for e in (older, newer)] == [[256, 2048], [2049, 16384]]
    assert "layout" not in older["key"], "it serves what it did"
    [newer] = entries.merged([entry(1024)], [entry(1024, **today)])
    assert newer["key"]["layout"] == "NHD"
    bytes8 = entry(1024, dtype="int8")
    assert len(entries.merged([bytes8], [entry(1024, dtype="int8", layout="NHD", query_itemsize=4)])) == 2


def operands(query: str, stored: str, layout: str = "NHD") -> Operands:
    pool = PoolShape(num_pages=8192, page_size=16, num_kv_heads=8, head_dim=128)
    struct = jax.ShapeDtypeStruct
    return Operands(
        query=struct((64, 1, 32, 128), jnp.dtype(query)),
        key_cache=struct(array_shape(pool, layout, "key", stored), jnp.dtype(stored)),
        value_cache=struct(array_shape(pool, layout, "value", stored), jnp.dtype(stored)),
        block_tables=struct((64, 512), jnp.int32),
        seq_lens=struct((64,), jnp.int32),
        layout=layout,
        scale=1.0,
        rules=Rules(),
        batch_invariant=False,
        num_heads=32,
    )


def taken(monkeypatch, *kinds: str) -> str:
    """The dtype of the entry that a call takes, of one of 16 bits and one of bytes met by queries of 16."""
    device = Device("gpu", "NVIDIA H200", 132, 90)
    for module in (config, configs):
        monkeypatch.setattr(module, "current_device", lambda: device)
    keys = dict(head_dim=128, dtype="bfloat16"), dict(head_dim=128, dtype="int8", query_itemsize=2)
    entries = [(Path(), {"key": key, "config": {}}) for key in keys]
    monkeypatch.setattr(configs, "_measured", lambda *_: entries)
    seen = ["none"]
    serves = configs.serves

    def noted(entry, key):
        found = serves(entry, key)
        if found:
            seen.append(entry["key"]["dtype"])
        return found

    monkeypatch.setattr(configs, "serves", noted)
    OP.tiles(operands(*kinds))
    monkeypatch.undo()
    return seen[-1]


def test_entries_are_for_queries_as_wide_as_were_measured(monkeypatch):
    for layout in ("NHD", "HND", "PACKED"):
        assert taken(monkeypatch, "bfloat16", "bfloat16", layout) == "bfloat16"
        for query in ("bfloat16", "float16"):
            assert taken(monkeypatch, query, "int8", layout) == "int8", "as it did before keys had layouts"
    for kinds in (("float32", "int8"), ("float16", "float16")):
        assert taken(monkeypatch, *kinds) == "none"


@pytest.mark.slow
def test_calls_of_every_op_have_what_their_keys_say(monkeypatch):
    """What a point writes, its call finds: a field that only one side had would serve nothing."""
    seen: dict[str, dict] = {}

    def resolve(op, kind, explicit, key, default):
        seen[f"{op} {key.get('kernel', '')}".strip()] = key
        return default()

    monkeypatch.setattr(configs, "resolve", resolve)
    for op, kind in OPS.items():
        small = dict(
            num_heads=2, num_kv_heads=1 if "mla" in op else 2, dtype="float32" if op[0] != "m" else "bfloat16"
        )
        for point in kind.variants(2, 64, **{**kind.sizes, **small}):
            monkeypatch.setattr("pallas_attn.tuning.timing.MOST_SETS", 1)
            inputs = point.inputs()
            arrays = (inputs.operands, inputs.tables[0], inputs.seq_lens)
            jax.eval_shape(functools.partial(point.call, *arrays, implementation="interpret"))
            name = f"{op} {getattr(point, 'kernel', '')}".strip()
            for field, fact in point.key().items():
                assert seen[name][field] == fact, (name, field)
            assert (seen[name]["rows"], seen[name]["streams"]) == (point.case.rows, point.streams), name


def holds(config: dict, chosen: dict) -> bool:
    return all(holds(config[n], v) if isinstance(v, dict) else config[n] == v for n, v in chosen.items())


@pytest.mark.parametrize("op", OPS)
def test_calls_of_every_op_take_what_is_written_for_them(op, tmp_path, monkeypatch):
    """Whole, whatever of an entry is of one kernel or launch."""
    found: list[dict] = []
    resolve = configs.resolve

    def noted(*arguments):
        config = resolve(*arguments)
        found.append(dataclasses.asdict(config))
        return config

    monkeypatch.setattr(configs, "resolve", noted)
    monkeypatch.setattr("pallas_attn.tuning.timing.MOST_SETS", 1)
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    kind = OPS[op]
    small = dict(num_heads=2, num_kv_heads=1 if "mla" in op else 2)
    for point in kind.variants(2, 64, **{**kind.sizes, **small}):
        chosen = point.chosen(point.candidates()[-1])
        configs.save(
            tmp_path / current_device().slug / f"{op}.json", [{"key": point.key(), "config": chosen}]
        )
        inputs = point.inputs()
        arrays = (inputs.operands, inputs.tables[0], inputs.seq_lens)
        found.clear()
        jax.eval_shape(functools.partial(point.call, *arrays, implementation="interpret"))
        assert any(holds(config, chosen) for config in found), chosen
        assert chosen != point.chosen({}), "another than the heuristic's"


@pytest.mark.parametrize(("layout", "query_itemsize"), [("NHD", 4), ("PACKED", 2), ("PACKED", 4)])
def test_what_was_measured_serves_no_other_layout_or_query(layout, query_itemsize):
    point = OPS["paged_attention"].variants(2, 1024, **OPS["paged_attention"].sizes)[0]
    written = {"key": point.key()}
    assert configs.serves(written, point.key())
    assert not configs.serves(written, point.key() | dict(layout=layout, query_itemsize=query_itemsize))


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("paged_attention", ("layout", "query_itemsize")),
        ("ragged_paged_attention", ("layout", "query_itemsize")),
        ("flash_attention", ("layout", "pair_bytes", "documents")),
        ("blocksparse_attention", ("cache_layout",)),
    ],
)
def test_keys_say_what_decides(op, facts):
    kind = OPS[op]
    for point in kind.variants(2, 1024, **kind.sizes):
        assert set(facts) <= point.key().keys()


def test_a_call_takes_what_was_measured_in_a_part_of_its_page(times, tmp_path):
    """Calls know of tables, not of lengths."""
    (entry,) = tuned(tmp_path, [], "--max-len", "10", "--page-size", "64")
    assert entry["measured"]["max_len"] == 64
    sizes = SIZES | dict(page_size=64, num_heads=2, num_kv_heads=1)
    (point,) = OPS["paged_attention"].variants(2, 10, **sizes)
    assert entries.serving(point, [entry]) is entry
    assert entry["key"]["max_len"] == [16, 256]


def test_a_relative_folder_is_said_in_full(times, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["tune", *TINY, "--max-len", "64", "--implementation", "interpret", "--output", "mine"]
    assert main(command) == 0
    assert f"{configs.CONFIGS_VARIABLE}={tmp_path / 'mine'} is set" in capsys.readouterr().out


@pytest.mark.parametrize("why", ["a folder", "not allowed"])
def test_what_cannot_be_written_is_named_before_the_work(why, tmp_path, monkeypatch, capsys):
    path = tmp_path / current_device().slug / "paged_attention.json"
    if why == "a folder":
        path.mkdir(parents=True)
    else:

        def refused(self, *_):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "touch", refused)
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured"))
    command = ["tune", *TINY, "--max-len", "64", "--implementation", "interpret", "--output", str(tmp_path)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "error: " in error
    assert str(path) in error
    assert not list(path.parent.glob("*.tmp"))
