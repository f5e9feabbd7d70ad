"""vLLM's unified attention (Triton) called from JAX by jax-triton, in the same jitted loop as ours.

jax-triton is what JAX recommends for Triton kernels. The kernel is another project's, so that what is compared is a way
for a user to have a kernel in JAX; `vllm_triton` is the same kernel as torch launches it.
"""

import contextlib
import importlib
import inspect
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import reference
from workloads.decode import Call

import baselines
from baselines.vllm_triton import OPERATORS, PROGRAMS, SEGMENTS

TITLE = "vLLM's Triton in JAX"
OPS = ("paged_attention",)
PLAIN = False
ORDER = reference.PAGES_FIRST
ERROR_LIMIT = None
# From this JAX on every call of jax-triton, up to that release of it, raises a TypeError.
BROKEN_JAX, BROKEN_RELEASE = (0, 12), (0, 4, 1)


# Its import sets this to nothing for the whole process, in which Triton then compiles for nobody else.
CACHE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def _cache_folder_kept() -> Iterator[None]:
    folder = os.environ.get(CACHE)
    try:
        yield
    finally:
        os.environ.pop(CACHE, None)
        if folder is not None:
            os.environ[CACHE] = folder


def available() -> str | None:
    with _cache_folder_kept():
        reason = baselines.importable("jax_triton", f"{OPERATORS}.triton_unified_attention")
    if reason:
        return reason
    if _numbers(jax.__version__)[:2] >= BROKEN_JAX and _numbers(_release()) <= BROKEN_RELEASE:
        return (
            f"jax-triton {_release()} does not work with jax {jax.__version__}: its calls raise a TypeError"
        )
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, JAX computes on the {jax.default_backend()}"
    return None


def _release() -> str:
    return metadata.version("jax-triton")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def supports(case: Any) -> str | None:
    return baselines.plain_only(case)


def variants(case: Any) -> dict[str, Call]:
    return {"": _call(case)}


def _call(case: Any) -> Call:
    """Tiles, and when sequences are cut, are vLLM's choices."""
    kernels = importlib.import_module("baselines.vllm_kernels")
    tile_size = importlib.import_module(f"{OPERATORS}.triton_unified_attention")._get_tile_size
    group = case.num_heads // case.num_kv_heads
    block_m = max(16, 1 << (group - 1).bit_length())
    block_q = block_m // group
    cut = case.num_seqs * -(-case.q_len // block_q) <= PROGRAMS // case.num_kv_heads
    sizes = dict(
        NUM_SEQS=case.num_seqs,
        NUM_HEADS=case.num_heads,
        HEAD_DIM=case.head_dim,
        PADDED_DIM=1 << (case.head_dim - 1).bit_length(),
        MAX_PAGES=case.max_pages,
        BLOCK_Q=block_q,
        TILE=tile_size(case.head_dim, 0, jnp.dtype(case.dtype).itemsize, is_prefill=not cut),
    )
    more = dict(SCALE=case.head_dim**-0.5, GROUP=group, PAGE_SIZE=case.page_size, BLOCK_M=block_m)
    tokens = case.num_seqs * case.q_len
    grid = (tokens // block_q + case.num_seqs, case.num_kv_heads)

    def call(query, caches, table, lengths, _):
        starts = jnp.arange(case.num_seqs + 1, dtype=jnp.int32) * case.q_len
        read = (query.reshape(tokens, case.num_heads, case.head_dim), *caches, table, lengths, starts)
        out = jax.ShapeDtypeStruct(read[0].shape, query.dtype)
        if not cut:
            out = _launch(kernels.attend_whole, read, out, grid, **sizes, **more)
        else:
            rows = (tokens, case.num_heads, SEGMENTS)
            parts = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*rows, sizes["PADDED_DIM"]), rows, rows)]
            pieces = dict(sizes, SEGMENTS=SEGMENTS)
            parts = _launch(kernels.attend_cut, read, parts, (*grid, SEGMENTS), **pieces, **more)
            out = _launch(kernels.merge, (*parts, lengths, starts), out, (tokens, case.num_heads), **pieces)
        return out.reshape(query.shape), out

    return call


def _launch(kernel: Any, arrays: Any, results: Any, grid: tuple[int, ...], **constants: Any) -> Any:
    triton_call = importlib.import_module("jax_triton").triton_call
    # Its name changed in 0.4.
    name = "out_type" if "out_type" in inspect.signature(triton_call).parameters else "out_shape"
    return triton_call(*arrays, kernel=kernel, grid=grid, **{name: results}, **constants)
