"""What kernels are written with, and which compiler they go to.

The same bodies go one of three ways, named by `Lowering`: "pallas" is JAX's own lowering to Triton, deprecated in 0.11
and still shipped in 0.12; "triton" is ours, to Triton's own compiler; "interpret" runs them in Python. This file is the
only importer of what is deprecated, but for one private name of it in `_lowering/private.py`; both work without it.
"""

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import _lowering
from pallas_attn._call import dispatch
from pallas_attn._call.device import current_device
from pallas_attn._call.sharding import vary, varying_axes, varying_like
from pallas_attn._lowering import cache, compiler, dependent_launch, each, in_bits, private, registers

Lowering = Literal["pallas", "triton", "interpret"]


def _pallas() -> tuple[Any, Any]:
    """Pallas and its Triton lowering, or None once that is removed, which dispatch then reports."""
    try:
        from jax.experimental import pallas
        from jax.experimental.pallas import triton
    except ImportError:
        return None, None
    return pallas, triton


pl, plgpu = _pallas()


def _pallas_missing() -> str | None:
    return (
        None
        if plgpu
        else f"jax {jax.__version__} has no Pallas-Triton lowering, which was deprecated in 0.11"
    )


def _triton_missing() -> str | None:
    if name := private.missing():
        return f"jax {jax.__version__} has no {name}"
    reason = compiler.unavailable()
    # Cached kernels need no compiler; whether a certain one is cached is found out when it is used.
    return None if reason is None or cache.holds_any() else reason


dispatch.installed.update(pallas=_pallas_missing, interpret=_pallas_missing, triton=_triton_missing)


def implementations(
    kernel: Callable[..., Any], supports: Callable[..., str | None], **kind: Any
) -> dict[str, dispatch.Implementation]:
    """The implementations by one kernel, for an op's record: `kernel(operands, lowering=)`, unless `supports(operands,
    lowering=)` says why not; `kind` are further fields of `Implementation`."""
    return {
        name: dispatch.Implementation(
            functools.partial(kernel, lowering=name), functools.partial(supports, lowering=name), **kind
        )
        for name in get_args(Lowering)
    }


def first_lowering() -> Lowering:
    """The lowering of kernels that run beside an implementation in CUDA: the first choice without it."""
    return "pallas" if _pallas_missing() is None else "triton"


def load(
    place: Any, *, mask: jax.Array | None = None, other: Any = None, eviction_policy: str | None = None
) -> jax.Array:
    """Elements at `place`, a part `ref.at[...]` of an array; `other` where not `mask`, without a memory access."""
    if isinstance(place, in_bits.Place):
        return place.load(plgpu.load, mask=mask, other=other)
    read = _lowering.load if isinstance(place, _lowering.Place) else plgpu.load
    return read(place, mask=mask, other=other, eviction_policy=eviction_policy)


def loads_each(dtype: Any) -> bool:
    """Whether `load_each` takes no shared memory."""
    return each.assembly(dtype) is not None and private.pallas_takes_rules()


def load_each(place: Any) -> jax.Array:
    """Elements at `place` of 16 or 32 bits, each loaded by the threads that need it: for tiles that are no part of an
    array, such as those of a table by distance."""
    if isinstance(place, _lowering.Place):
        return _lowering.load(place, each=True)
    loaded = load(place)
    return each.each(loaded) if _compiling.get() and private.pallas_takes_rules() else loaded


def store(
    place: Any, value: jax.Array, *, mask: jax.Array | None = None, eviction_policy: str | None = None
) -> None:
    """Writes `value` to `place` where `mask`."""
    if isinstance(place, in_bits.Place):
        place, value = place.place, in_bits.as_bytes(value)
    write = _lowering.store if isinstance(place, _lowering.Place) else plgpu.store
    write(place, value, mask=mask, eviction_policy=eviction_policy)


def touch(place: Any, *, mask: jax.Array) -> None:
    """Prefetches elements at `place` into the L2, where `mask`."""
    if isinstance(place, _lowering.Place):
        _lowering.touch(place, mask=mask)
    elif _compiling.get() and private.pallas_takes_rules():
        dependent_launch.touched(plgpu.load(place, mask=mask, other=0, volatile=True))


def program_id(axis: int) -> jax.Array:
    """The program's place along an axis of the grid."""
    return _lowering.program_id(axis) if _lowering.is_tracing() else pl.program_id(axis)


def ds(start: Any, size: int) -> Any:
    """A slice of `size` elements from `start` on, as an index."""
    return _lowering.Slice(start, size) if _lowering.is_tracing() else pl.ds(start, size)


def when(condition: bool | jax.Array) -> Callable[[Callable[[], None]], None]:
    """Runs the function that it decorates where `condition`."""

    def run(body: Callable[[], None]) -> None:
        if not isinstance(condition, bool):
            lax.cond(condition, body, lambda: None)
        elif condition:
            body()

    return run


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Matrix product with a float32 accumulator; float32 operands keep full precision (no TF32)."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if trans_b else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32,
    )


