import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: its threads wait by spinning, and those of several test processes take each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
import sample
from host_build import build_stand_in

# Tracing makes millions of objects that live long, and each collection walks them all.
gc.set_threshold(100_000, 50, 100)
# As on the day that JAX removes it: then "triton" has to do whatever "pallas" did.
WITHOUT_PALLAS = bool(os.environ.get("WITHOUT_PALLAS"))
if WITHOUT_PALLAS:
    sys.modules |= dict.fromkeys(("jax.experimental.pallas.triton", "jax._src.pallas.triton"))

# JAX works out the key of every program in its cache on disk, a tenth of the tests' time or more, cache or not.
jax.config.update("jax_enable_compilation_cache", False)
# For each error JAX asks the disk, of each frame, whether it is one of its own.
jax.config.update("jax_traceback_filtering", "off")

# Of the 65,530 that Linux lets a process have. Every compiled program takes some, until XLA aborts for want of them.
MOST_MAPS = 30_000


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    yield
    if sys.platform == "linux" and Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Before test files are imported, which make arrays."""
    if "LINE_COVERAGE" in os.environ:
        config.pluginmanager.import_plugin("line_coverage")
    # Thousands of small programs are compiled here, most to run once: LLVM's optimisations take a third of the time.
    if jax.default_backend() != "gpu":
        jax.config.update("jax_disable_most_optimizations", True)
    # The package's annotations are checked at each call, but in a sample: an eighth of its time.
    if not config.getoption("sample"):
        jaxtyping.install_import_hook(["pallas_attn"], "beartype.beartype")


def pytest_collection_finish() -> None:
    """What imports made lives as long as the process: a collection need not walk it."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="the tests and cases that sample.py chooses")


def pytest_report_header() -> str:
    without = " without Pallas' Triton lowering" if WITHOUT_PALLAS else ""
    return f"jax {jax.__version__} on {jax.default_backend()}{without}"


# GPU tests that run what Pallas compiles, and not the same by Triton itself.
UNPAIRED = pytest.StashKey[list[str]]()
# What a sample is taken of, had -m and -k left nothing out.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture
def refs_are_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel's rules can be asked outside of a kernel."""

    def load(ref, mask=True, other=0):
        return jnp.where(mask, ref.get(mode="clip"), other)

    monkeypatch.setattr("pallas_attn._tile.triton.load", load)


@pytest.fixture
def as_users_have_it() -> Iterator[None]:
    """Without the checks of types that jaxtyping adds in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def backward_on_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention's backward pass, for its own tests and those of block-sparse gradients: built once."""
    return build_stand_in(tmp_path_factory.mktemp("stand_in"), "attention_backward")


@pytest.fixture
def unpaired(pytestconfig: pytest.Config) -> list[str]:
    return pytestconfig.stash[UNPAIRED]


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    return pytestconfig.stash[COLLECTED]


def asks_for_pallas(item: pytest.Item) -> bool:
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any("pallas" in ([value] if isinstance(value, str) else value)
               for value in params if isinstance(value, str | list))  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """GPU tests are deselected where there is no GPU, and what is not of the --sample of what -m and -k leave."""
    by_pallas = [item for item in items if asks_for_pallas(item)]
    collected = {item.nodeid for item in items}
    config.stash[UNPAIRED] = [
        item.nodeid
        for item in by_pallas
        if item.get_closest_marker("gpu") and item.nodeid.replace("pallas", "triton") not in collected
    ]
    if WITHOUT_PALLAS:
        deselect(config, items, by_pallas)
    if jax.default_backend() != "gpu":
        deselect(config, items, [item for item in items if item.get_closest_marker("gpu")])
    config.stash[COLLECTED] = [*items]
    yield
    if config.getoption("sample"):
        deselect(config, items, sample.left_out_of(items))


def deselect(config: pytest.Config, items: list[pytest.Item], unwanted: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=unwanted)
    left_out = set(unwanted)
    items[:] = [item for item in items if item not in left_out]
