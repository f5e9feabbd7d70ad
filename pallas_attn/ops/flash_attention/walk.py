"""Which tiles of the other side a block of tokens visits: queries walk over keys, and keys over queries.

A walk visits the tiles that every token of the block sees whole, then those at the edges of what the block sees. Only
the latter are masked, so the main loop has no comparisons.

A block may hold several packed documents. Each gets a walk of its own, from empty sums to results, which are written
for its tokens only: what other documents' rows compute meanwhile, NaN included, is dropped. (Keeping their sums would
take a select in every step, and products could not accumulate in place.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._tile import band, triton
from pallas_attn._tile.band import Band
from pallas_attn.mods.blocks import Lists
from pallas_attn.ops.flash_attention import segments
from pallas_attn.ops.flash_attention.scores import Cell


class Side(NamedTuple):
    """Queries or keys: their number, a tile's size, and their documents."""

    length: int
    block: int
    documents: segments.Documents | None = None
    """Refs, as are `lists`: a block_mask's lists for each of this side's blocks of `listed` tokens."""
    lists: Lists | None = None
    listed: int = 0


class Block(NamedTuple):
    """The tokens that a program holds."""

    tokens: jax.Array
    real: jax.Array
    first: jax.Array
    last: jax.Array
    """The last real one."""
    rank: jax.Array | None
    listed: "Listed | None" = None


class Part(NamedTuple):
    """The tokens of a block that belong to one document."""

    tokens: jax.Array
    """Which of the block's tokens these are."""
    rank: jax.Array | None
    """None: there are no documents, and these are all real tokens."""


class Seen(NamedTuple):
    """Tokens [begin, end) of the other side, and those that every token sees."""

    seen: tuple[jax.Array, jax.Array]
    by_all: tuple[jax.Array, jax.Array]


class Tile(NamedTuple):
    """Tokens of the other side."""

    tokens: jax.Array
    held: jax.Array
    """Which of them may be read: tokens that some query sees, in the part's document. The others, which may be NaN,
    read as 0."""
    masked: bool
    """Whether the band must be applied."""


def block(side: Side, batch: jax.Array, index: jax.Array) -> Block:
    first = index * side.block
    tokens = first + jnp.arange(side.block)
    real = tokens < side.length
    last = jnp.minimum(first + side.block, side.length) - 1
    rank = None if side.documents is None else _ranks(side, batch, tokens, real)
    return Block(tokens, real, first, last, rank)


def _ranks(side: Side, batch: jax.Array, tokens: jax.Array, real: jax.Array) -> jax.Array:
    assert side.documents is not None
    place = side.documents.rank.at[jnp.broadcast_to(batch, tokens.shape), tokens]
    return triton.load(place, mask=real, other=-1)


def parts(mine: Block, visit: Callable[[Part], None]) -> None:
    """`visit` for each document of the block."""
    if mine.rank is None:
        return visit(Part(mine.real, None))

    def document(rank: jax.Array, nothing: None) -> None:
        visit(Part(mine.rank == rank, rank))

    lowest = jnp.min(jnp.where(mine.real, mine.rank, np.int32(2**31 - 1)))
    lax.fori_loop(lowest, jnp.max(mine.rank) + 1, document, None)


