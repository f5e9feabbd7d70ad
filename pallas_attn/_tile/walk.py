"""Which tiles of a sequence a program visits, and in which order; nothing outside them is read.

A walk is a number of tiles and a map from a tile's index to its first token, both computed at run time from the
sequence's length. Dense and windowed attention walk a contiguous range. Block-sparse attention first walks the remote
blocks, which follow in closed form from the pattern's stride, then the contiguous local band. Single tokens are still
masked; a walk only skips tiles in which no token is visible.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import masking
from pallas_attn._tile.masking import LocalStride


class Gap(NamedTuple):
    """Tiles, or pages, [begin, end) that are left out."""

    begin: jax.Array
    end: jax.Array

    def without(self, tile: jax.Array) -> jax.Array:
        """Number of a tile among those that are left."""
        return jnp.where(tile >= self.end, tile - (self.end - self.begin), jnp.minimum(tile, self.begin))

    def back(self, number: jax.Array) -> jax.Array:
        """The tile of such a number."""
        return jnp.where(number >= self.begin, number + (self.end - self.begin), number)


class Seen(NamedTuple):
    """Keys [first, gap) and [rest, end) of a group of queries, or of many: arrays of as many dimensions as there are.
    None where nobody sees any; in one piece, it is the second."""

    first: jax.Array
    gap: jax.Array
    rest: jax.Array
    end: jax.Array

    def gap_of(self, size: int) -> Gap:
        """Tiles of so many tokens, which begin at multiples of it, or pages, in which nobody sees any."""
        begin = _tiles(self.gap, size)
        return Gap(begin, jnp.maximum(self.rest // size, begin))

    def first_tile(self, size: int) -> jax.Array:
        """Its number among those that are left."""
        return self.gap_of(size).without(self.first // size)

    def num_tiles(self, size: int) -> jax.Array:
        end = self.gap_of(size).without(_tiles(self.end, size))
        return jnp.where(self.first < self.end, end - self.first_tile(size), 0)

    def among(self, position: jax.Array) -> jax.Array:
        """Whether somebody may see a token."""
        inside = (position >= self.first) & (position < self.end)
        return inside & ((position < self.gap) | (position >= self.rest))


class Walk(NamedTuple):
    """Tiles [0, num_tiles) of `block_kv` tokens; the first `remote_tiles` are block-sparse remote ones."""

    block_kv: int
    remote: "RemoteBlocks | None"
    remote_tiles: jax.Array
    dense_start: jax.Array
    num_tiles: jax.Array
    seen_from: jax.Array
    """First token that any query sees: earlier pages may already belong to other sequences."""
    left: Seen | None = None
    """What a mask leaves; then `dense_start` is a number of a tile among what is left."""

    def start(self, tile: jax.Array) -> jax.Array:
        """First token of a tile."""
        if self.left is not None:
            return self.left.gap_of(self.block_kv).back(self.dense_start + tile) * self.block_kv
        dense = self.dense_start + (tile - self.remote_tiles) * self.block_kv
        if self.remote is None:
            return dense
        return jnp.where(tile < self.remote_tiles, self.remote.start(tile), dense)

    def tokens(self, tile: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions of a tile's tokens, and which of them count in this tile."""
        position = self.start(tile) + jnp.arange(self.block_kv)
        if self.left is not None:
            return position, self.left.among(position)
        held = masking.within(position, seq_len) & (position >= self.seen_from)
        if self.remote is not None:
            # The last period of remote blocks may overlap the local band, which is walked separately.
            held &= (tile >= self.remote_tiles) | (position < self.dense_start)
        return position, held


class RemoteBlocks(NamedTuple):
    """The blocks j with (j + offset) % stride == 0 for one of the offsets first, first + step, ...: each period of
    `stride` blocks holds one for each of `distinct` offsets."""

    pattern: LocalStride
    tiles_per_block: int
    block_kv: int
    distinct: int
    first_offset: jax.Array | int
    first_period: jax.Array

    def start(self, tile: jax.Array) -> jax.Array:
        index, part = tile // self.tiles_per_block, tile % self.tiles_per_block
        period = self.first_period + index // self.distinct
        stride = self.pattern.vert_stride
        offset = self.first_offset + self.pattern.steps(index % self.distinct, self.distinct)
        residue = (stride - offset % stride) % stride
        return (period * stride + residue) * self.pattern.block_size + part * self.block_kv


def plan(
    seq_len: jax.Array,
    *,
    q_len: int,
    rules: masking.Rules,
    block_kv: int,
    distinct: int,
    first_offset: jax.Array | int,
    left: Seen | None = None,
) -> Walk:
    """The walk of a sequence of (clamped) length `seq_len`, for the rows of one KV head.

    The number of tiles does not depend on the head, so both kernels and the schedule agree on it.
    `distinct`, `first_offset`: the group's block-sparse offsets; ignored without a pattern. `left`: where there is none
    of these, tokens that a mask leaves, which know of the window.
    """
    zero = 0 * seq_len
    # The earliest query sees furthest back.
    earliest_query = jnp.maximum(seq_len - q_len, 0)
    if left is not None:
        first_tile, num_tiles = left.first_tile(block_kv), left.num_tiles(block_kv)
        return Walk(block_kv, None, zero, first_tile, num_tiles, left.first, left)
    seen_from = masking.window_start(earliest_query, rules.sliding_window)
    pattern = rules.block_sparse
    if pattern is None:
        dense_start = seen_from // block_kv * block_kv
        return Walk(block_kv, None, zero, dense_start, _tiles(seq_len - dense_start, block_kv), seen_from)
    size, stride = pattern.block_size, pattern.vert_stride
    first_seen = seen_from // size
    first_local = jnp.maximum(pattern.first_local(earliest_query + 1), first_seen)
    first_period = first_seen // stride
    periods = (first_local + stride - 1) // stride - first_period
    tiles_per_block = size // block_kv
    remote = RemoteBlocks(pattern, tiles_per_block, block_kv, distinct, first_offset, first_period)
    remote_tiles = jnp.where(first_local > first_seen, periods * distinct * tiles_per_block, 0)
    dense_start = first_local * size
    local_tiles = _tiles(seq_len - dense_start, block_kv)
    return Walk(block_kv, remote, remote_tiles, dense_start, remote_tiles + local_tiles, seen_from)


def most_tokens(max_len: int, *, q_len: int, group: int, rules: masking.Rules) -> int:
    """Tokens visited by the walk over a sequence of `max_len` tokens, up to a block more or less."""
    tokens = max_len
    if isinstance(rules.sliding_window, int):
        tokens = min(tokens, rules.sliding_window + q_len - 1)
    if (pattern := rules.block_sparse) is not None:
        local = pattern.local_blocks * pattern.block_size + q_len - 1
        tokens = min(tokens, tokens // pattern.vert_stride * pattern.distinct_offsets(group) + local)
    return tokens


def _tiles(tokens: jax.Array, block_kv: int) -> jax.Array:
    return (jnp.maximum(tokens, 0) + block_kv - 1) // block_kv
