"""The pages' Python examples run; those of SHARDING.md in test_sharding.py, on the devices that they need."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "pallas_attn/SERVING.md",
    "pallas_attn/ops/blocksparse_attention/README.md",
    "pallas_attn/ops/flash_attention/README.md",
    "pallas_attn/ops/ragged_attention/README.md",
)
EXAMPLES = {
    f"{page}-{number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name):
    exec(compile(EXAMPLES[name], name, "exec"), {})


def test_each_page_has_examples():
    assert {name.rpartition("-")[0] for name in EXAMPLES} == set(PAGES)


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("pallas_attn/**/*.md")), ids=str
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
