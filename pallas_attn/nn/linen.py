"""Paged attention as a Flax Linen module, for models that have not moved to NNX."""

import jax

from pallas_attn import PagedKVCache
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.nn.linen"):
    from flax import linen

from ._paged import write_and_attend


class PagedAttention(linen.Module):
    """Linen twin of `pallas_attn.nn.PagedAttention`: same arguments, shapes and errors, no variables.

    Args:
        scale: factor of the scores before the softmax, above 0; ``None`` means ``head_dim ** -0.5``.
        implementation: "pallas", "xla" or "interpret" to force one; ``None`` takes the best that can run.
    """

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
        """Writes `n` new tokens of every sequence and attends from them; see `pallas_attn.nn.PagedAttention.__call__`.

        Args:
            query: ``[num_seqs, n, num_heads, head_dim]`` bfloat16, float16 or float32.
            key, value: ``[num_seqs, n, num_kv_heads, head_dim]`` bfloat16, float16 or float32.
            cache: the pages of all layers, in the query's dtype or 8-bit with scales.
            layer: index of this layer in the cache; int or int32 scalar, may be traced.
            positions: ``[num_seqs, n]`` int32; negative marks padding.

        Returns:
            The output in the query's shape and dtype, and the cache with the new tokens in it.

        Raises:
            TypeError, ValueError: as in `pallas_attn.nn.PagedAttention.__call__`.
        """
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
