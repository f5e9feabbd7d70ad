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
_LATER = ("layout", "cache_layout", "pair_bytes", "query_itemsize")
# Query rows of a KV head up to which a tile of queries grows with them.
_MOST_ROWS = 64


def serving(point: Point, known: Sequence[Entry]) -> Entry | None:
    """The entry that the point's call takes of those that are `known`, the first ones first."""
    sizes = dict(rows=point.case.rows, streams=point.streams, max_len=point.max_len)
    key = {**point.key(), **sizes}
    # One by hand may go by what a point does not know.
    return next((e for e in known if e["key"].keys() <= key.keys() and configs.serves(e, key)), None)


def entry(point: Point, fastest: Timing, heuristic: Timing, kept: Entry | None = None) -> Entry:
    """Of the fastest config, with its time and the heuristic's; `merged` adds the ranges of calls that it is for.
    `kept`: the entry whose config that is, of which nothing is left out."""
    guessed = heuristic.microseconds
    return {
        "key": {**point.key(), "rows": _rows(point.case.rows)},
        "config": kept["config"] if kept else point.chosen(fastest.fields),
        "measured": {
            "num_seqs": point.case.num_seqs,
            "num_kv_heads": point.case.num_kv_heads,
            "max_len": point.max_len,
            "us": round(fastest.microseconds, 2),
            "heuristic_us": round(guessed, 2) if math.isfinite(guessed) else None,
            "error": float(f"{fastest.error:.1e}"),
        },
    }


def merged(
    old: Sequence[Entry],
    new: Sequence[Entry],
    others: Sequence[Entry] = (),
    kept: Sequence[tuple[Entry, Entry]] = (),
) -> list[Entry]:
    """All new entries, and the old ones that were not measured anew.

    The entries of a kind share its calls among them: each is for those nearest to what was measured, first in streams,
    then in length; ranges meet at geometric means, and end where nothing like it was measured. `others` are in a file
    that is looked up later: they keep their share, and are not in the result. Entries of kinds without new ones stay
    as they are.

    `kept` are those of the new ones whose config an entry of old or others had before, with that entry: they serve no
    call that it did not, and come first, as it may be for fewer rows than others; so do old ones that are.
    """
    later = {name: fact for entry in new for name, fact in entry["key"].items() if name in _LATER}

    def kind(entry: Entry) -> str:
        return _kind(entry["key"], later)

    def place(entry: Entry) -> tuple[str, int, int]:
        return kind(entry), *_sizes(entry)

    limits = {place(entry): before["key"] for entry, before in kept}
    replaced = [before for entry, before in kept if "measured" in before and _sizes(before) == _sizes(entry)]
    old = [entry for entry in old if not any(entry is before for before in replaced)]
    kinds = {kind(entry) for entry in new}

    def places(entries: Sequence[Entry]) -> dict[tuple[str, int, int], Entry]:
        return {place(entry): entry for entry in entries if "measured" in entry and kind(entry) in kinds}

    own = places([*old, *new])
    known = places(others).keys() | own.keys()
    first, found = [], []
    for name, streams, max_len in sorted(own):
        ranges = {
            "streams": _range(streams, {s for k, s, _ in known if k == name}),
            "max_len": _range(max_len, {m for k, s, m in known if (k, s) == (name, streams)}),
        }
        entry = own[name, streams, max_len]
        limit = limits.get((name, streams, max_len))
        key = {**entry["key"], **ranges} if limit is None else _within({**entry["key"], **ranges}, limit)
        (found if limit is None else first).append({**entry, "key": key})
    rest = [entry for entry in old if kind(entry) not in kinds or "measured" not in entry]

    def is_apart(entry: Entry) -> bool:
        """Of fewer rows than new ones, for calls like none of theirs: behind them it would serve none."""
        return (
            "measured" in entry
            and any(
                kind({"key": entry["key"] | {"rows": one["key"]["rows"]}}) == kind(one)
                and _lies_in(entry["key"].get("rows"), one["key"]["rows"])
                for one in new
            )
            and not any(
                all(
                    _lies_in([size, size], entry["key"].get(name))
                    for name, size in zip(_SHARED, _sizes(one), strict=True)
                )
                for one in new
            )
        )

    apart = [entry for entry in rest if is_apart(entry)]
    return first + apart + found + [entry for entry in rest if not is_apart(entry)]


def _lies_in(inner: Any, outer: Any) -> bool:
    if not isinstance(inner, list) or not isinstance(outer, list):
        return outer is None
    most = math.inf if inner[1] is None else inner[1]
    return outer[0] <= inner[0] and (outer[1] is None or most <= outer[1])


def _within(key: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    """`limit`, as narrow as the ranges of `key`, which it overlaps."""

    def both(name: str) -> Any:
        ours, theirs = key[name], limit.get(name, key[name])
        if not isinstance(theirs, list):
            return theirs
        mosts = [most for _, most in (ours, theirs) if most is not None]
        return [max(ours[0], theirs[0]), min(mosts, default=None)]

    return {**limit, **{name: both(name) for name in ("rows", *_SHARED)}}


def _sizes(entry: Entry) -> tuple[int, int]:
    """(streams, max_len) of what was measured."""
    about = entry["measured"]
    return about["num_seqs"] * about["num_kv_heads"], about["max_len"]


def _kind(key: dict[str, Any], later: dict[str, Any]) -> str:
    """`later` are fields that keys of today have, as `tune` measures them."""
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
