"""The ops that can be tuned, by name."""

from pallas_attn.tuning.mla_decode import MLADecodePoint
from pallas_attn.tuning.paged_attention import PagedAttentionPoint
from pallas_attn.tuning.points import Point

OPS: dict[str, type[Point]] = {point.op: point for point in (PagedAttentionPoint, MLADecodePoint)}
