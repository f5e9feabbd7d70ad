"""What a kernel's body is written with beside plain JAX: arrays in memory, and the program's place in the grid.

A body is a function of `Ref`s. Traced, it becomes a jaxpr of plain JAX primitives and the three below, which only the
rules of this package evaluate.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Effect, Primitive

from pallas_attn._lowering.private import allow_in_control_flow


@jax.tree_util.register_static  # so that pytrees of refs and arrays may pass through loops and branches
@dataclasses.dataclass(frozen=True)
class Ref:
    """An array in device memory: the kernel's argument number `position`."""

    position: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def at(self) -> "_At":
        return _At(self)


@dataclasses.dataclass(frozen=True)
class _At:
    ref: Ref

    def __getitem__(self, index: Any) -> "Place":
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ref.ndim:
            raise IndexError(
                f"an array of {self.ref.ndim} dimensions takes as many indices, got {len(index)}"
            )
        return Place(self.ref, tuple(_arrays(index)))


@dataclasses.dataclass(frozen=True)
class Place:
    """Elements of an array: one integer array a dimension, which broadcast against each other."""

    ref: Ref
    index: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """`size` elements from `start` on; `start` may be traced."""

    start: Any
    size: int


def _arrays(index: tuple[Any, ...]) -> Iterator[jax.Array]:
    """Slices as arrays, each with a dimension of its own, in order; to be combined with scalars only."""
    sliced = [hasattr(i, "size") and hasattr(i, "start") for i in index]
    if any(sliced) and any(jnp.ndim(i) for i, is_slice in zip(index, sliced, strict=True) if not is_slice):
        raise IndexError("an index has slices or arrays, not both")
    dimension = 0
    for i, is_slice in zip(index, sliced, strict=True):
        if not is_slice:
            yield jnp.asarray(i)
            continue
        shape = [1] * sum(sliced)
        shape[dimension] = i.size
        dimension += 1
        yield i.start + jax.lax.broadcasted_iota(jnp.int32, shape, dimension - 1)


class _WritesMemory(Effect):
    """Keeps JAX from dropping what has no result."""


_writes = _WritesMemory()
allow_in_control_flow(_WritesMemory)

program_id_p = Primitive("pallas_attn_program_id")
load_p = Primitive("pallas_attn_load")
store_p = Primitive("pallas_attn_store")
store_p.multiple_results = True
touch_p = Primitive("pallas_attn_touch")
touch_p.multiple_results = True


def program_id(axis: int) -> jax.Array:
    return program_id_p.bind(axis=axis)


def load(
    place: Place,
    *,
    mask: jax.Array | None = None,
    other: Any = None,
    eviction_policy: str | None = None,
    each: bool = False,
) -> jax.Array:
    """Elements at `place`; where not `mask`, `other` (undefined without it), and memory is not accessed. `each`: as
    each.py says, of all of them."""
    assert not each or mask is other is eviction_policy is None
    shape = jnp.broadcast_shapes(*(i.shape for i in place.index))
    optional = [None if mask is None else jnp.broadcast_to(mask, shape)]
    optional.append(None if other is None else jnp.asarray(other, place.ref.dtype))
    if mask is None and other is not None:
        raise ValueError("'other' takes a 'mask'")
    return load_p.bind(
        *place.index,
        *(x for x in optional if x is not None),
        ref=place.ref,
        shape=shape,
        masked=mask is not None,
        filled=other is not None,
        eviction_policy=eviction_policy,
        each=each,
    )


def store(
    place: Place, value: jax.Array, *, mask: jax.Array | None = None, eviction_policy: str | None = None
) -> None:
    """Writes `value`, of the array's dtype, to `place` where `mask`."""
    shape = jnp.broadcast_shapes(*(i.shape for i in place.index))
    if value.dtype != place.ref.dtype:
        raise TypeError(f"an array of {place.ref.dtype} takes no {value.dtype}")
    masks = () if mask is None else (jnp.broadcast_to(mask, shape),)
    value = jnp.broadcast_to(value, shape)
    store_p.bind(
        *place.index, value, *masks, ref=place.ref, masked=mask is not None, eviction_policy=eviction_policy
    )


def touch(place: Place, *, mask: jax.Array) -> None:
    """Prefetches elements at `place`, where `mask`."""
    shape = jnp.broadcast_shapes(*(i.shape for i in place.index))
    touch_p.bind(*place.index, jnp.broadcast_to(mask, shape), ref=place.ref, shape=shape)


@program_id_p.def_abstract_eval
def _(*, axis):
    return ShapedArray((), jnp.dtype("int32"))


@load_p.def_abstract_eval
def _(*_, ref, shape, masked, filled, eviction_policy, each):
    return ShapedArray(shape, jnp.dtype(ref.dtype))


@store_p.def_effectful_abstract_eval
def _(*_, ref, masked, eviction_policy):
    return [], {_writes}


@touch_p.def_effectful_abstract_eval
def _(*_, ref, shape):
    return [], {_writes}


_tracing = contextvars.ContextVar("tracing", default=False)


def is_tracing() -> bool:
    """Whether this thread is tracing a kernel's body for this package's lowering."""
    return _tracing.get()


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def trace(body: Callable[..., None], arguments: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of `body(*arguments)`, pytrees of `Ref`s; it has neither inputs nor outputs."""

    def run() -> None:
        body(*arguments)

    with _traced():
        return jax.make_jaxpr(run)()
