"""Which sequence each of a call's new tokens belongs to, in the two forms that modules take.

Batched: positions [num_seqs, n], with negative ones for padding wherever it lies. Ragged: all tokens end to end,
positions [total_tokens] and cu_q_lens, padding behind. Both become the ragged form, which the ops read. A prompt, a
chunk of one and a token of an answer are the same thing: consecutive positions, the last of which gives the sequence's
length.

Positions that are not consecutive are refused where they are known and give NaN where they are traced; bounds that
descend are refused, or make all tokens padding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, is_traced
from pallas_attn._call.sharding import placed_like, whole
from pallas_attn._tile.masking import ascending

CONSECUTIVE = "consecutive ones in each sequence, and negative ones for padding"
NEWEST = (
    "consecutive ones, ending with the row's newest in the last column; negative before the sequence's start"
)


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The ragged form. Modules make it from positions, or take it ready-made, once for all layers.

    positions: [total_tokens] int32; -1 for padding.
    rows: [total_tokens] int32, each token's sequence; any sequence's for padding.
    cu_q_lens: [num_seqs + 1] int32, as `ragged_paged_attention` has it.
    seq_lens: [num_seqs] int32, tokens of each sequence, these included; 0 for a sequence without new tokens.
    served: [total_tokens] bool: the positions of the token's sequence are consecutive.
    order: [total_tokens], each token's index in the flattened batched form; None if the call was ragged.
    places: [total_tokens], the inverse of `order`.
    came: the positions as given.
    """

    positions: jax.Array
    rows: jax.Array
    cu_q_lens: jax.Array
    seq_lens: jax.Array
    served: jax.Array
    order: jax.Array | None
    places: jax.Array | None
    came: jax.Array
    fresh: jax.Array
    """Whether all are batched prompts from position 0, padded on the right."""

    @classmethod
    def of(cls, check: ArgumentChecker, positions: Any, cu_q_lens: Any = None) -> "NewTokens":
        """From positions [num_seqs, n], or [total_tokens] with cu_q_lens [num_seqs + 1]; both checked for shape."""
        known = not is_traced(positions) and not is_traced(cu_q_lens)
        xp: Any = np if known else jnp
        came = positions = xp.asarray(positions)
        order = places = None
        fresh = False
        if not known:
            positions = whole(positions, positions.ndim)
        if cu_q_lens is None:
            real = positions.reshape(-1) >= 0
            counts = (positions >= 0).sum(axis=1, dtype=np.int32)
            column = xp.arange(positions.shape[1], dtype=np.int32)
            fresh = ((positions == column) | (column >= counts[:, None])).all()
            cu_q_lens = xp.concatenate([np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)])
            order = xp.argsort(~real, stable=True)  # padding moves to the end, and nothing else moves
            before = real.cumsum(dtype=np.int32)
            places = xp.where(real, before - 1, before[-1] + xp.arange(real.size, dtype=np.int32) - before)
            positions = positions.reshape(-1)[order]
        elif known:
            check.not_descending("cu_q_lens", cu_q_lens)
        else:
            cu_q_lens = ascending(whole(jnp.asarray(cu_q_lens), 1))
        cu_q_lens = xp.asarray(cu_q_lens)
        token, first, end = xp.arange(positions.size, dtype=np.int32), cu_q_lens[:-1], cu_q_lens[1:]
        # By counting the sequences that end at or before the token: one fused comparison, where a search would be a
        # loop in each layer.
        rows = (token[:, None] >= end).sum(axis=1, dtype=np.int32)
        real, rows = rows < first.size, xp.minimum(rows, first.size - 1)
        last = positions[xp.clip(end - 1, 0, positions.size - 1)]
        seq_lens = xp.where(end > first, xp.maximum(last + 1, 0), 0)
        wrong = real & ((positions < 0) | (positions != seq_lens[rows] - (end[rows] - token)))
        wrongs = xp.concatenate([np.zeros(1, np.int32), wrong.cumsum(dtype=np.int32)])
        served = wrongs[xp.clip(end, 0, token.size)] == wrongs[xp.clip(first, 0, token.size)]
        if known and not served.all():
            row = int(np.argmin(served))
            of_row = came[row] if came.ndim == 2 else came[first[row] : end[row]]
            check.fail("positions", CONSECUTIVE, f"{_shortened(of_row)} in row {row}")
        return cls(
            positions=jnp.asarray(xp.where(real, positions, -1)),
            rows=jnp.asarray(rows),
            cu_q_lens=jnp.asarray(cu_q_lens),
            seq_lens=jnp.asarray(seq_lens),
            served=jnp.asarray(served[rows] | ~real),
            order=None if order is None else jnp.asarray(order),
            places=None if places is None else jnp.asarray(places),
            came=jnp.asarray(came),
            fresh=jnp.asarray(fresh),
        )

    def pack(self, x: jax.Array) -> jax.Array:
        """[total_tokens, ...] of an array with these tokens in its leading dimensions, replicated, as ops over pages
        want it."""
        x = whole(x, self.came.ndim)
        flat = x.reshape(-1, *x.shape[self.came.ndim :])
        return flat if self.order is None else flat[self.order]

    def unpack(self, x: jax.Array, layer: int | jax.Array, like: jax.Array) -> jax.Array:
        """[total_tokens, ...] back in the given form, and sharded as `like`; NaN for tokens that were not served. A
        traced layer out of range, which is -1, serves none: it wrote nothing."""
        served = (self.served & (layer >= 0)).reshape(-1, *[1] * (x.ndim - 1))
        x = jnp.where(served, x, jnp.nan)
        if self.places is not None:
            x = x[self.places]
        return placed_like(x.reshape(*self.came.shape, *x.shape[1:]), like)

    def by_token[Cache: Any](self, cache: Cache) -> Cache:
        """The cache as if each token were a sequence of its own."""
        return cache.replace(block_tables=whole(cache.shared_tables, 2)[self.rows])

    def pages[Cache: Any](self, cache: Cache) -> tuple[Cache, jax.Array]:
        """For writing: the cache as if each token were a sequence, and positions [total_tokens, 1]."""
        column, tables = self.positions // cache.page_size, whole(cache.shared_tables, 2)
        held = (self.positions >= 0) & (column < tables.shape[1])
        page = jnp.where(held, tables[self.rows, jnp.where(held, column, 0)], -1)
        within = jnp.where(held, self.positions % cache.page_size, -1)
        return cache.replace(block_tables=page[:, None]), within[:, None]


