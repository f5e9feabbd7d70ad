"""Multi-head latent attention (DeepSeek's MLA) for decoding, over a paged latent cache."""

from pallas_attn.ops.mla_decode.api import mla_decode
from pallas_attn.ops.mla_decode.cache import PagedLatentCache
from pallas_attn.ops.mla_decode.config import MLADecodeConfig
from pallas_attn.ops.mla_decode.schedule import MLASchedule, mla_schedule

__all__ = [
    "MLADecodeConfig",
    "MLASchedule",
    "PagedLatentCache",
    "mla_decode",
    "mla_schedule",
]
