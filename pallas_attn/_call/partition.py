"""A call whose operands are sharded over several devices: which part of it each device does.

XLA cannot look into a kernel. Given sharded operands it would gather them, the pools too, and run the whole call on
every device. So a call names each dimension of its operands, and that decides how it is partitioned:

- Sequences and heads may be sharded: a device serves its own. Query heads stay with their KV heads; a pool with a
  single KV head may be replicated while the query's heads are sharded.
- Pools are never moved; the small operands (queries, tables, lengths, scales, new tokens) are moved to them.
- A pool sharded along any other dimension is an error. Page ids count over the whole pool, so a device with only some
  of the pages could not serve a table that names others.

A mesh's axes are of three types, each handled in its own way:

- Manual, inside `jax.shard_map`: the operands already are the device's part, and nothing is done.
- Explicit: the operands' types say how they are sharded, so the call gets a shard_map of its own.
- Auto: only XLA's partitioner knows, and it asks through `custom_partitioning`. Plain jnp it partitions by itself.

With a single device nothing is done, and what is lowered is the same text as without this file.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_attn._call import gradients
from pallas_attn._call.checks import fail
from pallas_attn._call.operands import dims_of

SEQS, HEADS, KV_HEADS, BATCH = "seqs", "heads", "kv_heads", "batch"
# An operand with such a dimension is a pool: the dimension may not be sharded, for the reason given.
WHOLE = {
    "pages": "all pages on every device, for ids count over the whole pool (in jax.shard_map each may have a pool and "
    "tables of its own)",
    "key_tokens": "all tokens on every device, for lengths count over all sequences (in jax.shard_map each may have "
    "sequences of its own)",
}

Axes = tuple[str, ...]
Function = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Call:
    """`fn(operands, **static)` returns a tuple of arrays.

    function: the public function, for messages.
    dims: (name, its dimensions in words) of each array among the operands. "seqs", "heads", "kv_heads" and "batch..."
        may be sharded; the other words are free, except that a pool has one of WHOLE.
    results: the results' dimensions in words.
    static: keyword arguments of `fn`, hashable.
    structure: the operands' pytree structure.
    share: the function for one device's part of the call, if it differs from `fn`.
    mapped: for each `vmap` around the call, innermost first, the arrays that it maps over.
    summed: kinds of dimensions that `fn` sums over. It then also gets `axes`, the mesh axes that these are sharded
        over, and sums over them, too.
    """

    function: str
    fn: Function
    dims: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    structure: Any
    share: Function | None = None
    mapped: tuple[frozenset[int], ...] = ()
    summed: tuple[str, ...] | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.dims]

    def runner(self, split: Mapping[str, Axes]) -> Function:
        """What each device runs on its operands."""
        fn = self.share if self.share and any(split.values()) else self.fn
        static = dict(self.static)
        if self.summed is not None:
            static["axes"] = tuple(axis for kind in self.summed for axis in split.get(kind, ()))

        def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(fn(jax.tree.unflatten(self.structure, arrays), **static))

        for mapped in self.mapped:
            run = jax.vmap(run, in_axes=tuple(0 if i in mapped else None for i in range(len(self.dims))))
        return run

    def specs(self, split: Mapping[str, Axes]) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """Of the operands and of the results."""

        def spec(dims: str) -> PartitionSpec:
            return PartitionSpec(*(split.get(kind) or None for kind in dims.split()))

        return tuple(spec(dims) for _, dims in self.dims), tuple(map(spec, self.results))


def run(
    function: str,
    fn: Function,
    operands: Any,
    results: tuple[str, ...],
    *,
    static: Mapping[str, Any] = MappingProxyType({}),
    share: Function | None = None,
    summed: tuple[str, ...] | None = None,
    implementation: str,
) -> tuple[jax.Array, ...]:
    """`fn(operands, **static)`; where the operands are sharded, each device computes its part.

    Args:
        function, fn, results, static, share, summed: see `Call`.
        operands: an instance of an `operands` class, which names the dimensions.
        implementation: "xla" is plain jnp, which XLA partitions itself; inside "interpret" JAX cannot track over which
            axes values vary.

    Raises:
        ValueError: a pool is sharded in a way that cannot be served. Under Auto axes this is found only when XLA
            partitions the program, and JAX raises a JaxRuntimeError that ends in this message.
    """
    arrays, call = _call(function, fn, operands, results, static)
    call = dataclasses.replace(call, share=share, summed=summed)
    mesh = _mesh_of(arrays)
    auto = () if mesh is None else tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    opaque, checkable = implementation != "xla", implementation != "interpret"
    if not checkable and any(jax.typeof(array).manual_axis_type.varying for array in arrays):
        fail(
            function,
            "implementation",
            "another than 'interpret' in a shard_map with check_vma=True",
            "'interpret'",
        )
    if opaque and mesh is not None and auto and not mesh.are_all_axes_auto:
        got = f"Auto {_spell(auto)} beside Manual or Explicit axes (in shard_map, name it in axis_names too)"
        fail(
            function, call.names[0], "a mesh without axes over which XLA would gather the pools unasked", got
        )
    serve = call.runner({})
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        serve = functools.partial(_explicit, call=call, mesh=mesh, check_vma=checkable)
    elif opaque and (auto or (mesh is None and jax.device_count() > 1)):
        serve = functools.partial(_auto, call=call)
    if opaque:
        return gradients.refuse(function, serve)(*arrays)
    with gradients.in_reverse_mode(function, "first ones, by implementation 'xla'"):
        return serve(*arrays)


def divide(
    function: str,
    fn: Function,
    operands: Any,
    results: tuple[str, ...],
    *,
    static: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[jax.Array, ...]:
    """`fn(operands, **static)`, plain jnp around calls of ops; arguments as in `run`.

    Under Explicit axes each device computes its part, since jnp refuses operations whose sharding it cannot infer.
    Elsewhere nothing is done: XLA partitions the jnp, and the calls inside partition themselves.
    """
    arrays, call = _call(function, fn, operands, results, static)
    mesh = _mesh_of(arrays)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return _explicit(*arrays, call=call, mesh=mesh, check_vma=False)
    return call.runner({})(*arrays)


def _call(
    function: str, fn: Function, operands: Any, results: tuple[str, ...], static: Mapping[str, Any]
) -> tuple[tuple[jax.Array, ...], Call]:
    """The arrays, and the call of them."""
    arrays, structure = jax.tree.flatten(operands)
    options = tuple(sorted(static.items()))
    return tuple(arrays), Call(function, fn, dims_of(operands), results, options, structure)


def _mesh_of(operands: tuple[jax.Array, ...]) -> Any:
    """The mesh in the operands' types (preferably with Explicit axes), otherwise the context's, or None."""
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    meshes = [mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    return next(iter(explicit or meshes), None)


def plan(call: Call, operands: tuple, sizes: Mapping[str, int]) -> dict[str, Axes]:
    """{kind of dimension: the mesh axes it is sharded over}, from the operands' shardings.

    Args:
        operands: in the call's order, each with a shape and a sharding (None: replicated).
        sizes: of the mesh's axes.

    Raises:
        ValueError: a pool is sharded in a way that cannot be served.
    """
    split: dict[str, Axes] = {}

    def dimensions(of_pools: bool) -> Iterator[tuple[str, str, int, Axes]]:
        for (name, dims), operand in zip(call.dims, operands, strict=True):
            if (not WHOLE.keys().isdisjoint(dims.split())) == of_pools:
                for kind, size, axes in zip(dims.split(), operand.shape, _axes(operand), strict=True):
                    yield name, kind, size, axes

    def even(size: int, axes: Axes) -> bool:
        return size % math.prod(sizes[axis] for axis in axes) == 0

    for name, kind, size, axes in dimensions(of_pools=True):
        got = f"sharded over {_spell(axes)}" if axes else "not sharded"
        if axes and kind in WHOLE:
            fail(call.function, name, WHOLE[kind], f"{kind} {got}")
        if axes and not (_splittable(kind) and even(size, axes)):
            fail(call.function, name, f"{kind} ({size}) whole, or heads in equal shares", f"{kind} {got}")
        if split.setdefault(kind, axes) != axes:
            expected = f"over {_spell(split[kind])}" if split[kind] else "not sharded"
            fail(call.function, name, f"{kind} as the other pool's, {expected}", f"{kind} {got}")
    if split.get(KV_HEADS):
        split[HEADS] = split[KV_HEADS]

    for _, kind, size, axes in dimensions(of_pools=False):
        taken = {axis for one in split.values() for axis in one}
        if axes and _splittable(kind) and even(size, axes) and not taken.intersection(axes):
            split.setdefault(kind, axes)

    for name, kind, size, axes in dimensions(of_pools=True):
        if kind == KV_HEADS and size > 1 and split.get(HEADS) and not axes:
            expected = f"its {size} KV heads sharded over {_spell(split[HEADS])}, as the query's heads"
            fail(call.function, name, expected, "KV heads not sharded")
    return split


def _axes(operand: Any) -> tuple[Axes, ...]:
    """The mesh axes of each of an operand's dimensions."""
    spec = () if operand.sharding is None else operand.sharding.spec
    entries = (*spec, *(None,) * (len(operand.shape) - len(spec)))
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)


