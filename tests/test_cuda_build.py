"""The CUDA library builds for sm_90a, and its machine code is what its README says. Needs nvcc, no GPU."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_cuda_wheels import build_backend as build_backend
from test_cuda_wheels import tool

pytestmark = [pytest.mark.once, pytest.mark.slow]
ROOT = Path(__file__).parent.parent
# The decode kernel's warpgroups raise their registers to this at run time; ptxas reports the launch's 168.
CONSUMER_REGISTERS = 240
SMEM_LIMIT = 227 * 1024


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    directory = tmp_path_factory.mktemp("cuda_build")
    # What the environment was built of: an object that is older than any of its sources is made anew.
    for kind in ("csrc.*", "xla_ffi.*"):
        for made in (Path(sys.prefix) / "cuda_build").glob(kind):
            shutil.copy2(made, directory)
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
    cuobjdump = tool("cuobjdump")
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


def _decode_kernels(kernels: dict[str, str], count: int = 12) -> list[str]:
    found = [sass for name, sass in kernels.items() if re.search("decode_kernel|sparse_kernel", name)]
    # bfloat16 and float16, dense and sparse; sparse over bytes, also by pairs; three tiles of bytes, dense and sparse
    assert len(found) == count
    return found


def test_exports_what_python_asks_of_the_library_and_nothing_else(library: Path) -> None:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    ours = [line.split()[-1] for line in names.stdout.splitlines() if "pallas_attn" in line]
    assert sorted(ours) == ["pallas_attn_cuda_versions", "pallas_attn_ffi_targets"]


def test_links_neither_driver_nor_runtime(library: Path) -> None:
    needed = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "libcuda" not in needed


@pytest.mark.parametrize(
    "instruction", ["HGMMA.64x64x16", "HGMMA.64x256x16", "UTMALDG.3D", "UTMASTG.3D", "USETMAXREG"]
)
def test_decode_uses(kernels: dict[str, str], instruction: str) -> None:
    over_elements = {name: sass for name, sass in kernels.items() if "transposed_decode_kernel" not in name}
    for sass in _decode_kernels(over_elements, 6):
        assert instruction in sass


def _transposed_kernel(kernels: dict[str, str], tokens: str, rows: int) -> str:
    pattern = f"transposed_decode_kernelIN.*{tokens}ELi{rows}E"
    [sass] = [sass for name, sass in kernels.items() if re.search(pattern, name)]
    return sass


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("tokens", ["AllTokens", "ChosenTokens"])
def test_decode_over_bytes_multiplies_from_registers(kernels: dict[str, str], tokens: str, rows: int) -> None:
    """36 products of a page's scores, which stand once; of its output 16, for the own and the other's page."""
    sass = _transposed_kernel(kernels, tokens, rows)
    products = re.findall(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)? R\d+, R\d+, gdesc", sass)
    scores = [(str(rows), "")] * 32 + [(str(rows), ".BF16")] * 4
    assert sorted(products) == sorted(scores + [(str(rows), "")] * (2 * 16))
    assert sass.count("HGMMA") == len(products)
    # A page, or a row, is one copy of the engine; nothing is copied by threads.
    assert re.search(r"UBLKCP\.S", sass)
    assert "LDGSTS" not in sass


def test_partial_results_are_discarded_from_the_l2(kernels: dict[str, str]) -> None:
    """By the kernels whose CTAs merge them."""
    assert sum("CCTL.E.RML2" in sass for sass in _decode_kernels(kernels)) == 10


def test_bytes_are_converted_by_the_hardware_and_each_once(kernels: dict[str, str]) -> None:
    for tokens, rows in itertools.product(("AllTokens", "ChosenTokens"), (16, 32, 64)):
        sass = _transposed_kernel(kernels, tokens, rows)
        # 64 tokens x 512 among 128 threads, two at once, for scores; half of them for the output, which stands twice.
        assert sass.count("F2FP.F16.E4M3.UNPACK_B") == 64 * 512 // 128 // 2 + 2 * 64 * 256 // 128 // 2


def test_chosen_bytes_are_converted_once_too(kernels: dict[str, str]) -> None:
    # A warp's 16 tokens, of a pair of CTAs 8, among 32 lanes, two numbers at once; no stage of a converter stands there
    # twice.
    for converter, tokens in (("RowConverter", 16), ("PairConverter", 8)):
        [sass] = [sass for name, sass in kernels.items() if converter in name]
        assert sass.count("F2FP.F16.E4M3.UNPACK_B") == tokens * 512 // 32 // 2


def test_pairs_of_ctas_tell_each_other_without_a_fence(kernels: dict[str, str]) -> None:
    """A release for the cluster is a fence for the whole GPU: as they begin and as they end, not in between."""
    [sass] = [sass for name, sass in kernels.items() if "PairConverter" in name]
    assert "STAS.128" in sass
    assert sass.count("MEMBAR.ALL.GPU") == sass.count("UCGABAR_ARV") > 0


# Kernels that keep a few words of a thread on the stack, most bytes that they store there: wide heads take most
# registers for products alone, over chosen rows a part's results are stored behind the loop, and the forward kernel has
# there what it needs at a tile's ends, but not in between. Beside threads that copy keys (Feed 2), its scout has
# 32 registers and a tile's time to find the next one. The backward kernel's feeding warps have 24, and its math warps
# keep a few numbers of a tile there, beside 212 registers of products, and at heads of 64 what a soft cap's derivative
# takes.
SPILLS = {
    r"backward.instantiations\..*_rows\.": 164,
    r"backward.instantiations\..*_64\.": 292,
    r"backward.instantiations": 124,
    r"forward.instantiations\..*_256\..*FormE2": 292,
    r"forward.instantiations\..*_(192|192x128|256)\..*FeedE2": 216,
    r"forward.instantiations\..*_(192|192x128|256)\.": 152,
    r"forward.instantiations\..*FeedE2": 144,
    r"forward.instantiations\..*_96\.": 0,
    r"forward.instantiations": 80,
    r"sparse.instantiations.b?float16": 4,
}


def test_nothing_spills_but_a_few_words(build: Path) -> None:
    for log in build.glob("*.log"):
        kernels = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log.read_text(), re.DOTALL)
        for kernel, stores in kernels:
            name = f"{log.name} {kernel}"
            allowed = next((most for pattern, most in SPILLS.items() if re.search(pattern, name)), 0)
            assert int(stores) <= allowed, name


def test_products_stay_asynchronous(build: Path) -> None:
    """ptxas says so when it waits after every wgmma; that costs half of the speed and nothing else tells."""
    for log in build.glob("*.log"):
        assert "Potential Performance Loss" not in log.read_text(), log.name


def test_math_warps_are_uniform(kernels: dict[str, str]) -> None:
    """Where the compiler suspects divergence it guards every wgmma with WARPSYNC: 6% slower when it did."""
    for sass in _decode_kernels(kernels):
        assert "WARPSYNC" not in sass[sass.index("HGMMA") : sass.rindex("HGMMA")]


def test_nothing_is_read_before_the_kernel_before_has_ended(kernels: dict[str, str]) -> None:
    """The launch is a programmatic dependent one, and __ldg is a load that the compiler may move across barriers."""
    for sass in _decode_kernels(kernels):
        before, after = sass.split("ACQBULK", 1)
        assert not re.search(r"\b(LDG|LDGSTS|UTMALDG|UBLKCP)\b", before)
        assert re.search(r"\bLDG\b", after)


def test_registers_and_shared_memory_are_within_the_plan(kernels: dict[str, str]) -> None:
    for sass in _decode_kernels(kernels):
        used = max(int(register) for register in re.findall(r"\bR(\d+)\b", sass))
        assert used < CONSUMER_REGISTERS
    plan = (ROOT / "csrc/mla/sm90/dense/smem_plan.h").read_text()
    total = int(re.search(r"= (\d+), of the (\d+) a CTA can have", plan)[1])  # checked by its static_asserts
    assert total <= SMEM_LIMIT


def test_the_library_may_be_called_manylinux(library: Path, build_backend: ModuleType) -> None:
    """Where it was built on a machine no newer than that; or says which version of which library is too new."""
    versions = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True)
    asked = re.findall(r"\b(GLIBC|GLIBCXX)_([\d.]+)", versions.stdout)
    promised = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29)}
    within = all(tuple(map(int, version.split("."))) <= promised[name] for name, version in asked)
    assert asked
    assert build_backend.within_promise(library.read_bytes()) == within


def test_programs_for_sanitizers_build(build: Path) -> None:
    command = ["cmake", "--build", ".", "--parallel", "2", "--target", "smoke"]
    built = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


# XLA looks at a handler when it is registered for a platform that has started; for one that has not, it only takes
# note of it. So: for the CPU, where these could not run but can be asked what they are.
REGISTER = """
import ctypes, itertools, sys
import jax
from pallas_attn._call import ffi

