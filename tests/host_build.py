"""The parts of csrc that need no GPU, built with the machine's C++ compiler and none of CUDA's headers."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined"]


def build_library(directory: Path, *sources: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """`sources` by their paths in the repository. Undefined behaviour, like overflow, ends the process."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    library = directory / "library.so"
    command = [compiler, *FLAGS, "-fno-sanitize-recover=all", f"-I{ROOT}/csrc", *flags, "-o", str(library)]
    done = subprocess.run(
        [*command, *(str(ROOT / source) for source in sources)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))
