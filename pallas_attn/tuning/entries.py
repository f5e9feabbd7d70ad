"""What is kept of a measurement, and which calls it is for; `_call/configs.py` is where calls look it up."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_attn._call import configs
from pallas_attn.tuning.points import Point, Timing

type Entry = dict[str, Any]

# What a call has that entries of one kind share among them.
_SHARED = ("streams", "max_len")
# How many times more or less than what was measured an entry still serves: a config made for hundreds of streams took
# half as long again as the heuristic's with 24 of them.
_REACH = 4
# What keys written before these fields lack: such entries were measured as `tune` measures today.
_LATER = ("layout", "cache_layout", "pair_bytes", "documents", "query_itemsize")
# Query rows of a KV head up to which a tile of queries grows with them.
_MOST_ROWS = 64


def serving(point: Point, known: Sequence[Entry]) -> Entry | None:
    """The entry that the point's call takes of those that are `known`, the first ones first."""
    call = {**point.key(), "rows": point.case.rows, "streams": point.streams, "max_len": point.max_len}
    return next((entry for entry in known if _serves(entry, call)), None)


def entry(point: Point, fastest: Timing, heuristic: Timing, before: Entry | None = None) -> Entry:
    """Of the fastest config, with its time and the heuristic's; `merged` adds the ranges of calls that it is for.
    `before`: the entry that had this config, of which nothing is left out."""
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
    """All new entries, and the old ones that were not measured anew.

    The entries of a kind share its calls among them: each is for those nearest to what was measured, first in streams,
    then in length; ranges meet at geometric means, and end where nothing like it was measured. `others` are in a file
    that is looked up later: they keep their share, and are not in the result. Old entries of other kinds, or without
    a measurement, stay as they are: behind the new ones where they were for a call that was measured, else in front.
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
    # An entry by hand may go by what no point knows.
    return entry["key"].keys() <= call.keys() and configs.serves(entry, call)


def _measured_call(entry: Entry) -> dict[str, Any]:
    """The key of the call that a new entry's config was measured in."""
    streams, max_len = _sizes(entry)
    return {**entry["key"], "rows": entry["measured"]["rows"], "streams": streams, "max_len": max_len}


def _sizes(entry: Entry) -> tuple[int, int]:
    """(streams, max_len) of what was measured."""
    about = entry["measured"]
    return about["num_seqs"] * about["num_kv_heads"], about["max_len"]


def _kind(entry: Entry, later: dict[str, Any]) -> str:
    """`later` are fields that keys of today have, as `tune` measures them."""
    key = entry["key"]
    facts = later | {name: fact for name, fact in key.items() if name not in _SHARED}
    if "query_itemsize" in later and "query_itemsize" not in key and "dtype" in key:
        facts["query_itemsize"] = max(2, jnp.dtype(key["dtype"]).itemsize)  # of 8-bit caches, bf16 queries
    return json.dumps(facts, sort_keys=True)


def _rows(rows: int) -> list[int | None]:
    """[least, most] of the query rows that a tile for `rows` of them serves as well."""
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
