"""What the paged attention kernels are compiled for."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn._tile import masking, schedule, walk
from pallas_attn._tile.problem import SplitKVProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(SplitKVProblem):
    layout: str
    rules: masking.Rules

    def walk(self, seq_len: jax.Array, kv_head: jax.Array | int = 0) -> walk.Walk:
        pattern = self.rules.block_sparse
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.pool.num_kv_heads}
        return walk.plan(
            seq_len,
            q_len=self.q_len,
            rules=self.rules,
            block_kv=self.config.block_kv,
            distinct=pattern.distinct_offsets(self.group) if pattern else 1,
            first_offset=pattern.offset(kv_head * self.group, kv_head, **heads) if pattern else 0,
        )

    def split_tiles(self, num_tiles: jax.Array, seq_lens_ref) -> jax.Array:
        """Run-time size of a sequence's splits; both kernels come to the same."""
        if self.config.num_splits == 1:
            return jnp.maximum(num_tiles, 1)
        lengths = schedule.load_lengths(seq_lens_ref, num_seqs=self.num_seqs, max_len=self.max_len)
        share = schedule.fair_share(
            self.walk(lengths).num_tiles,
            programs_per_tile=self.pool.num_kv_heads * self.q_blocks,
            config=self.config,
        )
        return schedule.split_tiles(num_tiles, share, config=self.config)