def _splittable(kind: str) -> bool:
    return kind in (SEQS, HEADS, KV_HEADS) or kind.startswith(BATCH)


def _spell(axes: Axes) -> str:
    return " and ".join(map(repr, axes))


@functools.partial(jax.jit, static_argnames=("call", "mesh", "check_vma"))
def _explicit(*operands: jax.Array, call: Call, mesh: Any, check_vma: bool):
    split = plan(call, tuple(map(jax.typeof, operands)), mesh.shape)
    in_specs, out_specs = call.specs(split)
    placed = [
        jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(operands, in_specs, strict=True)
    ]
    axes = frozenset(mesh.explicit_axes)
    mapped = jax.shard_map(
        call.runner(split),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
        check_vma=check_vma,
    )
    return mapped(*placed)


@functools.partial(jax.jit, static_argnames="call")
def _auto(*operands: jax.Array, call: Call):
    """The rule for vmap, which custom_partitioning lacks."""

    @custom_vmap
    def partitioned(*operands):
        asks = custom_partitioning(call.runner({}))
        asks.def_partition(functools.partial(_answer, call), sharding_rule=_sharding_rule(call, operands))
        return asks(*operands)

    @partitioned.def_vmap
    def _(_, in_batched, *operands):
        mapped = frozenset(i for i, is_mapped in enumerate(in_batched) if is_mapped)
        return _auto(*operands, call=_vmapped(call, mapped)), (True,) * len(call.results)

    return partitioned(*operands)


