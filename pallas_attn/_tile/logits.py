"""From queries and keys to logits with every rule applied, in this order: scale, soft cap, score_mod, ALiBi, masks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import masking, softmax, triton
from pallas_attn._tile.masking import Rules
from pallas_attn._tile.tree import Tree


def products(queries: Sequence[jax.Array], keys: Sequence[jax.Array], factor) -> jax.Array:
    """factor * (query @ key), [rows, tokens], of queries and keys in chunks of head_dim; None is 1. With the arguments
    swapped the result is transposed."""
    parts = [triton.dot(query, key, trans_b=True) for query, key in zip(queries, keys, strict=True)]
    # Unscaled, each would accumulate onto the one before: a chain of dependent products in one layout.
    return functools.reduce(jnp.add, parts if factor is None else [part * factor for part in parts])


class Shaped(NamedTuple):
    """`logits` times `scale` are natural logits."""

    logits: jax.Array
    scale: jax.Array | float

    @property
    def factor(self) -> jax.Array | float:
        """Factor that makes differences of logits base 2."""
        return self.scale * softmax.LOG2_E


def shape(
    products: jax.Array,
    rules: Rules,
    scale,
    slope: jax.Array | None,
    key_at: jax.Array,
    query_at: jax.Array,
    score: Callable[[jax.Array], jax.Array] | None = None,
) -> Shaped:
    """Of products of queries and keys; positions and the heads' ALiBi `slope` broadcast, and `score` is a score_mod of
    natural logits. The result's scale depends on the rules and on `scale`, not on the products."""
    if score is not None:
        found = score(masking.cap(products * scale, rules.softcap))
        found = found if slope is None else found + masking.alibi(slope, key_at, query_at)
        return Shaped(triton.rounded(found), 1.0)  # it may end in a product
    if slope is not None:
        return Shaped(
            masking.cap(products * scale, rules.softcap) + masking.alibi(slope, key_at, query_at), 1.0
        )
    if rules.softcap is not None:
        return Shaped(jnp.tanh(products * (scale / rules.softcap)), rules.softcap)
    return Shaped(products, scale)


def natural_scale(rules: Rules, scale, slope: Any, *, has_score: bool = False):
    """That of what `shape` gives."""
    return 1.0 if slope is not None or has_score else scale if rules.softcap is None else rules.softcap


def positions(tree: Tree | None, key_at: jax.Array, query_at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The positions that distance rules (windows, ALiBi) use."""
    return (key_at, query_at) if tree is None else (tree.key_at, tree.query_at)


def visible(
    rules: Rules,
    key_at: jax.Array,
    query_at: jax.Array,
    *,
    among_themselves: bool,
    offset: jax.Array | None = None,
    tree: Tree | None = None,
) -> list[jax.Array]:
    """Masks of single tokens, to be applied one after the other.

    `among_themselves`: whether there are several query tokens, which see up to different positions. `tree`: what drafts
    see of each other, where that is not causal. `offset`: the heads' block-sparse offset, where their patterns differ
    from what the tiles hold (walk.py).
    """
    masks = []
    if tree is not None:
        masks.append(tree.seen)
    elif among_themselves:
        masks.append(masking.causal(key_at, query_at))
    if rules.sliding_window is not None and (among_themselves or tree is not None):
        masks.append(masking.in_window(*positions(tree, key_at, query_at), rules.sliding_window))
    if rules.block_sparse is not None and offset is not None:
        masks.append(rules.block_sparse.kept(key_at, query_at + 1, offset))
    return masks
