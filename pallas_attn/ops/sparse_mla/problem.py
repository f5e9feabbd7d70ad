"""What the sparse MLA kernel is compiled for: query tokens in the place of sequences, ids in the place of tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn._call.sizes import ceil_div
from pallas_attn._split import splits
from pallas_attn._split.latent_problem import LatentProblem
from pallas_attn._tile import triton
from pallas_attn._types import Array
from pallas_attn.ops.sparse_mla.operands import Ids


def beside_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The output [num_tokens, num_heads, dim] scaled for a sink in each head's softmax."""
    if sinks is None:
        return out
    # Where nothing was seen the output is 0, even with a sink of -inf, and so is the sink's gradient.
    share = jax.nn.sigmoid(jnp.where(jnp.isneginf(lse), -jnp.inf, lse - sinks))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(LatentProblem):
    topk: int
    ids: Ids

    @property
    def max_len(self) -> int:
        return self.topk

    @property
    def num_places(self) -> int:
        """Partial results there is room for: those of query token i start at i * num_splits."""
        return self.num_seqs * self.config.num_splits if self.config.num_splits > 1 else 0

    @property
    def split_ids(self) -> int:
        """Ids that a split has at most: whole tiles."""
        tiles = ceil_div(self.topk, self.config.block_kv)
        return ceil_div(tiles, self.config.num_splits) * self.config.block_kv


class FixedSplits:
    """Each token's ids in splits of `split_ids`, as many as its number of ids fills."""

    def __init__(self, problem: Problem, topk_length: Array):
        self._problem, self._topk_length = problem, topk_length

    def cut(self, which: jax.Array) -> splits.Cut:
        """A token's partial results."""
        return splits.Cut(which, which * self._problem.config.num_splits, self.count(self.length(which)[1]))

    def length(self, seq) -> tuple[jax.Array, jax.Array]:
        """(as it is stored, as it is used)."""
        stored = triton.load(self._topk_length.at[seq])
        return stored, jnp.clip(stored, 0, self._problem.topk)

    def count(self, length: jax.Array) -> jax.Array:
        return ceil_div(length, self._problem.split_ids)