def once_for_all_layers(
    function: str, positions: jax.Array, cu_q_lens: jax.Array | None
) -> jax.Array | NewTokens:
    """What a model passes to its attention modules. One token of each sequence needs only its position."""
    if cu_q_lens is None and positions.shape[1] == 1:
        return positions
    return NewTokens.of(ArgumentChecker(function), positions, cu_q_lens)


def is_ragged(positions: Any, cu_q_lens: Any) -> bool:
    return cu_q_lens is not None or (isinstance(positions, NewTokens) and positions.order is None)


def poison_unless_newest(
    check: ArgumentChecker, output: jax.Array, positions: Any, layer: int | jax.Array
) -> jax.Array:
    """`output` [num_seqs, n, ...] with NaN in rows whose traced positions are not `NEWEST`; an error if they are
    known. NaN as well for a traced layer out of range."""
    ahead = np.arange(positions.shape[1] - 1, -1, -1, dtype=np.int32)
    known = positions if is_traced(positions) else np.asarray(positions)
    last = known.max(axis=1, keepdims=True)
    served = ((known == last - ahead) | (known < 0)).all(axis=1)
    if not is_traced(positions) and not served.all():
        row = int(np.argmin(served))
        check.fail("positions", NEWEST, f"{_shortened(known[row])} in row {row}")
    served = jnp.asarray(served & (layer >= 0))
    return jnp.where(served.reshape(-1, *[1] * (output.ndim - 1)), output, jnp.nan)


def _shortened(row: np.ndarray, most: int = 8) -> str:
    return "[" + ", ".join(map(str, row[:most])) + (", ..." if len(row) > most else "") + "]"
