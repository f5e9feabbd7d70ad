"""Prints what a build of the package may ask for: also what it only needs where there is no cmake, ninja or nvcc."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "xla_ffi"))

import build_backend  # noqa: E402  it lies beside its CMakeLists.txt, not in a package

build_system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
print(*build_system["requires"], "cmake", "ninja", *build_backend.WHEELS, sep="\n")
