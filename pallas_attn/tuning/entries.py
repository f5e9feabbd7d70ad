"""What is kept of a measurement, and which calls it is for; `_call/configs.py` is where calls look it up."""

import json
import math
from collections.abc import Sequence
from typing import Any

from pallas_attn.tuning.points import Point, Timing

type Entry = dict[str, Any]

# What a call has that entries of one kind share among them.
_SHARED = ("streams", "max_len")
# How many times more or less than what was measured an entry still serves: a config made for hundreds of streams took
# half as long again as the heuristic's with 24 of them.
_REACH = 4
# Query rows of a KV head up to which a tile of queries grows with them.
_MOST_ROWS = 64


def entry(point: Point, fastest: Timing, heuristic: Timing) -> Entry:
    """Of the fastest config, with its time and the heuristic's; `merged` adds the ranges of calls that it is for."""
    guessed = heuristic.microseconds
    return {
        "key": {**point.key(), "rows": _rows(point.case.rows)},
        "config": point.chosen(fastest.fields),
        "measured": {
            "num_seqs": point.case.num_seqs,
            "num_kv_heads": point.case.num_kv_heads,
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
    that is looked up later: they keep their share, and are not in the result. Entries of kinds without new ones stay
    as they are.
    """
    kinds = {_kind(entry) for entry in new}

    def places(entries: Sequence[Entry]) -> dict[tuple[str, int, int], Entry]:
        return {_place(entry): entry for entry in entries if "measured" in entry and _kind(entry) in kinds}

    own = places([*old, *new])
    known = places(others).keys() | own.keys()
    found = []
    for kind, streams, max_len in sorted(own):
        ranges = {
            "streams": _range(streams, {s for k, s, _ in known if k == kind}),
            "max_len": _range(max_len, {m for k, s, m in known if (k, s) == (kind, streams)}),
        }
        entry = own[kind, streams, max_len]
        found.append({**entry, "key": {**entry["key"], **ranges}})
    return found + [entry for entry in old if _kind(entry) not in kinds or "measured" not in entry]


def _place(entry: Entry) -> tuple[str, int, int]:
    about = entry["measured"]
    return _kind(entry), about["num_seqs"] * about["num_kv_heads"], about["max_len"]


def _kind(entry: Entry) -> str:
    facts = {name: fact for name, fact in entry["key"].items() if name not in _SHARED}
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