def _vmapped(call: Call, mapped: frozenset[int]) -> Call:
    lead = f"{BATCH}{len(call.mapped)} "
    return dataclasses.replace(
        call,
        mapped=(*call.mapped, mapped),
        dims=tuple((name, (lead if i in mapped else "") + dims) for i, (name, dims) in enumerate(call.dims)),
        results=tuple(lead + dims for dims in call.results),
    )


def _sharding_rule(call: Call, operands: tuple[jax.Array, ...]) -> str:
    """Along which dimensions XLA may carry a sharding from one array to another, in its einsum-like notation.

    These are the dimensions that are sharded together. Every other one has a name of its own, so that its sharding, if
    it has one, still reaches `plan`.
    """
    several = {
        kind
        for (_, dims), operand in zip(call.dims, operands, strict=True)
        for kind, size in zip(dims.split(), operand.shape, strict=True)
        if size > 1
    }

    def factor(kind: str, place: str) -> str:
        if kind == KV_HEADS and kind in several:
            return HEADS
        return kind if _splittable(kind) and kind != KV_HEADS else place

    def factors(dims: str, array: int) -> str:
        return " ".join(factor(kind, f"own{array}_{i}") for i, kind in enumerate(dims.split()))

    inputs = [factors(dims, i) for i, (_, dims) in enumerate(call.dims)]
    outputs = [factors(dims, i + len(inputs)) for i, dims in enumerate(call.results)]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def _answer(call: Call, mesh: Any, operands: tuple, results: Any):
    """The answer to XLA's partitioner: how operands and results should be sharded, and what each device runs."""
    if mesh.empty:  # no sharding of the compiled function has a mesh
        for name, operand in zip(call.names, operands, strict=True):
            if not operand.sharding.is_fully_replicated:
                fail(call.function, name, "a jax.sharding.NamedSharding", repr(operand.sharding))
        everywhere = operands[0].sharding
        return mesh, call.runner({}), (everywhere,) * len(results), (everywhere,) * len(operands)
    split = plan(call, operands, mesh.shape)
    placed, made = (tuple(NamedSharding(mesh, spec) for spec in specs) for specs in call.specs(split))
    return mesh, call.runner(split), made, placed
