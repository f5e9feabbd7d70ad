"""How sequences are cut into splits, decided at run time from the lengths, inside the kernels.

Every program gets about the same number of tiles, however the lengths are distributed: a long sequence has many
splits, a short one has one. The rule is evaluated by each program from all lengths (a few hundred bytes out of L2,
read while its own length is on the way), which is cheaper than a launch to precompute it.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton


@runtime_checkable
class SplitLimits(Protocol):
    """The fields of an op's config that say how to cut."""

    @property
    def block_kv(self) -> int: ...
    @property
    def num_splits(self) -> int: ...
    @property
    def min_split_tokens(self) -> int: ...
    @property
    def target_programs(self) -> int: ...


def load_lengths(seq_lens_ref, *, num_seqs: int, max_len: int) -> jax.Array:
    """All lengths, padded to a power of two with 0 and clamped to what the block table can hold."""
    seqs = jnp.arange(triton.next_power_of_2(num_seqs))
    lengths = triton.load(seq_lens_ref.at[seqs], mask=seqs < num_seqs, other=0)
    return jnp.clip(lengths, 0, max_len)


def fair_share(num_tiles: jax.Array, *, programs_per_tile: int, config: SplitLimits) -> jax.Array:
    """Tiles that each of the target's programs would get if sequences could be cut anywhere: float32 scalar.

    `programs_per_tile` is how many programs (KV heads x query blocks) walk over each tile.
    """
    share = jnp.sum(num_tiles.astype(jnp.float32)) * (programs_per_tile / config.target_programs)
    return jnp.maximum(share, config.min_split_tokens / config.block_kv)


def split_tiles(num_tiles: jax.Array, share: jax.Array, *, config: SplitLimits) -> jax.Array:
    """Tiles in each split of a sequence, at least 1: as many equal splits as it has fair shares, rounded."""
    splits = jnp.floor(num_tiles.astype(jnp.float32) / share + 0.5).astype(jnp.int32)
    splits = jnp.clip(splits, 1, config.num_splits)
    return jnp.maximum(ceil_div(num_tiles, splits), 1)


def ceil_div(a, b):
    return (a + (b - 1)) // b
