"""What `paged_attention` works on."""

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import PoolShape, pool_shape
from pallas_attn._split.problem import DecodeCall
from pallas_attn._types import Array
from pallas_attn.mods.seen import Left
from pallas_attn.ops.over_pages import OverPages, cache


@operands
class Operands(OverPages):
    query: Array = dims("seqs q heads dim")
    value_cache: Array = cache("value")
    block_tables: Array = dims("seqs columns")
    seq_lens: Array = dims("seqs")
    tree_mask: Array | None = dims("seqs q newest", default=None)
    """int8"""
    query_positions: Array | None = dims("seqs q", default=None)
    left: Left | None = dims(("seqs",) * len(Left._fields), default=None)
    """What the mask_mod leaves of each sequence, once that is known."""
    batch_invariant: bool
    num_heads: int
    """Of the whole call, of which a device may hold a part."""

    @property
    def pool(self) -> PoolShape:
        return pool_shape(self.value_cache, self.layout)

    @property
    def sizes(self) -> DecodeCall:
        return DecodeCall.of(self.query, self.block_tables, self.pool)
