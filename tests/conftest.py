import gc
import os

# Before torch is imported: its threads wait by spinning, and those of several test processes take each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest

# Tracing makes millions of objects that live long, and each collection walks them all: a fifth of its time by default.
gc.set_threshold(100_000, 50, 100)


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are deselected where there is no GPU, and XLA's compiler for the CPU is told to hurry.

    Thousands of small programs are compiled here, most to run once: LLVM's optimisations take a third of the time.
    """
    if jax.default_backend() == "gpu":
        return
    jax.config.update("jax_disable_most_optimizations", True)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in set(gpu)]
