"""Paged attention as a Flax Linen module, for models that have not moved to NNX."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_attn import PagedKVCache
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.optional import needs_extra
from pallas_attn._types import Implementation

with needs_extra("models", user="pallas_attn.nn.linen"):
    from flax import linen

from ._new_tokens import NewTokens
from ._paged import Options, write_and_attend


class PagedAttention(linen.Module):
    """Linen twin of `pallas_attn.nn.PagedAttention`: same arguments, shapes and errors.

    Its only variable is ``params/sinks`` ``[num_heads]`` float32, with ``sinks=True``.

    Args:
        scale, softcap, sliding_window, implementation, batch_invariant: as there.
        alibi_slopes: as there; a tuple of numbers.
        sinks: whether each head has a learned score without a value that joins its softmax.
    """

    scale: float | None = None
    implementation: Implementation | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    alibi_slopes: Sequence[float] | None = None
    sinks: bool = False
    batch_invariant: bool = False

    @linen.compact
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedKVCache,
        layer: jax.Array | int,
        positions: jax.Array | NewTokens,
        *,
        cu_q_lens: jax.Array | None = None,
        sliding_window: int | jax.Array | None = None,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Writes the new tokens of every sequence and attends from them; see `pallas_attn.nn.PagedAttention.__call__`.

        Args:
            query: ``[num_seqs, n, num_heads, head_dim]``, or ragged ``[total_tokens, num_heads, head_dim]``,
                bfloat16, float16 or float32.
            key, value: the same with num_kv_heads.
            cache: the pages of all layers, in the query's dtype or 8-bit with scales.
            layer: index of this layer in the cache; an int or an integer scalar that may be traced.
            positions: ``[num_seqs, n]`` or ``[total_tokens]`` int32; negative marks padding.
            cu_q_lens: ``[num_seqs + 1]`` int32, for the ragged form; ``None`` for the batched one.
            sliding_window: this layer's, in place of the module's; may be traced.

        Returns:
            The output in the query's shape and dtype, and the cache with the new tokens in it.

        Raises:
            TypeError, ValueError: as in `pallas_attn.nn.PagedAttention` and its `__call__`.
        """
        options = Options.checked(
            self.scale, self.softcap, self.sliding_window, self.alibi_slopes, self.sinks, self.implementation
        )
        check, sinks = ArgumentChecker("PagedAttention"), None
        check.flag("batch_invariant", self.batch_invariant)
        if self.sinks:
            check.is_array("query", query)
            sinks = self.param("sinks", linen.initializers.zeros, query.shape[-2:-1], jnp.float32)
        return write_and_attend(
            *(options, query, key, value, cache, layer, positions),
            cu_q_lens=cu_q_lens,
            sliding_window=sliding_window,
            sinks=sinks,
            batch_invariant=bool(self.batch_invariant),
        )
