"""What csrc/ may include: kernels build on what Hopper kernels share, that on instructions, and nothing upwards."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"
# Each may include itself and what stands before it. An op is a folder of its own and includes no other op.
FLOORS = ("common", "ptx", "sm90")
OPS = sorted(path.name for path in CSRC.iterdir() if path.is_dir() and path.name not in FLOORS)
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cc", ".cu"})


def allowed(floor: str) -> set[str]:
    return {*FLOORS, floor} if floor in OPS else set(FLOORS[: FLOORS.index(floor) + 1])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_includes_run_downwards(source: Path) -> None:
    floor = source.relative_to(CSRC).parts[0]
    included = re.findall(r'#include "([^"]+)"', source.read_text())
    assert {name.split("/")[0] for name in included} <= allowed(floor)
    assert all((CSRC / name).is_file() for name in included)


def test_the_floors_are_there() -> None:
    assert "mla" in OPS
    assert {path.relative_to(CSRC).parts[0] for path in SOURCES} == {*FLOORS, *OPS}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_a_file_holds_one_idea(source: Path) -> None:
    assert len(source.read_text().splitlines()) <= 450


def test_is_framework_free() -> None:
    for source in SOURCES:
        included = re.findall(r'#include [<"]([^>"]+)[>"]', source.read_text())
        assert not [
            name for name in included if re.match(r"(xla|jax|torch|ATen|Python|cute|cutlass)", name)
        ], source
