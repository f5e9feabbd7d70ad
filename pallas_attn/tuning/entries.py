"""Entries of measured files, and the ranges of calls that they are for; calls look them up in `_call/configs.py`."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_attn._call import configs
from pallas_attn.tuning.points import Point, Timing

type Entry = dict[str, Any]

# The facts by which entries of one kind divide calls among them.
_SHARED = ("streams", "max_len")
# How far from its measurement an entry still serves, as a factor: with 24 streams, a config for hundreds of them took
# half as long again as the heuristic's.
_REACH = 4
# Fields that older keys lack, with the values that those were measured with.
_LATER = ("layout", "cache_layout", "pair_bytes", "documents", "query_itemsize")
# Up to this many query rows of a KV head, the tile of queries grows with them.
_MOST_ROWS = 64


def serving(point: Point, known: Sequence[Entry]) -> Entry | None:
    """The first of the `known` entries that matches the point's call."""
    call = {**point.key(), "rows": point.case.rows, "streams": point.streams, "max_len": point.max_len}
    return next((entry for entry in known if _serves(entry, call)), None)


def entry(point: Point, fastest: Timing, heuristic: Timing, before: Entry | None = None) -> Entry:
    """An entry for the fastest config, with its time and the heuristic's; `merged` adds its ranges. `before`: the entry
    that had this config, all of which is kept."""
    guessed = heuristic.microseconds
    return {
        "key": {**point.key(), "rows": _rows(point.case.rows)},
        "config": before["config"] if before else point.chosen(fastest.fields),
        "measured": {
            "num_seqs": point.case.num_seqs,
            "num_kv_heads": point.case.num_kv_heads,
            "rows": point.case.rows,
            "max_len": point.max_len,
            "us": round(fastest.microseconds, 2),
            "heuristic_us": round(guessed, 2) if math.isfinite(guessed) else None,
            "error": float(f"{fastest.error:.1e}"),
        },
    }


def merged(old: Sequence[Entry], new: Sequence[Entry], others: Sequence[Entry] = ()) -> list[Entry]:
    """All new entries, and the old ones that were not remeasured.

    The entries of a kind share its calls among them: each is for those nearest to what was measured, first in streams,
    then in length; ranges meet at geometric means, and end where nothing like it was measured. `others` are in a file
    that is looked up later: they keep their share, and are not in the result. Old entries of other kinds, or without a
    measurement, stay: after the new ones if they matched a call that was measured, otherwise before them.
    """
    later = {name: fact for entry in new for name, fact in entry["key"].items() if name in _LATER}
    kinds = {_kind(entry, later) for entry in new}
    calls = [_measured_call(entry) for entry in new]

    def shares(entry: Entry) -> bool:
        return "measured" in entry and _kind(entry, later) in kinds

    def places(entries: Sequence[Entry]) -> dict[tuple[str, int, int], Entry]:
        return {(_kind(entry, later), *_sizes(entry)): entry for entry in entries if shares(entry)}

    own = places([*old, *new])
    known = places(others).keys() | own.keys()
    shared = []
    for (kind, streams, max_len), entry in sorted(own.items(), key=lambda item: item[0]):
        ranges = {
            "streams": _range(streams, {s for k, s, _ in known if k == kind}),
            "max_len": _range(max_len, {m for k, s, m in known if (k, s) == (kind, streams)}),
        }
        shared.append({**entry, "key": {**entry["key"], **ranges}})

    def was_for_them(entry: Entry) -> bool:
        return any(_serves(entry, call) for call in calls)

    rest = [entry for entry in old if not shares(entry)]
    front, behind = ([entry for entry in rest if was_for_them(entry) is last] for last in (False, True))
    return front + shared + behind


def _serves(entry: Entry, call: dict[str, Any]) -> bool:
    # Entries written by hand may use facts that no point has.
    return entry["key"].keys() <= call.keys() and configs.serves(entry, call)


def _measured_call(entry: Entry) -> dict[str, Any]:
    """Key of the call in which a new entry's config was measured."""
    streams, max_len = _sizes(entry)
    return {**entry["key"], "rows": entry["measured"]["rows"], "streams": streams, "max_len": max_len}


def _sizes(entry: Entry) -> tuple[int, int]:
    """The measured (streams, max_len)."""
    about = entry["measured"]
    return about["num_seqs"] * about["num_kv_heads"], about["max_len"]


def _kind(entry: Entry, later: dict[str, Any]) -> str:
    """`later`: fields added to keys since, with `tune`'s values."""
    key = entry["key"]
    facts = later | {name: fact for name, fact in key.items() if name not in _SHARED}
    if "query_itemsize" in later and "query_itemsize" not in key and "dtype" in key:
        facts["query_itemsize"] = max(2, jnp.dtype(key["dtype"]).itemsize)  # of 8-bit caches, bf16 queries
    return json.dumps(facts, sort_keys=True)


def _rows(rows: int) -> list[int | None]:
    """[least, most] query rows that share the tile for `rows`."""
    side = 16
    while side < min(rows, _MOST_ROWS):
        side *= 2
    if rows > _MOST_ROWS:
        return [_MOST_ROWS + 1, None]
    return [1 if side == 16 else side // 2 + 1, side]


def _range(value: int, measured: set[int]) -> list[int]:
    """[least, most] of what is within reach of `value`, and nearer to it than to its neighbours among `measured`."""
    below = [math.isqrt(v * value) + 1 for v in measured if v < value]
    above = [math.isqrt(v * value) for v in measured if v > value]
    return [max([*below, math.ceil(value / _REACH)]), min([*above, value * _REACH])]
