"""Mesh axes in types. Inside `jax.shard_map` a value's type says over which axes it varies, and where axes are
Explicit, how it is sharded. Types of results must agree."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def varying_axes(*trees: Any) -> tuple[str, ...]:
    """Mesh axes over which any leaf varies; () outside shard_map."""
    axes: set[str] = set()
    for leaf in jax.tree.leaves(trees):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return tuple(sorted(axes))


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same values marked as varying over `axes`, as a loop's carry must be if its results vary."""

    def one(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)


def vary_wide(tree: Any, axes: tuple[str, ...]) -> Any:
    """As `vary`, outside of what has gradients: those of what is the same everywhere are sums over the axes, and are
    added up in float32 whatever their dtype."""

    def one(leaf: jax.Array) -> jax.Array:
        shared = not jax.typeof(leaf).manual_axis_type.varying.issuperset(axes)
        if shared and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
            return vary(leaf.astype(jnp.float32), axes).astype(leaf.dtype)
        return vary(leaf, axes)

    return jax.tree.map(one, tree)


def varying_like(struct: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    """An output's shape and dtype, marked as varying over `axes`."""
    if not axes:
        return struct
    axis_type = jax.typeof(vary(jnp.zeros(()), axes)).manual_axis_type
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, manual_axis_type=axis_type)


def placed_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """Where axes are Explicit, `array` sharded as `like`, an array of the same rank."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(array, sharding) if _is_explicit(sharding) else array


def whole(array: jax.Array, dimensions: int) -> jax.Array:
    """Where axes are Explicit, `array` replicated along its first dimensions: jnp refuses operations along sharded ones
    whose result's sharding is ambiguous, such as sums and gathers."""
    sharding = jax.typeof(array).sharding
    if not _is_explicit(sharding):
        return array
    spec = PartitionSpec(*(None,) * dimensions, *sharding.spec[dimensions:])
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))


def _is_explicit(sharding: Any) -> bool:
    return not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
