"""The pages' Python examples run; those of devices.md in test_sharding.py, on the devices that they need.

The first page is a package index's too: short, without links, and its figures are measured ones.
"""

import csv
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

import pallas_attn

ROOT = Path(__file__).parents[1]
PLACES = (
    "*.md",
    "docs/pages/**/*.md",
    *(f"{place}/**/*.md" for place in ("pallas_attn", "csrc", "benchmarks")),
)
PAGES = {
    str(page.relative_to(ROOT)): page.read_text() for place in PLACES for page in sorted(ROOT.glob(place))
}
EXAMPLES = {
    f"{page}-{number}": code
    for page, text in PAGES.items()
    if page != "docs/pages/devices.md"
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}


README = PAGES["README.md"]
LEARNT = sorted(page for place in ("pallas_attn", "csrc") for page in (ROOT / place).rglob("EXPERIMENTS.md"))
FOLDERS = {"H100": "nvidia-h100-80gb-hbm3", "H200": "nvidia-h200"}


# A sample has one of each page.
@pytest.mark.sweep(name=lambda name: [name.rpartition("-")[0]])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, monkeypatch):
    if name.startswith("README.md"):  # what is installed without extras must do
        monkeypatch.setitem(sys.modules, "flax", None)
    exec(compile(EXAMPLES[name], name, "exec"), {})


@pytest.mark.once
def test_how_to_pages_have_examples():
    with_examples = {Path(name.rpartition("-")[0]).stem for name in EXAMPLES}
    assert with_examples >= {"index", "serving", "engine", "training", "masks", "caches", "coming"}


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    ):
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.once
def test_the_first_page_is_short():
    assert len(README.split()) <= 1000


@pytest.mark.once
@pytest.mark.parametrize("page", LEARNT, ids=lambda page: page.parent.name)
def test_what_was_learnt_is_short(page):
    """A page of conclusions that a reader finishes."""
    assert len(page.read_text().split()) <= 600


@pytest.mark.once
def test_the_first_page_has_no_links():
    """A package index shows it without the repository; the project's addresses are in pyproject.toml alone."""
    assert not re.findall(r"\]\(|\]\[|^\[[^]]+\]:|<a |<img |https?:|www\.", README, re.MULTILINE)
    files = re.findall(r"`((?:pallas_attn|csrc|benchmarks|docs)/[\w./]+|[A-Z]+\.md)`", README)
    assert len(files) > 5
    assert all((ROOT / file).exists() for file in files), files


def test_the_first_page_tells_which_versions_serve():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Python {project['requires-python'].removeprefix('>=')} " in README
    jax = next(wanted for wanted in project["dependencies"] if wanted.startswith("jax>"))
    assert f"`{jax}`" in README


@pytest.mark.once
def test_what_is_public_is_in_the_reference():
    """A name of pallas_attn, and of its modules those that are shown whole; a bare module's own names come with it."""
    text = "".join(text for page, text in PAGES.items() if page.startswith("docs/pages/api/"))
    shown = set(re.findall(r"^::: pallas_attn\.(\w+)$", text, re.MULTILINE))
    assert set(pallas_attn.__all__) <= shown


@pytest.mark.once
def test_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == pallas_attn.__version__ == (cited and cited[1])


@functools.cache
def measured(card: str, date: str) -> list[dict[str, str]]:
    tables = (ROOT / "benchmarks/results" / FOLDERS[card]).glob(f"{date}-*.csv")
    rows = [row for table in sorted(tables) for row in csv.DictReader(table.read_text().splitlines())]
    return [row for row in rows if row.get("median_us")]


def rounded(row: dict[str, str], figure: str) -> bool:
    decimals = len(figure.partition(".")[2])
    return float(figure) == round(float(row["median_us"]), decimals)


SPEEDS = re.findall(r"^\| (.+) \| (H\d00), (\d{4}-\d\d-\d\d) \| ([\d.]+) \| (.+) \|$", README, re.MULTILINE)


@pytest.mark.once
@pytest.mark.parametrize(("call", "card", "date", "ours", "others"), SPEEDS)
def test_a_figure_of_the_first_page_was_measured(call, card, date, ours, others):
    """Ours and the others' are of one case in one kept table of that card and day."""
    found = [row for row in measured(card, date) if row["implementation"].startswith("ours")]
    cases = {(row["op"], row["case"]) for row in found if rounded(row, ours)}
    for other in others.split(", "):
        peer, figure = other.split()
        cases &= {
            (row["op"], row["case"])
            for row in measured(card, date)
            if row["implementation"].startswith(peer) and rounded(row, figure)
        }
    assert len(cases) == 1, cases


@pytest.mark.once
def test_the_first_page_has_a_table_of_speed():
    assert len(SPEEDS) >= 5
