"""The parts of csrc that need no GPU, built with the machine's C++ compiler; kernels, on what stands in for one."""

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


def build_stand_in(directory: Path, name: str) -> Path:
    """A program that runs a kernel's own source on the host (stand_in/device.h): stand_in/`name`.cc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc, which knows where CUDA's headers are")
    program = directory / name
    host = ["-Og", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered"]
    # Checks of jumps, where a distribution has them on, know of one stack alone.
    host += ["-U_FORTIFY_SOURCE"]
    # What a wide access of the device faults on.
    host += ["-fsanitize=alignment", "-fsanitize=bounds", "-fno-sanitize-recover=all"]
    paths = [f"-I{ROOT}/tests/stand_in", f"-I{ROOT}/csrc"]
    command = [nvcc, "-std=c++20", "-cudart", "none", f"-Xcompiler={','.join(host)}", *paths]
    done = subprocess.run(
        [*command, str(ROOT / f"tests/stand_in/{name}.cc"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program
