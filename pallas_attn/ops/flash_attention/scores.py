"""From products of queries and keys to logits with every rule applied: what forward and backward share.

The order is scale, soft cap, bias, masks. A tile is [queries, keys], or [keys, queries] where gradients of keys want it
so: token numbers come with the dimension that they belong to, and everything else follows by broadcasting.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import masking, triton, weights
from pallas_attn._tile.band import Band
from pallas_attn.ops.flash_attention.problem import Rules


class Cell(NamedTuple):
    """The head whose queries meet keys."""

    batch: jax.Array
    kv_head: jax.Array
    place: jax.Array
    """In the KV head's group."""


def scores(rules: Rules, arrays: dict[str, Any], cell: Cell, products, query, key, real) -> weights.Bent:
    """`arrays` may hold "bias" and "mask", [batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len]."""
    logits, scale, slope = weights.bent(products, rules.scale, rules.softcap)
    if "bias" in arrays:
        bias = pairs(arrays["bias"], cell, query, key, real).astype(jnp.float32)
        logits, scale = logits * scale + bias, 1.0
    if "mask" in arrays:
        logits = masking.apply(logits, pairs(arrays["mask"], cell, query, key, real) != 0)
    return weights.Bent(logits, scale, slope)


def natural_scale(rules: Rules, arrays: dict[str, Any]) -> float:
    """What makes natural logits of those of `scores`."""
    return 1.0 if "bias" in arrays else rules.scale if rules.softcap is None else rules.softcap


def pairs(ref: Any, cell: Cell, query: jax.Array, key: jax.Array, real: jax.Array) -> jax.Array:
    """Elements of an array that has one for each pair of tokens, where it is not the same for several."""
    place = pairs_at(ref, cell, query, key)
    return triton.load(place, mask=real, other=0)


def pairs_at(ref: Any, cell: Cell, query: jax.Array, key: jax.Array) -> Any:
    # A single key is a place like any other: were the lanes behind it there too, what is stored would meet itself.
    lead = (0 if size == 1 else i for i, size in zip((*cell, query), ref.shape[:-1], strict=True))
    index = (*lead, key)
    shape = jnp.broadcast_shapes(query.shape, key.shape)
    return ref.at[tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape) for i in index)]


def visible(sees: Band, query, key, masked: bool, among: Sequence[jax.Array]) -> jax.Array | None:
    """Which pairs meet, None if all do. `among`: which tokens of either side there are, expanded."""
    masks = [*sees.visible(query, key), *among] if masked else []
    return functools.reduce(operator.and_, masks) if masks else None
