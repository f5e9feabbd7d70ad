"""The only importer of Pallas' Triton lowering, which JAX deprecated in 0.11 and still ships in 0.12.

Kernels import the primitives and `kernel_call` from here, so that another lowering of the same kernels is a matter
of this file.
"""

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_attn._call import gradients
from pallas_attn._tile.sharding import vary, varying_axes, varying_like

load = plgpu.load
store = plgpu.store
program_id = pl.program_id
when = pl.when
ds = pl.ds
next_power_of_2 = pl.next_power_of_2


def tile_side(size: int) -> int:
    """Side of a tile that holds `size` rows or columns of a matrix product: a power of two, at least the tensor
    core's 16. The excess is masked."""
    return max(16, next_power_of_2(size))


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Matrix product with a float32 accumulator; float32 operands keep full precision (no TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


_compiling = contextvars.ContextVar("_compiling", default=False)


def exp2(x: jax.Array) -> jax.Array:
    """One instruction where a kernel is compiled for a GPU: XLA's own exp2 spends three more on what is denormal."""
    if not _compiling.get() or x.dtype != jnp.float32:
        return jnp.exp2(x)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def _marked(kernel: Callable[..., None], *refs: Any) -> None:
    token = _compiling.set(True)
    try:
        kernel(*refs)
    finally:
        _compiling.reset(token)


def kernel_call(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """Runs `kernel(*operand_refs, *output_refs)` over `grid`; operands may be pytrees, and
    every ref is a whole array, indexed by the kernel."""
    axes = varying_axes(operands)
    call = pl.pallas_call(
        kernel if interpret else functools.partial(_marked, kernel),
        out_shape=[varying_like(struct, axes) for struct in out_shape],
        grid=grid,
        name=name,
        interpret=interpret,
        input_output_aliases=dict(input_output_aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )
    return gradients.refuse(name, call)(*vary(operands, axes))
