"""Operands of the ragged kernels: `ragged_paged_attention`, `prefix_prefill` and, over latents, `mla_prefill`."""

from typing import Any

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import PoolShape, key_pool_shape
from pallas_attn._split.problem import PagedCall
from pallas_attn._tile.latents import LATENT_DIM
from pallas_attn._tile.walk import Seen
from pallas_attn._types import Array
from pallas_attn.ops.over_pages import OverPages, cache

LENGTHS = ("seq_lens", "cu_q_lens", "num_seqs", "sliding_window", "num_blocks", "cuts", "seen")
"""By which programs find their work."""


@operands
class Operands(OverPages):
    query: Array = dims("tokens heads dim")
    value_cache: Array | None = cache("value", default=None)
    """None: keys are latents, whose first elements are values."""
    block_tables: Array = dims("rows columns")
    seq_lens: Array = dims("rows")
    cu_q_lens: Array = dims("bounds")
    num_seqs: Array = dims("one")
    key: Array | None = dims("tokens kv_heads dim", default=None)
    """Keys of the new tokens (and `value`), where the caches hold only the tokens before them."""
    value: Array | None = dims("tokens kv_heads dim", default=None)
    tree_mask: Array | None = dims("tokens newest", default=None)
    """int8"""
    query_positions: Array | None = dims("tokens", default=None)
    out_scale: Array | None = dims("one", default=None)
    out: Array | None = dims("tokens heads dim", default=None)
    """Written in place, as is `lse`."""
    lse: Array | None = dims("tokens heads", default=None)
    num_blocks: Array | None = dims("one", default=None)
    """Written by a launch for the next one: how many blocks of query rows that serves."""
    cuts: Array | None = dims("blocks", default=None)
    """And for the merge: into how many splits each of its own blocks is cut. Both int32."""
    seen: Seen | None = dims(("blocks",) * len(Seen._fields), default=None)
    """Of each block of query rows of a launch, by `Ragged.first_place`: the keys that the mask_mod leaves."""
    causal: bool = True
    skip_decode: bool = False
    out_dtype: Any

    @property
    def pool(self) -> PoolShape:
        """Of keys."""
        return key_pool_shape(self.key_cache, self.layout)

    @property
    def value_dim(self) -> int:
        if self.value_cache is None:
            return LATENT_DIM
        return self.value_cache.shape[2 if self.layout == "PACKED" else 3]

    @property
    def max_tree(self) -> int:
        """Sequences of up to this many query tokens are trees; 0: none."""
        return 0 if self.tree_mask is None else self.tree_mask.shape[1]

    @property
    def sizes(self) -> PagedCall:
        max_seqs, max_pages = self.block_tables.shape
        return PagedCall(
            num_seqs=max_seqs, num_heads=self.query.shape[1], max_pages=max_pages, pool=self.pool
        )
