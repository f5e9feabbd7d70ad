"""Operands of `sparse_mla_decode` and `sparse_mla_prefill`, also with query tokens flattened."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, PoolShape
from pallas_attn._types import Array


class Ids(NamedTuple):
    """How an id leads to a row of the pool, whose pages are laid end to end.

    page_size: for positions, which are translated by the block table; None where ids are rows.
    tokens_a_seq: query tokens that share a row of the table.
    skip_all_outside: whether any id outside is skipped, not -1 alone.
    """

    page_size: int | None = None
    tokens_a_seq: int = 1
    skip_all_outside: bool = False


@operands
class Operands:
    query: Array = dims("seqs q heads dim", "seqs heads dim")
    latent_cache: Array = dims(DIMS["NHD"]["key"], "pages kv_heads dim")
    indices: Array = dims("seqs q ids")
    block_tables: Array | None = dims("seqs columns", default=None)
    topk_length: Array | None = dims("seqs", default=None)
    sinks: Array | None = dims("heads", default=None)
    ids: Ids
    scale: float
    max_logits: bool
    """Whether to return the largest logits, too; then no token is split."""

    @property
    def num_tokens(self) -> int:
        return math.prod(self.query.shape[:-2])

    @property
    def num_heads(self) -> int:
        return self.query.shape[-2]

    @property
    def topk(self) -> int:
        return self.indices.shape[-1]

    @property
    def pool(self) -> PoolShape:
        """Of rows, which are pages of one token."""
        width = self.latent_cache.shape[-1]
        return PoolShape(self.latent_cache.size // width, 1, 1, width)

    def by_token(self) -> "Operands":
        """query [num_tokens, num_heads, 576], latent_cache [num_rows, width], indices [num_tokens, topk], topk_length
        [num_tokens]."""
        indices = self.indices.reshape(-1, self.topk)
        lengths = jnp.full((1,), self.topk, jnp.int32) if self.topk_length is None else self.topk_length
        each = (lengths.shape[0], indices.shape[0] // lengths.shape[0])
        return dataclasses.replace(
            self,
            query=self.query.reshape(indices.shape[0], *self.query.shape[-2:]),
            latent_cache=self.latent_cache.reshape(-1, self.latent_cache.shape[-1]),
            indices=indices,
            topk_length=jnp.broadcast_to(lengths[:, None], each).reshape(-1),
        )
