"""What `mla_decode` works on."""

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, PoolShape, pool_shape
from pallas_attn._split.problem import DecodeCall
from pallas_attn._types import Array
from pallas_attn.mods.operands import WithMods
from pallas_attn.mods.seen import Left
from pallas_attn.ops.mla_decode.schedule import MLASchedule


@operands
class Operands(WithMods):
    query: Array = dims("seqs q heads dim")
    latent_cache: Array = dims(DIMS["NHD"]["key"])
    block_tables: Array = dims("seqs columns")
    seq_lens: Array = dims("seqs")
    schedule: MLASchedule | None = dims(("parts columns", "sums"), default=None)
    left: Left | None = dims(("seqs",) * len(Left._fields), default=None)
    """What the mask_mod leaves of each sequence, once that is known."""
    scale: float
    causal: bool
    batch_invariant: bool

    @property
    def pool(self) -> PoolShape:
        return pool_shape(self.latent_cache, "NHD")

    @property
    def sizes(self) -> DecodeCall:
        return DecodeCall.of(self.query, self.block_tables, self.pool)
