"""scikit-build-core's hooks, and one decision more: whether the build needs nvcc from wheels.

Where there is a recent CUDA toolkit it is used, and nothing is downloaded. Where there is none, the wheels (120 MB) are
requirements of the build, so that a plain `pip install` still gives a wheel with the CUDA library; but not without a
host compiler, which nvcc cannot do without. Markers in pyproject.toml cannot say "unless nvcc is on PATH".
PALLAS_ATTN_NVCC decides for itself: a path is taken, "wheels" asks for the wheels, "none" builds without CUDA.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as _scikit
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# The first CUDA 13, which every CUDA 13 driver runs. All five by version: nvcc's own requirements would mix releases.
WHEELS = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")]

OLDEST_NVCC = (12, 8)


def nvcc_requirements() -> list[str]:
    """The wheels, unless there is a toolkit or none can be had."""
    chosen = os.environ.get("PALLAS_ATTN_NVCC")
    if chosen:
        return WHEELS if chosen == "wheels" else []
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return []
    if not (os.environ.get("NVCC_CCBIN") or shutil.which("gcc")):
        return []  # no nvcc works without a host compiler
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [
        os.environ.get("CUDACXX"),
        shutil.which("nvcc"),
        *(f"{home}/bin/nvcc" for home in homes if home),
    ]
    # CMakeLists.txt takes the first, or the wheels' where that is too old.
    first = next((place for place in places if place and Path(place).exists()), None)
    return [] if first and _recent(first) else WHEELS


def _recent(nvcc: str) -> bool:
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    release = re.search(r"release (\d+)\.(\d+)", said)
    return bool(release) and tuple(map(int, release.groups())) >= OLDEST_NVCC


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_wheel(config_settings), *nvcc_requirements()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_editable(config_settings), *nvcc_requirements()]
