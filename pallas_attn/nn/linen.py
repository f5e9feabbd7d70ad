"""Paged attention as a Flax Linen module, for models that have not moved to NNX."""

import jax

from pallas_attn import PagedKVCache
from pallas_attn._optional import needs_extra

with needs_extra("models", user="pallas_attn.nn.linen"):
    from flax import linen

from ._paged import write_and_attend


class PagedAttention(linen.Module):
    """Linen twin of `pallas_attn.nn.PagedAttention`: same arguments, shapes and errors, no variables."""

    scale: float | None = None
    implementation: str | None = None

    @linen.compact
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedKVCache,
        layer: jax.Array | int,
        positions: jax.Array,
    ) -> tuple[jax.Array, PagedKVCache]:
        """See `pallas_attn.nn.PagedAttention.__call__`."""
        return write_and_attend(
            query,
            key,
            value,
            cache,
            layer,
            positions,
            scale=self.scale,
            implementation=self.implementation,
        )
