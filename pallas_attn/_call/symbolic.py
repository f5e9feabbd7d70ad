"""Sizes that an exported function leaves open (`jax.export.symbolic_shape`).

Plain jnp serves them. A kernel cannot: its tiles, grid and config depend on sizes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim


def is_open(*sizes: Any) -> bool:
    """Whether any of these sizes is symbolic: Python can neither loop over it nor compare it."""
    return any(map(is_symbolic_dim, sizes))


def reason(operands: Mapping[str, Any]) -> str | None:
    """Why kernels cannot serve these operands; None if all sizes are known."""
    for name, given in operands.items():
        for array, size in (
            (one, size) for one in jax.tree.leaves(given) for size in getattr(one, "shape", ())
        ):
            if is_open(size):
                shape = ", ".join(map(str, array.shape))
                return (
                    f"argument {name!r} has the symbolic dimension {size} in [{shape}], and kernels are compiled for "
                    "sizes (export with implementation='xla', or with concrete sizes)"
                )
    return None


def searchsorted(
    ordered: jax.Array, values: jax.Array, side: str = "left", method: str = "scan"
) -> jax.Array:
    """`jnp.searchsorted` of vectors, which needs to know their sizes; for symbolic ones all are compared."""
    if not is_open(*ordered.shape, *values.shape):
        return jnp.searchsorted(ordered, values, side=side, method=method)
    before = ordered <= values[:, None] if side == "right" else ordered < values[:, None]
    return jnp.sum(before, axis=1, dtype=jnp.int32)
