"""A test that hangs ends alone, and by its name, whatever it waits for: the settings in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
TESTS = """
import ctypes

def test_before(): ...
def test_that_hangs():
    ctypes.PyDLL(None).sleep(600)  # keeps Python's lock: no signal, and no thread of Python's, gets to say a word
def test_behind(): ...
"""


@pytest.mark.slow
def test_it_is_named_and_others_run(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(SETTINGS), "--rootdir", str(tmp_path)]
    command += ["-p", "xdist.plugin", "-n", "1", "-o", "faulthandler_timeout=5", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout[-2000:]
    assert "crashed while running 'test_one.py::test_that_hangs'" in run.stdout
    assert "1 failed, 2 passed" in run.stdout
    assert 'test_one.py", line 6 in test_that_hangs' in run.stderr, "where it stood"


def test_the_limit(pytestconfig):
    """More than any test takes where others have the machine, and less than a run of all of them."""
    assert 600 <= float(pytestconfig.getini("faulthandler_timeout")) <= 3600
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
