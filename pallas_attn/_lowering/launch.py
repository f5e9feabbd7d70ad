"""The call of a kernel in a JAX program: a primitive that lowers to one of XLA's custom calls.

The body is traced with the call and compiled when the program is lowered. JAX lowers calls one after another, so
lowering the first one starts the compilation of all that were traced: a program's kernels compile in parallel.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import batching, mlir
from jax.interpreters.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from pallas_attn._lowering import body as kernel_body
from pallas_attn._lowering import compiler, module
from pallas_attn._lowering.body import Ref
from pallas_attn._lowering.module import Batch
from pallas_attn._lowering.private import PTX_CALL

# Triton's kernels take two more pointers, to scratch memory that ours never use.
UNUSED_POINTERS = 2
# Shared memory reserved for each program beside its own; the rest of a multiprocessor's is the most that one may have.
RESERVED_BYTES, SHARED_UNIT = 1024, 128


def given(used: int, most_shared: int, most_together: int) -> int:
    """Shared memory to allocate for a program that uses `used` bytes: enough that no more than `most_together` programs
    fit on a multiprocessor."""
    if not most_together:
        return used
    share = (most_shared + RESERVED_BYTES) // (most_together + 1)
    return max(used, share // SHARED_UNIT * SHARED_UNIT + SHARED_UNIT - RESERVED_BYTES)


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """The static part of a call. `arguments` are the kernel's: the operands, then the results."""

    name: str
    traced: ClosedJaxpr
    arguments: tuple[Ref, ...]
    num_results: int
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    max_registers: int
    most_together: int
    capability: int | None
    most_shared: int
    aliases: tuple[tuple[int, int], ...]
    batch: tuple[Batch, ...] = ()

    @property
    def programs(self) -> tuple[int, int, int]:
        return module.launched(self.grid, self.batch)

    @property
    def results(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result; the dimension mapped over last is in front."""
        lead = tuple(level.size for level in reversed(self.batch))
        return [(lead + ref.shape, ref.dtype) for ref in self.arguments[-self.num_results :]]

    @functools.cached_property
    def text(self) -> str:
        """The kernel's Triton IR."""
        return module.lower(self.traced, self.arguments, name=self.name, grid=self.grid, batch=self.batch)

    def __str__(self) -> str:
        """Tells the kernel from others of the same name, in messages."""
        arrays = ", ".join(f"{ref.dtype}{list(ref.shape)}" for ref in self.arguments)
        return f"{self.name} of {arrays}"

    @property
    def request(self) -> tuple[str, int, int, int, int]:
        """The compiler's input."""
        if self.capability is None:
            raise ValueError(f"{self.name}: the GPU's compute capability is not known")
        return self.text, self.capability, self.num_warps, self.num_stages, self.max_registers

    def compiled(self) -> compiler.Compiled:
        request = self.request
        compiler.begin(*request)
        for other in _traced.take():
            # the error is raised when its turn comes
            with contextlib.suppress(NotImplementedError, ValueError):
                compiler.begin(*other.request)
        try:
            compiled = compiler.compile_kernel(*request)
        except RuntimeError as error:
            raise RuntimeError(f"{self}: {error}") from error
        if compiled.shared_bytes > self.most_shared:
            wanted = f"{compiled.shared_bytes} bytes of shared memory"
            raise ValueError(f"{self.name}: {wanted}, a program may have {self.most_shared}")
        return compiled


class _Traced(threading.local):
    """Calls that this thread has traced and not yet lowered: most likely the rest of the program being lowered."""

    def __init__(self) -> None:
        self._launches = weakref.WeakSet[Launch]()

    def add(self, launch: Launch) -> None:
        self._launches.add(launch)

    def drop(self, launch: Launch) -> None:
        self._launches.discard(launch)

    def take(self) -> list[Launch]:
        launches, self._launches = list(self._launches), weakref.WeakSet[Launch]()
        return launches


_traced = _Traced()

launch_p = Primitive("pallas_attn_launch")
launch_p.multiple_results = True


def launch(
    body: Callable[..., None],
    *operands: Any,
    name: str,
    grid: Sequence[int],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    input_output_aliases: Mapping[int, int],
    capability: int | None,
    most_shared: int,
    max_registers: int = 0,
    most_together: int = 0,
) -> tuple[jax.Array, ...]:
    """Runs `body(*operand_refs, *output_refs)` over `grid`; operands may be pytrees, whose leaves aliases count.

    `capability` is the GPU's, 90 for sm_90; `most_shared` the most bytes of shared memory of a program; `max_registers`
    the most of a thread (0: no limit); `most_together` the most programs that share a multiprocessor (0: as many as
    fit).
    """
    flat, tree = jax.tree.flatten(operands)
    refs = tuple(Ref(i, tuple(x.shape), jnp.dtype(x.dtype)) for i, x in enumerate([*flat, *out_shape]))
    inputs = jax.tree.unflatten(tree, refs[: len(flat)])
    traced = kernel_body.trace(body, (*inputs, *refs[len(flat) :]))
    aliases = tuple(sorted(input_output_aliases.items()))
    sizes = (tuple(grid), num_warps, num_stages, max_registers, most_together)
    static = Launch(name, traced, refs, len(out_shape), *sizes, capability, most_shared, aliases)
    return tuple(launch_p.bind(*flat, static=static))


@launch_p.def_impl
def _(*operands, static: Launch):
    return jax.jit(functools.partial(launch_p.bind, static=static))(*operands)


@launch_p.def_abstract_eval
def _(*operands, static: Launch):
    """Results vary over the mesh axes that the operands vary over, the same for all."""
    _traced.add(static)
    like = operands[0]

    def result(shape, dtype):
        spec = PartitionSpec(*(None,) * len(shape))
        sharding = NamedSharding(like.sharding.mesh, spec)
        return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    return [result(*one) for one in static.results]


def _batched(operands, dims, *, static: Launch):
    """A mapped dimension becomes part of the grid. Operands that results overwrite must have it too."""
    _traced.drop(static)
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    aliased = {operand for operand, _ in static.aliases}
    if size == 0:  # a GPU refuses an empty grid
        empty = [jnp.zeros((0, *shape), dtype) for shape, dtype in static.results]
        return empty, [0] * len(empty)

    def in_front(i: int, x: jax.Array, dim: int | None) -> jax.Array:
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jnp.broadcast_to(x, (size, *x.shape)) if i in aliased else x

    has = tuple(dim is not None or i in aliased for i, dim in enumerate(dims))
    moved = [in_front(i, x, dim) for i, (x, dim) in enumerate(zip(operands, dims, strict=True))]
    level = Batch(size, has + (True,) * static.num_results)
    results = launch_p.bind(*moved, static=dataclasses.replace(static, batch=(*static.batch, level)))
    return results, [0] * len(results)


batching.primitive_batchers[launch_p] = _batched


def _lower(ctx, *operands, static: Launch):
    compiled = static.compiled()
    # The unused pointers must point somewhere; not to an aliased operand, which XLA would then copy.
    aliased = {operand for operand, _ in static.aliases}
    spare = [i for i in range(len(operands)) if i not in aliased]
    if not spare:
        raise NotImplementedError(f"{static.name}: every operand is one that a result takes the place of")
    passed = [*range(len(operands)), *[spare[-1]] * UNUSED_POINTERS]
    results = range(len(operands), len(operands) + static.num_results)
    numbers = dict(zip(("grid_x", "grid_y", "grid_z"), static.programs, strict=True))
    numbers |= {"block_x": 32 * compiled.num_warps, "block_y": 1, "block_z": 1}
    numbers |= {"shared_mem_bytes": given(compiled.shared_bytes, static.most_shared, static.most_together)}
    texts = {"name": compiled.name, "kernel_type": "ptx", "kernel_data": compiled.ptx}
    config: dict[str, ir.Attribute] = {key: mlir.i32_attr(number) for key, number in numbers.items()}
    config |= {key: ir.StringAttr.get(text) for key, text in texts.items()}
    config["output_indices"] = ir.ArrayAttr.get([mlir.i32_attr(i) for i in results])
    call = jax.ffi.ffi_lowering(PTX_CALL, backend_config=config, operand_output_aliases=dict(static.aliases))
    ctx = ctx.replace(avals_in=[ctx.avals_in[i] for i in passed])
    return call(ctx, *(operands[i] for i in passed))


def _refuse(ctx, *operands, static: Launch):
    wanted = "implementation 'triton' is for NVIDIA GPUs"
    raise NotImplementedError(f"{static.name}: {wanted}, and the program is lowered for another platform")


mlir.register_lowering(launch_p, _refuse)
mlir.register_lowering(launch_p, _lower, platform="cuda")
