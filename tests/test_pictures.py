"""The pages' drawings are what docs/draw.py draws."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.once

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
assert spec
assert spec.loader
draw = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_drawing_is_drawn(name):
    text = (DOCS / f"pages/pictures/{name}.svg").read_text()
    assert text == draw.PICTURES[name]()
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_no_other_drawings():
    assert {path.stem for path in (DOCS / "pages/pictures").iterdir()} == set(draw.PICTURES)
