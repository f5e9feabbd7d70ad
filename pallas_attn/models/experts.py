"""Mixtures of experts: grouped matrix products over tokens sorted by expert."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_attn.nn.layers import PRECISION

type Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate, up) to what goes down."""


def through_experts(
    tokens: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gated: Gate,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """The weighted sum, for each token, of what its experts make of it.

    Args:
        tokens: [num_tokens, hidden].
        chosen, weights: [num_tokens, experts_per_token] expert ids and factors.
        gate_up: [experts, hidden, 2 * width], gate first; down: [experts, width, hidden]; gated: between the two.
        gate_up_bias, down_bias: [experts, 2 * width], [experts, hidden], or None.

    Returns:
        [num_tokens, hidden] in the tokens' dtype.
    """
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts)
    sizes = jnp.bincount(experts, length=gate_up.shape[0]).astype(jnp.int32)
    source, expert = order // chosen.shape[1], experts[order]
    both = jax.lax.ragged_dot(tokens[source], gate_up, sizes, precision=PRECISION)
    if gate_up_bias is not None:
        both += gate_up_bias[expert]
    out = jax.lax.ragged_dot(gated(*jnp.split(both, 2, axis=-1)), down, sizes, precision=PRECISION)
    if down_bias is not None:
        out += down_bias[expert]
    out = out * weights.reshape(-1)[order][:, None].astype(out.dtype)
    # Back in the order of each token's own experts, so that the sum does not depend on the batch.
    by_token = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return by_token.reshape(*chosen.shape, -1).sum(axis=1)
