import os

# Before torch is imported: its threads wait by spinning, and those of several test processes take each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are deselected where there is no GPU."""
    if jax.default_backend() == "gpu":
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in set(gpu)]
