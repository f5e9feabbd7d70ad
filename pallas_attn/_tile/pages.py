"""Reading a tile of tokens: from positions to pages and slots, and from there to elements of the pool.

There are two ways to read; a kernel chooses at trace time. `gather` takes a page and offset for each token, in any
layout and for any page size. `run` reads neighbouring tokens of one page, with a single look-up. Empty slots, and slots
of invalid page ids, read as 0: a NaN there would survive a weight of 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import Which
from pallas_attn._call.sizes import Chunk, ceil_div, next_power_of_2, reaches_beyond
from pallas_attn._tile import triton
from pallas_attn._tile.layout import token_index
from pallas_attn._types import Array

SECTOR_BYTES = 32  # the smallest transfer from memory
MOST_TOUCHED = 32  # sectors a program


def slots(start: jax.Array, block_kv: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """(column of the block table, offset in the page) of each token of a tile, whose start is a multiple of block_kv.

    Tiles and pages are usually powers of two; then everything but a scalar is the same for all tiles.
    """
    token = jnp.arange(block_kv)
    if block_kv % page_size == 0:
        return start // page_size + token // page_size, token % page_size
    if page_size % block_kv == 0:
        return start // page_size + 0 * token, start % page_size + token
    return (start + token) // page_size, (start + token) % page_size


def look_up(block_tables: Array, seq, column: jax.Array, **mask: Any) -> jax.Array:
    """Page ids in columns of a sequence's row of the block table; `mask` and `other` as of a load."""
    return triton.load(block_tables.at[seq + 0 * column, column], **mask)


def touch(block_tables: Array, program, num_programs: int) -> None:
    """Prefetches this program's part of the block tables. Which ids a program needs is only known once lengths are;
    meanwhile all programs together bring the tables into the L2. Tables of which a warp would prefetch more sectors
    than it has lanes are skipped: they are usually much wider than sequences are long.
    """
    num_seqs, columns = block_tables.shape
    ids = SECTOR_BYTES // block_tables.dtype.itemsize
    share = next_power_of_2(ceil_div(num_seqs * columns, ids * num_programs))
    if share > MOST_TOUCHED:
        return
    first = (program * share + jnp.arange(share)) * ids
    triton.touch(block_tables.at[first // columns, first % columns], mask=first < num_seqs * columns)


def gather(
    ref: Any,
    layout: str,
    which: Which,
    page: jax.Array,
    offset: jax.Array,
    kv_head,
    chunk: Chunk,
    held: jax.Array | None,
    *,
    head_dim: int,
    eviction_policy: str | None = None,
) -> jax.Array:
    """[block_kv, size]: elements `chunk` of tokens at `page` and `offset`; 0 where not `held` (None: all are)."""
    first, size = chunk
    tile = jnp.zeros((offset.shape[0], size), jnp.int32)
    dim = first + jnp.arange(size)[None, :] + tile
    place = token_index(
        layout, which, page[:, None] + tile, offset[:, None] + tile, kv_head + tile, dim, ref.dtype
    )
    mask = None if held is None else held[:, None] & (tile == 0)
    if reaches_beyond(chunk, head_dim):
        mask = dim < head_dim if mask is None else mask & (dim < head_dim)
    other = None if mask is None else nothing(ref)
    return triton.load(ref.at[place], mask=mask, other=other, eviction_policy=eviction_policy)


def run(
    ref: Any, page, offset, kv_head, chunk: Chunk, held: jax.Array, *, eviction_policy: str | None = None
) -> jax.Array:
    """Elements `chunk` of neighbouring tokens from `offset` on in one page of an NHD pool; 0 where not `held`."""
    first, size = chunk
    place = ref.at[page, triton.ds(offset, held.shape[0]), kv_head, triton.ds(first, size)]
    mask = jnp.broadcast_to(held[:, None], (held.shape[0], size))
    return triton.load(place, mask=mask, other=nothing(ref), eviction_policy=eviction_policy)


def scale(ref: Any, page: jax.Array, kv_head, held: jax.Array | None) -> jax.Array:
    """[block_kv] of tokens, from scales [num_pages, num_kv_heads]; 0 where not `held`."""
    mask = {} if held is None else {"mask": held, "other": 0.0}
    return triton.load(ref.at[page, kv_head + 0 * page], **mask)


def nothing(ref: Any) -> int | float:
    """0, as an int or a float to suit a masked load of its elements."""
    return 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
