"""Which cases of a sweep `make test` takes."""

import pytest
from conftest import left_out_of

pytestmark = pytest.mark.once


class Item:
    def __init__(self, nodeid: str, *marks: str):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


SWEEP = [
    Item(f"tests/test_a.py::test_a[{a}-{b}-{c}]", "sweep") for a in range(50) for b in "xy" for c in "pq"
]
OTHERS = [Item(f"tests/test_a.py::test_b[{n}]") for n in range(50)]


def left(sample: int, items: list[Item]) -> list[str]:
    without = left_out_of(items, sample)  # pyright: ignore[reportArgumentType]
    return [item.nodeid for item in items if item not in without]


def test_all_by_default():
    assert left(1, SWEEP + OTHERS) == [item.nodeid for item in SWEEP + OTHERS]


@pytest.mark.parametrize("sample", [2, 3, 5])
def test_a_sample_is_spread_over_every_argument(sample):
    taken = left(sample, SWEEP)
    assert abs(len(taken) - 200 / sample) < 20
    for value in ("-x-", "-y-", "-p]", "-q]"):
        assert sum(value in name for name in taken) > 100 / sample - 20


def test_what_is_no_sweep_stays_and_of_a_sweep_the_first():
    assert left(10**9, SWEEP + OTHERS) == [item.nodeid for item in (SWEEP[0], *OTHERS)]
    assert left(10**9, OTHERS + SWEEP[7:]) == [item.nodeid for item in (*OTHERS, SWEEP[7])]
