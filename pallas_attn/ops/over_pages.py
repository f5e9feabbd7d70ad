"""What operands of `paged_attention` and of the ragged ops share: keys in pages, and how logits come of them."""

from typing import Any

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, SCALE_DIMS, Which
from pallas_attn._tile.masking import Rules
from pallas_attn._types import Array
from pallas_attn.mods.operands import WithMods


def cache(which: Which, **default: Any) -> Any:
    """A field that holds a pool of `layout`."""
    return dims(lambda self: DIMS[self.layout][which], **default)


@operands
class OverPages(WithMods):
    key_cache: Array = cache("key")
    sliding_window: Array | None = dims("one", default=None)
    """[1]; for a window that is known at run time only and so not in `rules`."""
    alibi_slopes: Array | None = dims("heads", default=None)
    """float32, as are sinks and scales."""
    sinks: Array | None = dims("heads", default=None)
    k_scale: Array | None = dims(*SCALE_DIMS, default=None)
    """Of a quantised cache: one for each head, or for each page and head."""
    v_scale: Array | None = dims(*SCALE_DIMS, default=None)
    layout: str
    scale: float
    """Of the logits."""
    rules: Rules
