"""scikit-build-core's hooks, and two decisions more: whether the build needs nvcc from wheels, and the wheel's tag.

Where there is a recent CUDA toolkit it is used, and nothing is downloaded. Where there is none, the wheels (120 MB) are
requirements of the build, so that a plain `pip install` still gives a wheel with the CUDA library; but not without a
host compiler, which nvcc cannot do without. Markers in pyproject.toml cannot say "unless nvcc is on PATH".
PALLAS_ATTN_NVCC decides for itself: a path is taken, "wheels" asks for the wheels, "none" builds without CUDA.

Whether there is a library is known when the wheel is built, and its name says so: a wheel without runs anywhere and is
called py3-none-any, so that it never passes for one with the library.
"""

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from scikit_build_core import build as _scikit
from scikit_build_core.build import (
    build_editable,
    build_sdist,
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

LIBRARY = "libpallas_attn_cuda.so"
# What manylinux_2_34 promises of the C and C++ libraries; ours links no others.
MANYLINUX = "manylinux_2_34"
PROMISED = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}


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


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    name = _scikit.build_wheel(wheel_directory, config_settings, metadata_directory)
    return tag_wheel(Path(wheel_directory) / name).name


def tag_wheel(wheel: Path) -> Path:
    """The wheel under the name it deserves: py3-none-any without a library, manylinux where the library allows it."""
    with zipfile.ZipFile(wheel) as old:
        files = {name: old.read(name) for name in old.namelist()}
    library = next((data for name, data in files.items() if name.endswith(LIBRARY)), None)
    *project, _, _, built_for = wheel.stem.split("-")
    if library is None:
        tag = "py3-none-any"
    elif within_promise(library):
        tag = f"py3-none-{MANYLINUX}_{platform.machine()}"
    else:
        tag = f"py3-none-{built_for}"

    (about,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    text = re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", files[about].decode())
    text = re.sub(r"(?m)^Root-Is-Purelib: .*$", f"Root-Is-Purelib: {str(library is None).lower()}", text)
    files[about] = text.encode()
    record = about.removesuffix("WHEEL") + "RECORD"
    del files[record]
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "".join(f"{line}\n" for line in [*lines, f"{record},,"]).encode()

    wheel.unlink()
    tagged = wheel.with_name("-".join([*project, tag]) + ".whl")
    with zipfile.ZipFile(tagged, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in files.items():
            new.writestr(name, data)
    return tagged


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def within_promise(library: bytes) -> bool:
    """Whether the symbol versions that a library asks for, which stand in it as text, are manylinux's."""
    asked = re.findall(rb"\b(GLIBC|GLIBCXX)_(\d+(?:\.\d+)+)\0", library)
    return all(tuple(map(int, version.split(b"."))) <= PROMISED[name.decode()] for name, version in asked)