_compiling = contextvars.ContextVar("_compiling", default=False)


def exp2(x: jax.Array) -> jax.Array:
    """A single instruction in compiled kernels: XLA's own exp2 spends three more on denormals."""
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


def exp2_below(
    factor: jax.Array | float,
    x: jax.Array,
    top: jax.Array,
    *,
    exp2: Callable[[jax.Array], jax.Array] = jnp.exp2,
) -> jax.Array:
    """exp2(factor * (x - top)), exactly 1 where x is `top`. In a compiled kernel x must not be a product (`rounded`).

    `factor` is the product's first operand: Triton's pipeliner depends on the order.
    """
    difference = x - top
    if not _compiling.get() and not _lowering.is_tracing():
        # XLA removes an added 0, and may fuse the subtraction with a product, whose rounding error would then remain.
        difference = jnp.where(x == top, 0.0, difference)
    return exp2(difference if isinstance(factor, float) and factor == 1 else factor * difference)


def below(x: jax.Array, top: jax.Array) -> jax.Array:
    """x - top, at most 0, for recomputed products x whose maximum was `top`."""
    if _compiling.get() or _lowering.is_tracing():
        return x - top  # tensor cores add products up in the same order, whichever factor comes first
    return jnp.minimum(x - top, 0.0)


def exp2_below_fused(factor: jax.Array | float, x: jax.Array, top: jax.Array) -> jax.Array:
    """As `exp2_below`, in three instructions, where XLA would emit six."""
    if not _compiling.get() or x.dtype != jnp.float32:
        return exp2_below(factor, x, top, exp2=exp2)
    return _inline(
        "{ .reg .f32 t; sub.rn.ftz.f32 t, $2, $3; mul.rn.ftz.f32 t, $1, t; ex2.approx.ftz.f32 $0, t; }",
        *(factor, x, top),
    )


def _inline(assembly: str, factor: jax.Array | float, x: jax.Array, other: jax.Array) -> jax.Array:
    """The result elementwise: $0 from one element of each array."""
    (result,) = plgpu.elementwise_inline_asm(
        assembly,
        args=[jnp.broadcast_to(jnp.asarray(factor, x.dtype), x.shape), x, jnp.broadcast_to(other, x.shape)],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def rounded(product: jax.Array) -> jax.Array:
    """Keeps a product from being fused with a later subtraction: it is fused with an added 0, at no cost."""
    return product + np.float32(0)


def limits_registers(lowering: str) -> bool:
    """Whether `kernel_call` can enforce `max_registers`. Interpreted kernels have none."""
    return lowering != "pallas" or private.pallas_takes_rules()


def _launches_dependents() -> bool:
    """Whether Pallas' kernels can say who may be launched."""
    return current_device().architecture.dependent_launch and private.pallas_takes_rules()


def _narrow(kernel: Callable[..., None], *refs: Any) -> None:
    """With 64-bit types enabled by the user, a kernel's own numbers remain 32 bits wide."""
    with jax.enable_x64(False):
        kernel(*refs)


def _marked(kernel: Callable[..., None], max_registers: int, lets_start: bool, *refs: Any) -> None:
    if max_registers:
        registers.limit(max_registers)
    if lets_start:
        dependent_launch.launch_dependents()
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
    lowering: Lowering,
    max_registers: int = 0,
    most_together: int = 0,
    merged: bool = False,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """Runs `kernel(*operand_refs, *output_refs)` over `grid`; operands may be pytrees, and every ref is a whole array,
    indexed by the kernel. `max_registers` limits a thread's registers; 0: no limit.

    `most_together`: programs planned for each multiprocessor; 0: as many as fit. If one more fits, the GPU distributes
    programs unevenly. "triton" prevents that by taking more shared memory; Pallas has no means to.

    `merged`: nobody reads the results but `merge`, which Pallas then has launched early; XLA's call for "triton"
    launches nothing early.
    """
    axes = varying_axes(operands)
    kernel = functools.partial(_narrow, kernel)
    options: dict[str, Any] = dict(
        name=name,
        grid=grid,
        out_shape=[varying_like(struct, axes) for struct in out_shape],
        input_output_aliases=dict(input_output_aliases or {}),
    )
    if lowering == "triton":
        device = current_device()
        options |= dict(capability=device.compute_capability, most_shared=device.architecture.shared_bytes)
        run = functools.partial(
            _lowering.launch,
            kernel,
            num_warps=num_warps,
            num_stages=num_stages,
            max_registers=max_registers,
            most_together=most_together,
            **options,
        )
    else:
        options["compiler_params"] = plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
        if lowering == "interpret":
            run = in_bits.call(functools.partial(pl.pallas_call, interpret=True), kernel, **options)
        else:
            body = functools.partial(_marked, kernel, max_registers, merged and _launches_dependents())
            run = pl.pallas_call(body, **options)
    return run(*vary(operands, axes))
