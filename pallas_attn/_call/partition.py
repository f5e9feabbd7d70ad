"""A call whose operands are spread over several devices: which part of it each device does.

XLA cannot look into a kernel. Given sharded operands it would gather them, the pools too, and run the whole call on
every device. So a call says what each dimension of its operands is, and from that follows how it is cut:

- `seqs`, `heads`, `kv_heads` may be sharded: a device serves its sequences and its heads. Query heads go with their KV
  heads; with a single KV head they may be sharded while the pool is whole on every device.
- Pools stay where they are. What is small (queries, tables, lengths, scales, new tokens) is brought to them.
- A pool sharded along any other dimension is refused in words. Page ids count over the whole pool, so a device that
  holds some of the pages could not serve a table that names others.

Axes of a mesh are of three types, and a call meets each in its own way:

- Manual, inside `jax.shard_map`: the operands are the device's share already. Nothing is done.
- Explicit: the types of the operands say how they are sharded, so the call goes into a shard_map of its own.
- Auto: only XLA's partitioner knows, and it asks through `custom_partitioning`.

With a single device nothing is done, and what is lowered is the same text as without this file.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_attn._call.checks import fail

SPLITTABLE = ("seqs", "heads", "kv_heads", "batch")
POOL = "pages"  # what has such a dimension is a pool

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """`fn(operands by name, **static)` returns a tuple of arrays; `dims` and `results` name the dimensions of each.

    dims: (operand, its dimensions in words separated by blanks) for every operand that the call has.
    results: the same for the results.
    static: keyword arguments of `fn`, hashable.
    share: what serves a device's share if that is not `fn`.
    function: the public function, for messages.
    """

    function: str
    fn: Callable[..., tuple[jax.Array, ...]]
    dims: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    static: tuple[tuple[str, Any], ...] = ()
    share: Callable[..., tuple[jax.Array, ...]] | None = None

    def whole(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._run(self.fn, operands)

    def part(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._run(self.share or self.fn, operands)

    def _run(self, fn: Callable[..., tuple[jax.Array, ...]], operands: tuple) -> tuple[jax.Array, ...]:
        names = [name for name, _ in self.dims]
        return tuple(fn(dict(zip(names, operands, strict=True)), **dict(self.static)))


@dataclasses.dataclass(frozen=True)
class _Batched:
    """`fn` under vmap: the operands named in `batched` have a leading dimension more."""

    fn: Callable[..., tuple[jax.Array, ...]]
    batched: frozenset[str]

    def __call__(self, operands: dict[str, jax.Array], **static: Any) -> tuple[jax.Array, ...]:
        axes = {name: 0 if name in self.batched else None for name in operands}
        return jax.vmap(functools.partial(self.fn, **static), in_axes=(axes,))(operands)


def run(
    function: str,
    fn: Callable[..., tuple[jax.Array, ...]],
    operands: Mapping[str, jax.Array],
    dims: Mapping[str, str],
    results: tuple[str, ...],
    *,
    static: Mapping[str, Any],
    share: Callable[..., tuple[jax.Array, ...]] | None = None,
    opaque: bool,
    check_vma: bool,
) -> tuple[jax.Array, ...]:
    """`fn(operands, **static)`, on each device the part of it that its operands' shardings give it.

    Args:
        dims: what the dimensions of each operand are; may name operands that this call does not have.
        share: takes the place of `fn` for a device's share of a call.
        opaque: whether XLA cannot partition `fn` by itself, as it can plain jnp.
        check_vma: whether shard_map may check over which axes the values inside vary.

    Raises:
        ValueError: a pool sharded in a way that cannot be served. Under Auto axes it is only known, and raised, when
            XLA partitions the compiled function.
    """
    call = Call(
        function,
        fn,
        tuple((name, dims[name]) for name in operands),
        results,
        tuple(sorted(static.items())),
        share,
    )
    arrays = tuple(operands.values())
    mesh = _mesh_of(arrays)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return _explicit(arrays, call=call, mesh=mesh, check_vma=check_vma)
    if opaque and _may_be_sharded(mesh):
        return _auto(arrays, call=call)
    return call.whole(*arrays)


def _mesh_of(operands: tuple[jax.Array, ...]) -> Any:
    """The mesh of the operands' types, or that of the context, or None; the axes' types may be anything."""
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    meshes = [mesh for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), next(iter(meshes), None))


def _may_be_sharded(mesh: Any) -> bool:
    if mesh is None:
        return jax.device_count() > 1
    return mesh.size > 1 and not mesh.are_all_axes_manual


def plan(call: Call, shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, tuple], sizes: Mapping) -> dict:
    """{kind of dimension: mesh axes it is split over}, from the shardings that the operands come with.

    Args:
        shapes, specs: of each operand; a spec holds an axis, a tuple of axes or None for each dimension.
        sizes: of the mesh's axes.

    Raises:
        ValueError: a pool is sharded in a way that cannot be served.
    """
    split: dict[str, Axes] = {}
    first: dict[str, str] = {}  # the operand that decided

    def pieces(axes: Axes) -> int:
        return functools.reduce(lambda n, axis: n * sizes[axis], axes, 1)

    def dimensions(name: str, dims: str):
        return zip(dims.split(), shapes[name], (_axes(entry) for entry in specs[name]), strict=True)

    pools = [(name, dims) for name, dims in call.dims if POOL in dims.split()]
    for name, dims in pools:
        for kind, size, axes in dimensions(name, dims):
            if not axes:
                if split.get(kind):
                    fail(call.function, name, f"{kind} sharded as in {first[kind]}", "not sharded")
                split.setdefault(kind, ())
            elif kind == POOL:
                fail(call.function, name, "every device to hold all pages, for page ids count over the whole pool",
                     f"pages sharded over {_spell(axes)} (in jax.shard_map each device may have a pool and tables of "
                     "its own)")  # fmt: skip
            elif not _splittable(kind) or size % pieces(axes):
                fail(call.function, name, f"{kind} not sharded" if not _splittable(kind) else
                     f"{kind} ({size}) divisible by its shards", f"sharded over {_spell(axes)}")  # fmt: skip
            elif split.setdefault(kind, axes) != axes:
                fail(call.function, name, f"{kind} sharded as in {first[kind]}, over {_spell(split[kind])}",
                     _spell(axes))  # fmt: skip
            first.setdefault(kind, name)
    if split.get("kv_heads"):
        split["heads"] = split["kv_heads"]

    small = [(name, dims) for name, dims in call.dims if POOL not in dims.split()]
    for name, dims in small:
        for kind, size, axes in dimensions(name, dims):
            taken = {axis for kind_axes in split.values() for axis in kind_axes}
            if _splittable(kind) and kind not in split and axes:
                if not taken & set(axes) and size % pieces(axes) == 0:
                    split[kind] = axes
    if split.get("heads") and not split.get("kv_heads"):
        for name, dims in pools:
            for kind, size, _ in dimensions(name, dims):
                if kind == "kv_heads" and size > 1:
                    fail(call.function, name, f"its {size} KV heads sharded over {_spell(split['heads'])}, as the query's "
                         "heads are", "not sharded")  # fmt: skip
    return split


def _splittable(kind: str) -> bool:
    return kind.startswith(SPLITTABLE)


def _axes(entry: Any) -> Axes:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _spell(axes: Axes) -> str:
    return " and ".join(map(repr, axes))


def _spec(dims: str, split: Mapping[str, Axes]) -> PartitionSpec:
    return PartitionSpec(*(split.get(kind) or None for kind in dims.split()))


def _padded(spec: Any, rank: int) -> tuple:
    return (*spec, *(None,) * (rank - len(spec)))


@functools.partial(jax.jit, static_argnames=("call", "mesh", "check_vma"))
def _explicit(operands: tuple[jax.Array, ...], *, call: Call, mesh: Any, check_vma: bool):
    names = [name for name, _ in call.dims]
    types = [jax.typeof(operand) for operand in operands]
    split = plan(
        call,
        {name: t.shape for name, t in zip(names, types, strict=True)},
        {name: _padded(t.sharding.spec, t.ndim) for name, t in zip(names, types, strict=True)},
        mesh.shape,
    )
    specs = tuple(_spec(dims, split) for _, dims in call.dims)
    placed = (
        jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, spec in zip(operands, specs, strict=True)
    )
    mapped = jax.shard_map(
        call.part if any(split.values()) else call.whole,
        mesh=mesh,
        in_specs=specs,
        out_specs=tuple(_spec(dims, split) for dims in call.results),
        check_vma=check_vma,
    )
    return mapped(*placed)


@functools.partial(jax.jit, static_argnames="call")
def _auto(operands: tuple[jax.Array, ...], *, call: Call):
    @custom_vmap
    def partitioned(*operands):
        asked = custom_partitioning(call.whole)
        asked.def_partition(functools.partial(_partition, call), sharding_rule=_sharding_rule(call, operands))
        return asked(*operands)

    @partitioned.def_vmap
    def _(_, in_batched, *operands):
        batched = {name for (name, _), b in zip(call.dims, in_batched, strict=True) if b}
        level = sum(word.startswith("batch") for word in call.results[0].split())
        lead = f"batch{level} "
        outer = dataclasses.replace(
            call,
            fn=_Batched(call.fn, frozenset(batched)),
            share=call.share and _Batched(call.share, frozenset(batched)),
            dims=tuple((name, lead * (name in batched) + dims) for name, dims in call.dims),
            results=tuple(lead + dims for dims in call.results),
        )
        return _auto(operands, call=outer), (True,) * len(call.results)

    differentiable = jax.custom_jvp(partitioned)

    @differentiable.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{call.function}: the kernel has no gradients; implementation 'xla' has")

    return differentiable(*operands)


def _sharding_rule(call: Call, operands: tuple[jax.Array, ...]) -> str:
    """Between which dimensions XLA may carry shardings on, in its einsum-like notation: those that are split together.
    All others have a name of their own, so that a sharding stays where it is, and is seen by `plan`."""
    sizes = {
        kind: size
        for (_, dims), operand in zip(call.dims, operands, strict=True)
        for kind, size in zip(dims.split(), operand.shape, strict=True)
    }

    def factors(place: int, dims: str) -> str:
        words = []
        for i, kind in enumerate(dims.split()):
            together = "heads" if kind == "kv_heads" and sizes[kind] > 1 else kind
            words.append(together if _splittable(kind) and together != "kv_heads" else f"x{place}_{i}")
        return " ".join(words)

    words = [dims for _, dims in call.dims] + list(call.results)
    named = [factors(place, dims) for place, dims in enumerate(words)]
    return ", ".join(named[: len(call.dims)]) + " -> " + ", ".join(named[len(call.dims) :])


def _partition(call: Call, mesh: Any, operands: tuple, results: Any):
    """What XLA asks: how the operands should be sharded, and what each device does with its share."""
    del results
    names = [name for name, _ in call.dims]
    split = plan(
        call,
        {name: operand.shape for name, operand in zip(names, operands, strict=True)},
        {name: _padded(operand.sharding.spec, len(operand.shape)) for name, operand in zip(names, operands, strict=True)},
        mesh.shape,
    )
    placed = tuple(NamedSharding(mesh, _spec(dims, split)) for _, dims in call.dims)
    made = tuple(NamedSharding(mesh, _spec(dims, split)) for dims in call.results)
    return mesh, call.part if any(split.values()) else call.whole, made, placed
