"""The CUDA library builds for sm_90a, and its machine code is what its README says. Needs nvcc, no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent
# The decode kernel's warpgroups raise their registers to this at run time; ptxas reports the launch's 168.
CONSUMER_REGISTERS = 240
SMEM_LIMIT = 227 * 1024


def _tool(name: str) -> str | None:
    triton = pytest.importorskip("triton", reason="its wheel ships cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(bundled) if bundled.exists() else shutil.which(name)


@pytest.fixture
def build_backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "xla_ffi"))
    return pytest.importorskip("build_backend", reason="scikit-build-core is not installed")


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    directory = tmp_path_factory.mktemp("cuda_build")
    configure = ["cmake", str(ROOT / "xla_ffi"), f"-DPython3_EXECUTABLE={sys.executable}"]
    configured = subprocess.run(configure, cwd=directory, capture_output=True, text=True, check=False)
    assert configured.returncode == 0, configured.stderr
    if (reason := directory / "no_cuda_library.txt").exists():
        pytest.skip(reason.read_text().strip())
    built = subprocess.run(
        ["cmake", "--build", ".", "--parallel", "2"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


@pytest.fixture(scope="session")
def library(build: Path) -> Path:
    return build / "libpallas_attn_cuda.so"


@pytest.fixture(scope="session")
def kernels(build: Path) -> dict[str, str]:
    """SASS of each kernel by its mangled name."""
    cuobjdump = _tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    text = subprocess.run(
        [cuobjdump, "-sass", str(build / "libpallas_attn_cuda.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(re.findall(r"arch = (\S+)", text)) == {"sm_90a"}
    return dict(re.findall(r"Function : (\S+)\n(.*?)(?=\n\t\tFunction : |\Z)", text, flags=re.DOTALL))


def _decode_kernels(kernels: dict[str, str]) -> list[str]:
    found = [sass for name, sass in kernels.items() if "dense_decode_kernel" in name]
    assert len(found) == 2  # bfloat16, float16
    return found


def test_exports_only_the_handlers(library: Path) -> None:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    ours = [line.split()[-1] for line in names.stdout.splitlines() if "pallas_attn" in line]
    assert sorted(ours) == ["pallas_attn_mla_decode_sm90", "pallas_attn_mla_schedule_sm90"]


def test_links_neither_driver_nor_runtime(library: Path) -> None:
    needed = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "libcuda" not in needed


@pytest.mark.parametrize(
    "instruction",
    [
        *("HGMMA.64x64x16", "HGMMA.64x256x16", "UTMALDG.3D", "UTMASTG.3D", "USETMAXREG"),
        "CCTL.E.RML2",  # partial results are discarded from the L2
    ],
)
def test_decode_uses(kernels: dict[str, str], instruction: str) -> None:
    for sass in _decode_kernels(kernels):
        assert instruction in sass


def test_nothing_spills(kernels: dict[str, str], build: Path) -> None:
    for name, sass in kernels.items():
        assert not re.search(r"\b(LDL|STL)\b", sass), name
    for log in build.glob("*.log"):
        for stores, loads in re.findall(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.read_text()
        ):
            assert (stores, loads) == ("0", "0"), log.name


def test_products_stay_asynchronous(build: Path) -> None:
    """ptxas says so when it waits after every wgmma; that costs half of the speed and nothing else tells."""
    for log in build.glob("*.log"):
        assert "Potential Performance Loss" not in log.read_text(), log.name


def test_math_warps_are_uniform(kernels: dict[str, str]) -> None:
    """Where the compiler suspects divergence it guards every wgmma with WARPSYNC: 6% slower when it did."""
    for sass in _decode_kernels(kernels):
        products, _ = sass.rsplit("HGMMA", 1)
        assert "WARPSYNC" not in products


def test_nothing_is_read_before_the_kernel_before_has_ended(kernels: dict[str, str]) -> None:
    """The launch is a programmatic dependent one, and __ldg is a load that the compiler may move across barriers."""
    for sass in _decode_kernels(kernels):
        before, after = sass.split("ACQBULK", 1)
        assert not re.search(r"\b(LDG|UTMALDG)\b", before)
        assert re.search(r"\bLDG\b", after)


def test_registers_and_shared_memory_are_within_the_plan(kernels: dict[str, str]) -> None:
    for sass in _decode_kernels(kernels):
        used = max(int(register) for register in re.findall(r"\bR(\d+)\b", sass))
        assert used < CONSUMER_REGISTERS
    plan = (ROOT / "csrc/mla/sm90/dense/smem_plan.h").read_text()
    total = int(re.search(r"= (\d+), of the (\d+) a CTA can have", plan)[1])  # checked by its static_asserts
    assert total <= SMEM_LIMIT


def test_csrc_is_framework_free() -> None:
    for source in (ROOT / "csrc").rglob("*.*"):
        if source.suffix in {".h", ".cu", ".cc"}:
            included = re.findall(r'#include [<"]([^>"]+)[>"]', source.read_text())
            assert not [
                name for name in included if re.match(r"(xla|jax|torch|ATen|Python|cute|cutlass)", name)
            ], source


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
    """As on a machine without a CUDA toolkit."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
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

    configured = run("cmake", str(ROOT / "xla_ffi"), f"-DPython3_EXECUTABLE={sys.executable}")
    assert configured.returncode == 0, configured.stderr
    if (reason := tmp_path / "no_cuda_library.txt").exists():
        pytest.skip(reason.read_text().strip())
    assert "/nvidia/cu13/bin/nvcc" in configured.stdout
    built = run("cmake", "--build", ".", "--parallel", "2")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "sm_90a" in run(_tool("cuobjdump") or "cuobjdump", "-lelf", "libpallas_attn_cuda.so").stdout


def test_without_a_host_compiler_the_build_is_pure_python(tmp_path: Path) -> None:
    """A slim container with a toolkit and without gcc: a reason, not a failed install."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None or ninja is None:
        pytest.skip("cmake or ninja is not installed")
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


def test_programs_for_benchmarks_and_sanitizers_build(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["cmake", "--build", ".", "--parallel", "2", "--target", "launcher", "smoke"]
    built = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pytest.importorskip("mla_graph", reason="torch is not installed").load(str(build / "libmla_launcher.so"))


def test_registers_with_xla(library: Path) -> None:
    """In a process of its own: a registration is for the life of the process."""
    code = "from pallas_attn import _ffi; assert _ffi.is_available() == (True, None); _ffi.register()"
    environment = {**os.environ, "PALLAS_ATTN_CUDA_LIBRARY": str(library), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
