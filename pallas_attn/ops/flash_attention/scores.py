"""From products of queries and keys to logits with every rule applied: what forward and backward share.

The order is scale, soft cap, score_mod, bias, masks. A tile is [queries, keys], or [keys, queries] for gradients of
keys: token numbers are expanded along their own dimension, and everything else broadcasts.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import masking, triton, weights
from pallas_attn._tile.band import Band
from pallas_attn.mods.operands import NOTHING, Tile
from pallas_attn.ops.flash_attention.operands import Operands


class Cell(NamedTuple):
    """The query head that a tile belongs to."""

    batch: jax.Array
    kv_head: jax.Array
    place: jax.Array
    """Place in the KV head's group."""


def scores(refs: Operands, cell: Cell, products, query, key, real, mods: Tile = NOTHING) -> weights.Bent:
    """Logits of a tile. `mods` evaluates the score_mod or its derivative, which gives the slope."""
    logits, scale, slope = weights.bent(products, refs.rules.scale, refs.rules.softcap)
    if mods.score is not None:
        logits, *own = of_mods(refs, products, mods)
        scale = 1.0
        for one in own[:1]:
            slope = one if slope is None else slope * one
    if refs.bias is not None:
        bias = pairs(refs.bias, cell, query, key, real).astype(jnp.float32)
        logits, scale = logits * scale + bias, 1.0
    if refs.mask is not None:
        logits = masking.apply(logits, pairs(refs.mask, cell, query, key, real) != 0)
    return weights.Bent(logits, scale, slope)


def of_mods(refs: Operands, products: jax.Array, mods: Tile) -> list[jax.Array]:
    """Results of the score_mod, or of its derivative, over a tile."""
    logits, scale, _ = weights.bent(products, refs.rules.scale, refs.rules.softcap)
    return mods.scored(logits * scale)


def natural_scale(operands: Operands) -> float:
    """Factor that makes the logits of `scores` natural."""
    if operands.bias is not None or (operands.mods is not None and operands.mods.score is not None):
        return 1.0
    return operands.rules.scale if operands.rules.softcap is None else operands.rules.softcap


def pairs(ref: Any, cell: Cell, query: jax.Array, key: jax.Array, real: jax.Array) -> jax.Array:
    """Elements of an array with one for each pair of tokens, some dimensions of which may be 1."""
    place = pairs_at(ref, cell, query, key)
    return triton.load(place, mask=real, other=0)


def pairs_at(ref: Any, cell: Cell, query: jax.Array, key: jax.Array) -> Any:
    # The key's index stays even where there is a single key: with 0 in its place, lanes beyond it would store to that
    # key, too.
    lead = (0 if size == 1 else i for i, size in zip((*cell, query), ref.shape[:-1], strict=True))
    index = (*lead, key)
    shape = jnp.broadcast_shapes(query.shape, key.shape)
    return ref.at[tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape) for i in index)]


def visible(
    sees: Band, query, key, masked: bool, among: Sequence[jax.Array], mods: Tile = NOTHING
) -> jax.Array | None:
    """Which pairs are visible, None if all are. `among`: which tokens of either side exist, expanded."""
    masks = [*sees.visible(query, key), *among] if masked else []
    if masked and (of_mod := mods.seen()) is not None:
        masks.append(of_mod)
    return functools.reduce(operator.and_, masks) if masks else None