jax.devices()
registered = []
register_ffi_target = jax.ffi.register_ffi_target
def noting(name, *arguments, **keywords):
    register_ffi_target(name, *arguments, **keywords)
    registered.append(name)
jax.ffi.register_ffi_target = noting

if sys.argv[1] == "library":
    library, reason = ffi._load()
    assert reason is None, reason
    assert ffi._versions(library)[0] >= 12080
else:
    handler = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    table = (ffi._Target * 2)((b"pallas_attn_getpid", handler), (None, None))
    class library:
        pallas_attn_ffi_targets = lambda: table
ffi._register(library, "cpu")
print(*registered)
"""


def _register(what: str, library: Path) -> subprocess.CompletedProcess:
    """In a process of its own: a registration is for the life of the process, and a bad one may end it."""
    environment = {**os.environ, "PALLAS_ATTN_CUDA_LIBRARY": str(library), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", REGISTER, what]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_registers_with_xla(library: Path) -> None:
    done = _register("library", library)
    assert done.returncode == 0, done.stderr
    targets = re.findall(r"^PALLAS_ATTN_TARGET\((\w+)\)", (ROOT / "xla_ffi/targets.def").read_text(), re.M)
    assert len(targets) == 9
    assert done.stdout.split() == targets


@pytest.mark.control
def test_xla_refuses_what_is_no_handler() -> None:
    """Or the test above could not fail."""
    done = _register("getpid", Path())
    assert done.returncode != 0
    assert "pallas_attn_getpid" not in done.stdout


def test_objects_of_equal_names_do_not_collide(build: Path) -> None:
    names = {path.name for path in build.glob("*.o")}
    assert "csrc.mla.sm90.dense.instantiations.bfloat16.cu.o" in names
    sources = [*(ROOT / "csrc").rglob("*.c[cu]"), *(ROOT / "xla_ffi").glob("*.cc")]
    assert len(names - {"empty.o"}) == len(sources)
