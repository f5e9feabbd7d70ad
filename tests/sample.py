"""Which tests `--sample` takes: of each file as few cases as have every test and all that its arguments name.

Of an op's case (`pallas_attn/testing`) that is every size but lengths, and every option beside each implementation; of
a name what stands between its commas, of a mapping its keys. Of numbers, and what is made of them, any will do, but for
those of GPUs. A test may say what of an argument's values is to be there: `sweep(case=options_of)`,
`sweep(name=None)` for any of them. All cases are taken of negative controls, which are marked `control`, and none of
what else is marked `slow`.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

# Every case has lengths of its own.
LENGTHS = {"seq_lens", "lens", "kv_len", "lengths", "spare_pages", "fast"}
# Numbers that are names.
GPUS = {"sm", "capability"}


def left_out_of(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    slow, files = [], collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("control"):
            continue
        if item.get_closest_marker("slow"):
            slow.append(item)
        else:
            files[item.nodeid.partition("::")[0]].append(item)
    return slow + [item for cases in files.values() for item in _dispensable(cases)]


def _dispensable(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Taken is the case that adds most, as long as one adds something; of several that whose values are the rarest in
    the sample, so that of a product it is a diagonal."""
    left = {case: set(_contents(case)) for case in cases}
    taken = collections.Counter()
    while left:
        best = max(
            left, key=lambda case: (len(left[case] - taken.keys()), -sum(taken[x] for x in left[case]))
        )
        if left[best] <= taken.keys():
            break
        taken.update(left.pop(best))
    return list(left)


def _contents(item: pytest.Item) -> Iterator[Hashable]:
    yield item.nodeid.partition("[")[0]
    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    marker = item.get_closest_marker("sweep")
    by = marker.kwargs if marker else {}
    for name, value in arguments.items():
        if name in by:
            yield from ((name, part) for part in by[name](value)) if by[name] else ()
        elif is_case(value):
            beside = value.op, arguments.get("implementation")
            yield from ((value.op, *one) for one in sizes(value))
            yield from ((*beside, option) for option in options(value))
        else:
            yield from ((name, part) for part in parts(name, value))


def parts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split(", ")
    if isinstance(value, dict):
        return [*map(str, value)]
    if value is None or isinstance(value, bool) or name in GPUS:
        return [str(value)]
    # Functions, types, members of an enumeration; else its kind, so that a number has a case beside None.
    return [str(getattr(value, "__name__", getattr(value, "name", type(value).__name__)))]


def is_case(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "op")


def options(case: Any) -> Iterator[Hashable]:
    """What it has beyond a plain call."""
    yield from getattr(case, "tags", ())
    for field in dataclasses.fields(case):
        has_default = field.default is not dataclasses.MISSING
        if has_default and field.name not in LENGTHS and getattr(case, field.name) != field.default:
            yield field.name


def sizes(case: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(case):
        value, has_default = getattr(case, field.name), field.default is not dataclasses.MISSING
        if field.name not in LENGTHS and (isinstance(value, str) or not has_default):
            yield field.name, repr(value)
