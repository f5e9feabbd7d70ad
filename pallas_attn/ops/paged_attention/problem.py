"""What the paged attention kernel is compiled for."""

import dataclasses
import math

import jax
import numpy as np

from pallas_attn._call.device import current_device
from pallas_attn._call.sizes import tile_side
from pallas_attn._split.problem import SplitKVProblem
from pallas_attn._tile import masking, triton, walk
from pallas_attn._types import Array

LEAST_TOGETHER = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(SplitKVProblem):
    layout: str
    rules: masking.Rules
    by_tiles: bool = False
    """Whether what is called their lengths, to deal sequences by, are the tiles that a mask leaves of them."""

    def walk(
        self,
        seq_len: jax.Array,
        kv_head: jax.Array | int = 0,
        left: walk.Seen | None = None,
    ) -> walk.Walk:
        pattern = self.rules.block_sparse
        return walk.plan(
            seq_len,
            q_len=self.q_len,
            rules=self.rules,
            block_kv=self.config.block_kv,
            distinct=pattern.distinct_offsets(self.group) if pattern else 1,
            first_offset=self.pattern_offset(kv_head * self.group, kv_head) if pattern else 0,
            left=left,
        )

    @property
    def transposed(self) -> bool:
        """Whether products are transposed: tokens and value columns are the first side, which needs 16, and query rows
        the second, which needs 8."""
        return self.config.block_q < tile_side(1)

    @property
    def most_together(self) -> int:
        """Programs a multiprocessor, if all are to run at once; 0 if there are more.

        At least as many as hide each other's latency, since unequal lengths make more splits than planned."""
        at_once = self.config.target_programs
        if self.num_seqs * self.programs_per_split > at_once:
            return 0
        return max(LEAST_TOGETHER, math.ceil(at_once / current_device().num_cores))

    @property
    def most_tokens(self) -> int:
        tokens = walk.most_tokens(self.max_len, q_len=self.q_len, group=self.group, rules=self.rules)
        # Tiles reach beyond a window at both ends; a pattern's last period overlaps the local band.
        pattern = self.rules.block_sparse
        more = (pattern.distinct_offsets(self.group) + 2) * pattern.block_size if pattern else 0
        return tokens + 2 * self.config.block_kv + more

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return seq_len if self.by_tiles else self.walk(seq_len).num_tiles

    def pattern_offset(self, head, kv_head):
        """Block-sparse offset of query heads (traced or not) that share a KV head."""
        assert self.rules.block_sparse is not None
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.pool.num_kv_heads}
        return self.rules.block_sparse.offset(head, kv_head, **heads)

    def with_window(self, sliding_window: Array | None) -> "Problem":
        """The problem with a run-time window put into its rules."""
        if sliding_window is None:
            return self
        window = triton.load(sliding_window.at[np.int32(0)])
        return dataclasses.replace(self, rules=self.rules._replace(sliding_window=window))
