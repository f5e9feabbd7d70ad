"""Which tests and cases a sample takes."""

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import sample

pytestmark = pytest.mark.once


def items(arguments: list[dict[str, Any]], test: str = "test_a", mark: str = "", **by: Any) -> list[Any]:
    """Cases of a test, as far as a sample looks at them."""
    marks = {"sweep": by} if by else {mark: {}}
    return [
        SimpleItem(f"tests/test_a.py::{test}[{number}]", SimpleNamespace(params=params), marks)
        for number, params in enumerate(arguments)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class SimpleItem:
    nodeid: str
    callspec: Any
    marks: dict[str, dict[str, Any]]

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(kwargs=self.marks[name]) if name in self.marks else None


def taken(items: list[Any]) -> list[dict[str, Any]]:
    left_out = set(sample.left_out_of(items))
    return [item.callspec.params for item in items if item not in left_out]


def product(**values: Any) -> list[dict[str, Any]]:
    return [dict(zip(values, those, strict=True)) for those in itertools.product(*values.values())]


def test_of_a_product_a_diagonal_is_taken():
    cases = taken(items(product(a="abcdef", b="xyz", c=[False, True])))
    assert [case["a"] for case in cases] == list("abcdef")
    assert sorted(case["b"] for case in cases) == list("xxyyzz")
    assert sorted(case["c"] for case in cases) == [False] * 3 + [True] * 3


def test_values_are_shared_out_among_the_tests_of_a_file():
    tests = [case for name in "pqrs" for case in items(product(a="ab", name=[name]), f"test_{name}")]
    cases = taken(tests)
    assert [case["name"] for case in cases] == list("pqrs")
    assert sorted(case["a"] for case in cases) == list("aabb")


def test_of_numbers_any_will_do_and_of_nothing_else():
    assert [case["b"] for case in taken(items(product(seed=range(9), b="xyz")))] == list("xyz")
    assert taken(items(product(size=[(1, 2), (3, 4)]))) == [{"size": (1, 2)}]
    assert taken(items(product(sm=[80, 90]))) == product(sm=[80, 90])
    named = product(option=[{"a": 1}, {"b": 1}, {"a": 2}, None, len, int])
    assert taken(items(named)) == [*named[:2], *named[3:]]


def test_all_of_a_control_is_taken_and_nothing_else_that_is_slow():
    both = product(a=range(3), b="xyz")
    assert taken(items(both, mark="control")) == both
    assert not taken(items(both, mark="slow"))
    slow_control = items(both, mark="control")
    for item in slow_control:
        item.marks["slow"] = {}
    assert taken(slow_control) == both


def test_a_test_says_what_is_to_be_there():
    assert taken(items(product(b="xyz"), b=None)) == [{"b": "x"}]
    assert taken(items(product(seed=range(9)), seed=lambda seed: [seed > 4])) == [{"seed": 0}, {"seed": 5}]
    parts = product(name=["ab", "b", "bc", "ca"])
    assert taken(items(parts, name=set)) == [{"name": "ab"}, {"name": "bc"}]


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
    """(file, argument, value), where the test does not itself say what is to be there."""
    found = set()
    for item in items:
        marker = item.get_closest_marker("sweep")
        for name, value in arguments(item).items():
            if name not in (marker.kwargs if marker else ()) and not sample.is_case(value):
                found |= {(item.nodeid.partition("::")[0], name, part) for part in sample.parts(name, value)}
    return found


def arguments(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def function_of(item: Any) -> str:
    return item.nodeid.partition("[")[0]


def test_a_sample_has_every_option_of_every_op_by_every_implementation(collected):
    """Of the tests that were collected beside this one, slow ones among them; and every other test and value."""
    left_out = set(sample.left_out_of(collected))
    sampled = [item for item in collected if item not in left_out]
    assert options(sampled) == options(collected)
    quick = [item for item in collected if not item.get_closest_marker("slow")]
    assert values(sampled) >= values(quick)
    assert {function_of(item) for item in sampled} >= {function_of(item) for item in quick}


def test_what_is_named_for_a_fault_that_shows_is_a_control(collected):
    named = re.compile(r"_(is|are)_caught$|_notice|_would_(show|be_seen|be_counted)$")
    controls = {item.nodeid for item in collected if item.get_closest_marker("control")}
    assert [i.nodeid for i in collected if named.search(function_of(i)) and i.nodeid not in controls] == []
