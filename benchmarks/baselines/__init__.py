"""Kernels of other projects that the benchmarks set beside ours, where their packages are installed.

Each has a file named as on the command line, with `prepare(package, inputs)`: it makes whatever a model makes once
for all its layers, and gives call(i), which launches the kernel for the i-th table and returns the output,
[batch, q_len, heads, 512]. A later call may overwrite an earlier one's output.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    import torch

# Name on the command line -> package.
PACKAGES = {"flash_mla": "flash_mla", "flash_infer": "flashinfer"}


def refusal(name: str) -> str | None:
    """Why it cannot run here; None if it can."""
    for package in ("torch", PACKAGES[name]):
        try:
            importlib.import_module(package)
        except Exception as error:  # an extension built for another torch or CUDA fails in ways of its own
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"package {package!r} is not installed"
            return f"package {package!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
    if not importlib.import_module("torch").cuda.is_available():
        return "needs an NVIDIA GPU, torch finds none"
    if jax.default_backend() != "gpu":
        return f"needs its inputs on a GPU, JAX makes them on the {jax.default_backend()}"
    return None


def prepare(name: str, inputs: Any) -> "Callable[[int], torch.Tensor]":
    """call(i); `inputs` is a `mla_decode.Inputs` of torch tensors."""
    package = importlib.import_module(PACKAGES[name])
    return importlib.import_module(f"{__name__}.{name}").prepare(package, inputs)


def tensors(inputs: Any) -> Any:
    """JAX arrays as torch tensors over the same memory."""
    torch = importlib.import_module("torch")
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(inputs))


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
