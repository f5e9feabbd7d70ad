"""A Llama out of weights that a file holds, one layer at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.llama_weights"):
    from flax import nnx

from .llama import Attending, Llama, LlamaConfig


def assemble(
    config: LlamaConfig,
    layer: Callable[[int], Mapping[str, np.ndarray]],
    others: Mapping[str, np.ndarray],
    *,
    dtype: DTypeLike,
    attention: Attending,
    implementation: str | None,
) -> Llama:
    """Fills an abstract `Llama`, without ever drawing random weights.

    `layer(index)` and `others` name parameters by their dotted paths in a `DecoderLayer` and in the `Llama`;
    kernels are [in, out].
    """
    stacked: dict[str, np.ndarray] = {}
    for index in range(config.num_layers):
        for name, array in layer(index).items():
            if index == 0:
                stacked[name] = np.empty((config.num_layers, *array.shape), jnp.dtype(dtype))
            stacked[name][index] = array
    weights = {**others, **{f"layers.{name}": array for name, array in stacked.items()}}

    def skeleton() -> Llama:
        rngs = nnx.Rngs(0)
        return Llama(config, dtype=dtype, attention=attention, implementation=implementation, rngs=rngs)

    graph, state = nnx.split(nnx.eval_shape(skeleton))
    nnx.replace_by_pure_dict(state, _nested(weights, dtype))
    return nnx.merge(graph, state)


def _nested(weights: Mapping[str, np.ndarray], dtype: DTypeLike) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in weights.items():
        *modules, name = path.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = jnp.asarray(array, dtype)
    return tree
