"""What the build makes of machines without nvcc, without a compiler, and of wheels. Needs no GPU."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent


def tool(name: str) -> str | None:
    triton = pytest.importorskip("triton", reason="its wheel ships cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(bundled) if bundled.exists() else shutil.which(name)


def _build_tools() -> tuple[str, str]:
    """cmake and ninja: the environment's, which may not be on the path, or the machine's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cmake, ninja = (shutil.which(tool, path=path) for tool in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        pytest.skip("cmake or ninja is not installed")
    return cmake, ninja


@pytest.fixture
def build_backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "xla_ffi"))
    return pytest.importorskip("build_backend", reason="scikit-build-core is not installed")


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [("/nonexistent/nvcc", "/nonexistent/nvcc does not run"), ("none", "PALLAS_ATTN_NVCC was none")],
)
def test_configures_without_nvcc(nvcc: str, reason: str, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    environment = {**os.environ, "PALLAS_ATTN_NVCC": nvcc}
    command = ["cmake", str(ROOT / "xla_ffi"), f"-DPython3_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "no_cuda_library.txt").read_text() == f"{reason}\n"


@pytest.mark.slow
def test_builds_with_nvcc_from_wheels(tmp_path: Path, build_backend: ModuleType) -> None:
    """As on a machine without a CUDA toolkit: that they are found, compile for the host and the device, and link."""
    cmake, ninja = _build_tools()
    # Not in the environment of the tests: the releases that torch pins change with it.
    site = tmp_path / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    installed = subprocess.run([*install, *build_backend.WHEELS], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"the wheels cannot be had: {installed.stderr.strip().splitlines()[-1]}")
    environment = {**os.environ, "PALLAS_ATTN_NVCC": "wheels", "PYTHONPATH": str(site)}

    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    tools = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython3_EXECUTABLE={sys.executable}"]
    configured = run(cmake, "-S", str(ROOT / "xla_ffi"), "-B", ".", "-G", "Ninja", *tools)
    assert configured.returncode == 0, configured.stderr
    if (reason := tmp_path / "no_cuda_library.txt").exists():
        pytest.skip(reason.read_text().strip())
    assert "/nvidia/cu13/bin/nvcc" in configured.stdout
    # One kernel and one file of the host's: `build` above is of all of them.
    objects = ["csrc.mla.combine.combine.cu.o", "xla_ffi.library.cc.o"]
    built = run(ninja, *objects)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "sm_90a" in run(tool("cuobjdump") or "cuobjdump", "-lelf", objects[0]).stdout
    wheels = site / "nvidia/cu13"
    link = [str(wheels / "bin/nvcc"), f"-L{wheels / 'lib'}", "-shared", "-cudart", "static"]
    linked = run(*link, *objects, "-o", "library.so")
    assert linked.returncode == 0, linked.stderr


def test_without_a_host_compiler_the_build_is_pure_python(tmp_path: Path) -> None:
    """A slim container with a toolkit and without gcc: a reason, not a failed install."""
    cmake, ninja = _build_tools()
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'Cuda compilation tools, release 13.0, V1' || exit 1\n"
    )
    nvcc.chmod(0o755)
    build = tmp_path / "build"
    tools = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython3_EXECUTABLE={sys.executable}"]
    done = subprocess.run(
        [cmake, "-S", str(ROOT / "xla_ffi"), "-B", str(build), "-G", "Ninja", *tools],
        env=os.environ | {"PALLAS_ATTN_NVCC": str(nvcc)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA library" in done.stdout + done.stderr
    assert "needs a host compiler (gcc)" in done.stdout + done.stderr


def test_the_build_requires_nvcc_only_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_backend: ModuleType
) -> None:
    backend: Any = build_backend
    for name in ("PALLAS_ATTN_NVCC", "CUDACXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend.sys, "platform", "linux")
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    found = {"gcc": "/opt/bin/gcc", "nvcc": str(tmp_path / "nvcc")}
    monkeypatch.setattr(backend.shutil, "which", found.get)
    monkeypatch.setattr(backend.Path, "exists", lambda path: str(path) == str(tmp_path / "nvcc"))
    for release, wheels in (("13.0", 0), ("12.8", 0), ("12.4", 5)):
        (tmp_path / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        (tmp_path / "nvcc").chmod(0o755)
        assert len(backend.nvcc_requirements()) == wheels, release
    del found["nvcc"]
    monkeypatch.setattr(backend.Path, "exists", lambda _: False)
    assert len(backend.nvcc_requirements()) == 5
    del found["gcc"]
    assert backend.nvcc_requirements() == []  # no nvcc works without a host compiler
    monkeypatch.setenv("PALLAS_ATTN_NVCC", "none")
    assert backend.nvcc_requirements() == []
    monkeypatch.setenv("PALLAS_ATTN_NVCC", "wheels")
    assert len(backend.nvcc_requirements()) == 5
    monkeypatch.setattr(backend.sys, "platform", "darwin")
    monkeypatch.delenv("PALLAS_ATTN_NVCC")
    assert backend.nvcc_requirements() == []


def _wheel(directory: Path, library: bytes | None) -> Path:
    """As scikit-build-core names and fills one, with a library or without."""
    wheel = directory / "pallas_attn-0.1.0-py3-none-linux_x86_64.whl"
    about = "pallas_attn-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as new:
        new.writestr("pallas_attn/__init__.py", "")
        if library is not None:
            new.writestr("pallas_attn/libpallas_attn_cuda.so", library)
        new.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n\n"
        )
        new.writestr(f"{about}/RECORD", "stale,,\n")
    return wheel


@pytest.mark.parametrize(
    ("library", "tag"),
    [
        (None, "py3-none-any"),
        (b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBCXX_3.4.29\0", "py3-none-manylinux_2_34_x86_64"),
        (b"\0GLIBC_2.2.5\0GLIBC_2.35\0", "py3-none-linux_x86_64"),
        (b"\0GLIBC_2.34\0GLIBCXX_3.4.30\0", "py3-none-linux_x86_64"),
    ],
)
def test_wheels_with_and_without_the_library_have_names_of_their_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build_backend: ModuleType,
    library: bytes | None,
    tag: str,
) -> None:
    backend: Any = build_backend
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    original = _wheel(tmp_path, library)
    wheel = backend.tag_wheel(original)
    assert wheel.name == f"pallas_attn-0.1.0-{tag}.whl"
    assert list(tmp_path.iterdir()) == [wheel]
    with zipfile.ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    about = files["pallas_attn-0.1.0.dist-info/WHEEL"].decode().splitlines()
    assert f"Tag: {tag}" in about
    assert f"Root-Is-Purelib: {str(library is None).lower()}" in about
    record = dict(
        line.split(",", 1) for line in files["pallas_attn-0.1.0.dist-info/RECORD"].decode().splitlines()
    )
    assert set(record) == set(files)
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert record[name] == ("," if name.endswith("RECORD") else f"sha256={digest},{len(data)}")