class Listed(NamedTuple):
    """The tiles that a block_mask lists for a block."""

    lists: Lists
    place: tuple[jax.Array, ...]
    ends: tuple[jax.Array, jax.Array]
    """Ends in the list: of blocks that are seen whole, which come first, and of all."""
    first: tuple[jax.Array, jax.Array]
    """The run at its beginning."""
    tiles: int
    """Tiles of each block in the list."""

    def run(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(first block, number of adjacent blocks) of the run at entry `i`; of one behind the last, anything."""
        return _run(self.lists, self.place, jnp.minimum(i, self.lists.order.shape[-1] - 1))


def looked_up(mine: Block, own: Side, other: Side, cell: Cell) -> Block:
    """With what a block_mask lists for a head's block. Before its tokens are read, so that both come together."""
    if own.lists is None:
        return mine
    lead = (jnp.int32(0) if size == 1 else i for size, i in zip(own.lists.ends.shape, cell, strict=False))
    place = (*lead, mine.first // np.int32(own.listed))
    full, partial = (triton.load(own.lists.ends.at[*place, jnp.int32(i)]) for i in range(2))
    first, tiles = _run(own.lists, place, jnp.int32(0)), other.listed // other.block
    return mine._replace(listed=Listed(own.lists, place, (full, partial), first, tiles))


def _run(lists: Lists, place: tuple[jax.Array, ...], i: jax.Array) -> tuple[jax.Array, jax.Array]:
    return triton.load(lists.order.at[*place, i]), triton.load(lists.runs.at[*place, i])


def walk(
    mine: Block,
    part: Part,
    own: Side,
    other: Side,
    sees: Band,
    cell: Cell,
    step: Callable[[Any, Tile], Any],
    state: Any,
) -> Any:
    """`step(state, tile)` for each tile that the part of `mine` visits, in order; `sees` is from the view of `mine`."""
    batch = cell.batch
    if mine.listed is not None:
        return _over_lists(mine.listed, other, step, state)
    seen = _seen(mine, part, own, other, sees, batch)
    visited = band.tiles(*seen, other.block)
    if part.rank is None:
        edges = sees.left is not None, sees.right is not None or other.length % other.block > 0
        met = sees.met(own.length, other.length)
        return _tiles(visited, met, edges, other, None, batch, step, state)
    return _tiles(visited, seen.seen, (True, True), other, part.rank, batch, step, state)


def sample(
    mine: Block, part: Part, own: Side, other: Side, sees: Band, cell: Cell, size: int
) -> tuple[jax.Array, jax.Array]:
    """([size] tokens, which of them exist), evenly spread over those that the part of `mine` sees; of a list, over its
    first run."""
    batch = cell.batch
    if mine.listed is not None:
        first, blocks = (one * np.int32(other.listed) for one in mine.listed.first)
        apart = blocks // size
        tokens = first + apart // 2 + apart * jnp.arange(size)
        return tokens, (tokens < other.length) & (mine.listed.ends[1] > 0)
    begin, end = _seen(mine, part, own, other, sees, batch).seen
    apart = jnp.maximum((end - begin) // size, 1)
    tokens = begin + apart // 2 + apart * jnp.arange(size)
    held = tokens < end
    if part.rank is not None:
        held &= _ranks(other, batch, tokens, held) == part.rank
    return tokens, held


def _seen(mine: Block, part: Part, own: Side, other: Side, sees: Band, batch: jax.Array) -> Seen:
    if part.rank is None:
        of_block = mine.first, mine.last, other.length
        return Seen(sees.seen(*of_block), sees.seen_by_all(*of_block))
    here, there = (segments.extent(side.documents, batch, part.rank) for side in (own, other))
    first, last = jnp.maximum(mine.first, here.first), jnp.minimum(mine.last, here.end - 1)
    begin, end = sees.seen(first, last, other.length)
    all_begin, all_end = sees.seen_by_all(first, last, other.length)
    all_end = jnp.where(there.solid, jnp.minimum(all_end, there.end), 0)
    seen = jnp.maximum(begin, there.first), jnp.minimum(end, there.end)
    return Seen(seen, (jnp.maximum(all_begin, there.first), all_end))


def _tiles(tiles: band.Tiles, met, edges: tuple[bool, bool], other: Side, rank, batch, step, state) -> Any:
    """`met`: [begin, end) of the tokens that may be read; the beginning is a Python number where known."""

    def masked(tile, state: Any) -> Any:
        tokens = tile * other.block + jnp.arange(other.block)
        held = tokens < met[1]
        if not (isinstance(met[0], int) and met[0] == 0):
            held &= tokens >= met[0]
        if rank is not None:
            held &= _ranks(other, batch, tokens, held) == rank
        return step(state, Tile(tokens, held, True))

    def clear(tile, state: Any) -> Any:
        tokens = tile * other.block + jnp.arange(other.block)
        return step(state, Tile(tokens, jnp.ones(other.block, bool), False))

    left, right = edges
    tiles = tiles._replace(
        clear=tiles.clear if left else tiles.begin, behind=tiles.behind if right else tiles.end
    )
    state = lax.fori_loop(tiles.clear, tiles.behind, clear, state)
    if not left:
        return lax.fori_loop(tiles.behind, tiles.end, masked, state) if right else state
    return tiles.over_edges(masked, state)


def _over_lists(listed: Listed, other: Side, step, state) -> Any:
    """Walks over runs of adjacent blocks, so that the inner loop, which Triton pipelines, has no look-ups."""
    tiles = np.int32(listed.tiles)

    def clear(tile, state: Any) -> Any:
        tokens = tile * other.block + jnp.arange(other.block)
        return step(state, Tile(tokens, jnp.ones(other.block, bool), False))

    def masked(tile, state: Any) -> Any:
        tokens = tile * other.block + jnp.arange(other.block)
        # A listed block that ends beyond the last token may have whole tiles there.
        whole = other.length % other.listed == 0
        held = jnp.ones(other.block, bool) if whole else tokens < other.length
        return step(state, Tile(tokens, held, True))

    def over(begin, end, run, visit, state: Any) -> Any:
        """`run` is that at `begin`. The next one is looked up ahead of a walk, which does not wait for it then."""

        def walked(carry):
            i, (first, blocks), state = carry
            following = listed.run(i + blocks)
            state = lax.fori_loop(first * tiles, (first + blocks) * tiles, visit, state)
            return i + blocks, following, state

        return lax.while_loop(lambda carry: carry[0] < end, walked, (begin, run, state))[2]

    (full, partial), first_partial = listed.ends, listed.run(listed.ends[0])
    return over(full, partial, first_partial, masked, over(jnp.int32(0), full, listed.first, clear, state))
