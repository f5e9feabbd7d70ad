"""Which cases of a sweep a sample takes."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import sample

pytestmark = pytest.mark.once


def sweep(arguments: list[dict[str, Any]], **by: Any) -> list[Any]:
    """Items, as far as a sample looks at them."""
    return [
        SimpleItem(f"tests/test_a.py::test_a[{number}]", SimpleNamespace(params=params), by)
        for number, params in enumerate(arguments)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class SimpleItem:
    nodeid: str
    callspec: Any
    by: dict[str, Any] | None

    def get_closest_marker(self, name: str) -> Any:
        return name == "sweep" and self.by is not None and SimpleNamespace(kwargs=self.by)


def taken(items: list[Any]) -> list[dict[str, Any]]:
    left_out = set(sample.left_out_of(items))
    return [item.callspec.params for item in items if item not in left_out]


def product(**values: Any) -> list[dict[str, Any]]:
    return [dict(zip(values, those, strict=True)) for those in itertools.product(*values.values())]


def test_of_a_product_a_diagonal_is_taken():
    cases = taken(sweep(product(a=range(6), b="xyz", c=[False, True])))
    assert [case["a"] for case in cases] == [0, 1, 2, 3, 4, 5]
    assert sorted(case["b"] for case in cases) == list("xxyyzz")
    assert sorted(case["c"] for case in cases) == [False] * 3 + [True] * 3


def test_what_is_no_sweep_stays():
    others = [SimpleItem("tests/test_a.py::test_b", SimpleNamespace(params={}), None) for _ in range(9)]
    assert not sample.left_out_of(others)  # pyright: ignore[reportArgumentType]


def test_a_sweep_says_what_is_to_be_there():
    seeds = product(seed=range(9), b="xyz")
    assert [case["b"] for case in taken(sweep(seeds, seed=None))] == list("xyz")
    assert taken(sweep(product(seed=range(9)), seed=None)) == [{"seed": 0}]
    parts = product(name=["ab", "b", "bc", "ca"])
    assert taken(sweep(parts, name=set)) == [{"name": "ab"}, {"name": "bc"}]


def options(items: list[Any]) -> set[tuple[str, str | None, str]]:
    """(op, implementation, option) of what the cases have beyond a plain call."""
    found = set()
    for item in items:
        implementation = arguments(item).get("implementation")
        for case in filter(sample.is_case, arguments(item).values()):
            found |= {
                (case.op, implementation, option) for option in given(case) | getattr(case, "tags", set())
            }
    return found


def given(case: Any) -> set[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(case)}
    return {
        name
        for name, default in defaults.items()
        if default is not dataclasses.MISSING and getattr(case, name) != default
    }


def values(items: list[Any]) -> set[tuple[str, str, str]]:
    """(test, argument, value), where the sweep does not itself say what is to be there."""
    return {
        (function_of(item), name, repr(value))
        for item in items
        for name, value in arguments(item).items()
        if name not in item.get_closest_marker("sweep").kwargs and not sample.is_case(value)
    }


def arguments(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def function_of(item: Any) -> str:
    return item.nodeid.partition("[")[0]


def test_a_sample_has_every_option_of_every_op_by_every_implementation(sweeps):
    """Of the tests that were collected beside this one."""
    left_out = set(sample.left_out_of(sweeps))
    sampled = [item for item in sweeps if item not in left_out]
    assert options(sampled) == options(sweeps)
    assert values(sampled) == values(sweeps)
    assert {function_of(item) for item in sampled} == {function_of(item) for item in sweeps}
