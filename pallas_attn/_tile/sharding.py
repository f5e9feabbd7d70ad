"""Inside `jax.shard_map` every value has a type that says over which mesh axes it varies; results must say so too."""

from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(*trees: Any) -> tuple[str, ...]:
    """Mesh axes over which any leaf varies; () outside shard_map."""
    axes: set[str] = set()
    for leaf in jax.tree.leaves(trees):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return tuple(sorted(axes))


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same values, varying over `axes`: what a loop's carry must be to meet results that do."""

    def one(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)


def varying_like(struct: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
    """An output's shape and dtype, marked as varying over `axes`."""
    if not axes:
        return struct
    axis_type = jax.typeof(vary(jnp.zeros(()), axes)).manual_axis_type
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, manual_axis_type=axis_type)
