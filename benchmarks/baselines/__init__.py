"""Kernels of other projects, beside which ours are measured where their packages can be imported.

One file a peer, named as on the command line (see PEERS), with

    TITLE                  for readers
    OPS                    the ops it is a peer for
    available()            why it cannot run here, or None
    supports(case)         why it cannot serve a case, or None
    build(case, inputs)    {variant: call(i)}: launches the kernel for the i-th table and returns the output, like the
                           query but for its last dimension. What a model makes once for all its layers is made
                           beforehand, and a later call may overwrite an earlier one's output. The fastest variant
                           whose output is right counts.

A peer on JAX gives calls to trace instead: over pages as `workloads.decode.Call` from `variants(case)`, of dense arrays
a function of query, key and value that returns (out, a small float array that the same work makes) from `attend(case)`.

BENCH_PEERS names folders (separated by colons) that are searched for peers' packages after the installed ones, and
for compiled libraries that have no package around them.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# In the order in which tables and plots have them.
PEERS = (
    "flash_mla",
    "fa3",
    "flashinfer",
    "vllm_triton",
    "jax_triton",
    "jax_deprecated",
    "jax_nn",
    "torch_sdpa",
    "cudnn",
    "dew",
    "jax_mha",
    "manual",
)


def load(name: str) -> Any:
    """The module of one of PEERS."""
    return importlib.import_module(f"{__name__}.{name}")


def for_op(op: str) -> dict[str, Any]:
    return {name: peer for name in PEERS if op in (peer := load(name)).OPS}


def folders() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("BENCH_PEERS", "").split(os.pathsep) if folder]


def search_folders() -> None:
    """Makes what lies in BENCH_PEERS importable."""
    sys.path.extend(str(folder) for folder in folders() if str(folder) not in sys.path)


def importable(*packages: str) -> str | None:
    """Why one of the packages cannot be imported; None if all can."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # an extension built for another torch or CUDA fails in ways of its own
            if isinstance(error, ModuleNotFoundError) and error.name == package.partition(".")[0]:
                return f"package {error.name!r} is not installed"
            return f"package {package!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None


def torch_on_gpu(*packages: str) -> str | None:
    """Why torch, and packages for it, cannot run on the GPU that JAX has its arrays on."""
    if reason := importable("torch", *packages):
        return reason
    if not importlib.import_module("torch").cuda.is_available():
        return "needs an NVIDIA GPU, torch finds none"
    if jax.default_backend() != "gpu":
        return f"needs its inputs on a GPU, JAX makes them on the {jax.default_backend()}"
    return None


def plain_only(case: Any, but: Sequence[str] = ()) -> str | None:
    """Why a peer that is set up for plain bf16 and fp16 attention, `but` for these options, cannot serve a case."""
    if (getattr(case, "cache_dtype", None) or case.dtype) not in ("bfloat16", "float16"):
        return "is set up for bf16 and fp16 caches here"
    for option in ("sliding_window", "block_sparse", "documents"):
        if option not in but and getattr(case, option, None):
            return f"is set up without {option} here"
    return None


def q_lens(case: Any) -> tuple[int, ...]:
    """Query tokens of each sequence."""
    return getattr(case, "q_lens", None) or (case.q_len,) * case.num_seqs


def other_values(case: Any) -> str | None:
    """Why a peer whose values are as wide as its keys cannot serve a case."""
    width = getattr(case, "value_dim", None)
    return None if width in (None, case.head_dim) else "its values are as wide as its keys"


def window(case: Any) -> tuple[int, int]:
    """Keys that a query sees before its own and behind it, as FlashAttention has them; -1: all."""
    if not (width := getattr(case, "sliding_window", None)):
        return -1, -1
    return width - 1, 0 if getattr(case, "causal", True) else width - 1


def segment_ids(case: Any) -> jax.Array | None:
    """int32 [batch, tokens]: the document that each token is of."""
    if not case.documents:
        return None
    lens = jnp.array(case.documents)
    ids = jnp.repeat(jnp.arange(len(lens)), lens, total_repeat_length=case.q_len)
    return jnp.broadcast_to(ids, (case.batch, case.q_len))


def query_starts(case: Any, **options: Any) -> Any:
    """Where each sequence's query tokens begin among all, and where the last one's end, as an int32 tensor."""
    torch = importlib.import_module("torch")
    return torch.tensor([0, *itertools.accumulate(q_lens(case))], dtype=torch.int32, **options)


def as_tensors(inputs: Any) -> Any:
    """JAX arrays as torch tensors over the same memory."""
    torch = importlib.import_module("torch")
    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(inputs))


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
