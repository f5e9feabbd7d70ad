"""benchmarks/results: what pages cite exists, and what exists is cited."""

import fnmatch
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUFFIXES = (".csv", ".png", ".svg", ".txt")
# A file's name, or a pattern of names, that begins with a date, a star or the folder.
CITATION = re.compile(
    r"(?:benchmarks/results/[\w./-]*/)?((?:\*-|\d{4}-\d\d-\d\d-)[\w.*-]*(?:\.csv|\.png|\.svg|\.txt|-\*))"
)


def pages() -> list[Path]:
    ours = [ROOT, *(ROOT / name for name in ("docs", "pallas_attn", "csrc", "xla_ffi"))]
    found = [
        path for place in ours for path in (place.glob("*.md") if place == ROOT else place.rglob("*.md"))
    ]
    return sorted(found)


def citations(page: Path) -> set[str]:
    """A picture stands for the table it was drawn from too."""
    found = set(CITATION.findall(page.read_text()))
    return found | {re.sub(r"\.(png|svg)$", ".csv", name) for name in found}


def kept() -> dict[str, Path]:
    return {path.name: path for path in RESULTS.rglob("*") if path.suffix in SUFFIXES}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_cites_is_kept(page):
    for citation in citations(page):
        assert fnmatch.filter(kept(), citation), f"{page}: {citation} is no file of {RESULTS}"


def test_what_is_kept_is_cited():
    patterns = set().union(*map(citations, pages()))
    assert not [name for name in kept() if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


@pytest.mark.control
def test_a_citation_is_seen():
    text = "(`*-44bbe31-mla_decode-jax.csv`; `*-3ce4e35-*`) ![x](benchmarks/results/h100/2026-11-22-44bbe31-a.png)"
    assert CITATION.findall(text) == [
        "*-44bbe31-mla_decode-jax.csv",
        "*-3ce4e35-*",
        "2026-11-22-44bbe31-a.png",
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_pages_name_exist(page):
    for script in re.findall(r"benchmarks/[\w/]+\.py", page.read_text()):
        assert (ROOT / script).is_file(), f"{page}: {script}"
