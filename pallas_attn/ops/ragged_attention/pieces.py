"""How the keys of a block of query rows are cut into pieces, so that few blocks with long contexts fill the device.

Each block gets as many equal pieces as it has fair shares of all the launch's work. Every program derives that from
all lengths (a few kilobytes out of the L2): cheaper than a launch to precompute it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.pieces import TO_NEAREST, ceil_div
from pallas_attn.ops.ragged_attention.blocks import Lens
from pallas_attn.ops.ragged_attention.problem import Problem


class BlockPieces:
    """Those of the block at place i start at i * num_splits."""

    def __init__(self, problem: Problem, lens_refs: dict[str, Any]):
        self._problem = problem.with_window(lens_refs)
        self._lens = Lens(problem.ragged, lens_refs)

    def tiles(self, num_tiles: jax.Array) -> jax.Array:
        """Tiles in a piece of a block that walks `num_tiles`, at least 1."""
        config = self._problem.config
        if config.num_splits == 1:
            return jnp.maximum(num_tiles, 1)
        share = jnp.maximum(self._share(), config.min_split_tokens / config.block_kv)
        wanted = jnp.floor(num_tiles.astype(jnp.float32) / share + TO_NEAREST).astype(jnp.int32)
        return jnp.maximum(ceil_div(num_tiles, jnp.clip(wanted, 1, config.num_splits)), 1)

    def of(self, place) -> tuple[jax.Array, jax.Array]:
        problem = self._problem
        block, mine = problem.find(self._lens, place)
        in_pages, seq_len, _ = problem.lengths(self._lens, block)
        num_tiles = count(problem.spans(block, in_pages, seq_len))
        pieces = jnp.where(mine, ceil_div(num_tiles, self.tiles(num_tiles)), 0)
        return place * problem.config.num_splits, pieces

    def _share(self) -> jax.Array:
        """Tiles that each of the target's programs would get if blocks could be cut anywhere: float32 scalar."""
        problem, group = self._problem, self._problem.group
        block = self._lens.first_block(jnp.arange(triton.next_power_of_2(problem.num_seqs)))
        num_blocks = ceil_div(block.q_len * group, problem.rows)
        # Blocks of a sequence see more and more of it: the one in the middle tells for all.
        middle = block._replace(first_row=num_blocks // 2 * problem.rows)
        in_pages, seq_len, _ = problem.lengths(self._lens, block)
        tiles = num_blocks * count(problem.spans(middle, in_pages, seq_len))
        tiles = jnp.where(problem.serves(block.q_len) & ~block.is_padding, tiles, 0)
        per_program = problem.pool.num_kv_heads / problem.config.target_programs
        return jnp.sum(tiles.astype(jnp.float32)) * per_program


def count(spans: list[Any]) -> jax.Array:
    """Tiles of all spans."""
    total = spans[0].count
    for span in spans[1:]:
        total = total + span.count
    return total
