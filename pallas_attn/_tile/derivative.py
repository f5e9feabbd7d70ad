"""A function with a derivative of its own, in reverse mode: what is kept, what is asked for, over which devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from pallas_attn._tile import sharding

type Arrays = dict[str, jax.Array]
type Results = tuple[jax.Array, ...]


def differentiable(
    function: Callable[[Arrays, Arrays], Results],
    gradients: Callable[[Arrays, Arrays, Results, Results, dict[str, None]], dict[str, Any]],
    floats: Arrays,
    others: Arrays,
) -> Results:
    """`function(floats, others)`, of which `floats` have gradients.

    `gradients(floats, others, results, cotangents, asked)` gives those by name, at least of the `asked`; None is 0.
    The rule stands around `partition.run`, forward and backward alike, so that each device works on its own heads and
    sequences in both, and the partitioner never has to differentiate.
    """
    axes = sharding.varying_axes(floats, others)
    # Here, so that gradients of what is the same everywhere are summed over the axes.
    floats, others = sharding.vary((floats, others), axes)

    @jax.custom_vjp
    def attended(floats: Arrays, others: Arrays) -> Results:
        return function(floats, others)

    def forwards(floats: Any, others: Any):
        # With symbolic zeros every leaf says whether its gradient is asked for.
        asked = [name for name, leaf in floats.items() if leaf.perturbed]
        floats, others = jax.tree.map(lambda leaf: leaf.value, (floats, others), is_leaf=_is_primal)
        results = attended(floats, others)
        return results, (floats, others, results, dict.fromkeys(asked))

    def backwards(saved: Any, cotangents: Any):
        floats, others, results, asked = saved
        found = gradients(floats, others, results, tuple(_array(x) for x in cotangents), asked)
        return {name: _placed(gradient, floats[name]) for name, gradient in found.items()}, None

    attended.defvjp(forwards, backwards, symbolic_zeros=True)
    return attended(floats, others)


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _array(cotangent: Any) -> jax.Array:
    shape, dtype = cotangent.shape, cotangent.dtype
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(shape, dtype) if is_zero else cotangent


def _placed(gradient: jax.Array | None, like: jax.Array) -> jax.Array | None:
    """Where axes are Explicit, a gradient's type says that it is sharded as its argument is."""
    sharding = jax.typeof(like).sharding
    if gradient is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return gradient
    return jax.sharding.reshard(gradient, sharding)
