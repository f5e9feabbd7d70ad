"""What `paged_attention` works on."""

from typing import Any

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, SCALE_DIMS, PoolShape, Which, pool_shape
from pallas_attn._split.problem import DecodeCall
from pallas_attn._tile.masking import Rules
from pallas_attn._types import Array
from pallas_attn.mods.operands import Mods, captured_dims
from pallas_attn.mods.seen import Left


def _cache(which: Which) -> Any:
    return dims(lambda self: DIMS[self.layout][which])


@operands
class Operands:
    query: Array = dims("seqs q heads dim")
    key_cache: Array = _cache("key")
    value_cache: Array = _cache("value")
    block_tables: Array = dims("seqs columns")
    seq_lens: Array = dims("seqs")
    sliding_window: Array | None = dims("one", default=None)
    """[1]; for a window that is known at run time only and so not in `rules`."""
    alibi_slopes: Array | None = dims("heads", default=None)
    sinks: Array | None = dims("heads", default=None)
    k_scale: Array | None = dims(*SCALE_DIMS, default=None)
    v_scale: Array | None = dims(*SCALE_DIMS, default=None)
    tree_mask: Array | None = dims("seqs q newest", default=None)
    """int8"""
    query_positions: Array | None = dims("seqs q", default=None)
    captured: tuple[Any, ...] | None = dims(
        lambda self: [captured_dims(x) for x in self.captured], default=None
    )
    """Of the score_mod, what has gradients."""
    mods: Mods | None = dims(lambda self: self.mods.dims(), default=None)
    left: Left | None = dims(("seqs",) * len(Left._fields), default=None)
    """What the mask_mod leaves of each sequence, once that is known."""
    layout: str
    scale: float
    rules: Rules
    batch_invariant: bool
    num_heads: int
    """Of the whole call, of which a device may hold a part."""

    @property
    def pool(self) -> PoolShape:
        return pool_shape(self.value_cache, self.layout)

    @property
    def sizes(self) -> DecodeCall:
        return DecodeCall.of(self.query, self.block_tables, self.pool)
