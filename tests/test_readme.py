"""The README's Python examples run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), {})


def test_there_are_examples():
    assert EXAMPLES
