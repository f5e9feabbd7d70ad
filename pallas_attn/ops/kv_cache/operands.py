"""What `write_kv` works on."""

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, SCALE_DIMS, PoolShape, pool_shape
from pallas_attn._types import Array, Layout


@operands
class Operands:
    key: Array = dims("tokens kv_heads dim")  # replicated on every device that holds their heads
    value: Array = dims("tokens kv_heads dim")
    key_cache: Array = dims(lambda self: DIMS[self.layout]["key"])
    value_cache: Array = dims(lambda self: DIMS[self.layout]["value"])
    slot_mapping: Array = dims("tokens")
    k_scale: Array | None = dims(*SCALE_DIMS, default=None)
    v_scale: Array | None = dims(*SCALE_DIMS, default=None)
    layout: Layout
    grows: bool
    """Whether scales belong to pages and first grow by `growing_scales`."""

    @property
    def pool(self) -> PoolShape:
        return pool_shape(self.value_cache, self.layout)

    @property
    def written(self) -> tuple[str, ...]:
        """Which arrays the results overwrite."""
        return ("key_cache", "value_cache", *(("k_scale", "v_scale") if self.grows else ()))
