"""Paged attention as a Flax NNX module."""

import jax

from pallas_attn import PagedKVCache
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._paged import write_and_attend


class PagedAttention(nnx.Module):
    """Writes new keys and values into a `PagedKVCache` and attends to what it holds.

    The module has no parameters: projections and rotary embeddings belong to the model.

    Decoding goes through `pallas_attn.paged_attention` (Kwon et al. 2023, see there), writing through
    `pallas_attn.write_kv`, prefill through `jax.nn.dot_product_attention`.

    Args:
        scale: factor of the scores before the softmax, above 0; ``None`` means ``head_dim ** -0.5``.
        implementation: which implementation of the two ops to force: "pallas" (NVIDIA GPUs from sm_80; an e4m3 cache
            from sm_89), "xla" (anywhere) or "interpret" (the Pallas kernels in Python, slow); ``None`` takes pallas
            on a GPU that can, else xla.
    """

    def __init__(self, *, scale: float | None = None, implementation: str | None = None):
        self.scale = scale
        self.implementation = implementation

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedKVCache,
        layer: jax.Array | int,
        positions: jax.Array,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Attends from `n` new tokens of every sequence.

        With ``n == 1`` (decoding) the token attends to the ``positions + 1`` tokens in its pages. With
        ``n > 1`` (prefill) the sequences are fresh prompts, right-padded to the same length: positions
        count from 0 and attention is over the prompt itself, while its keys and values go to the pages.

        Args:
            query: ``[num_seqs, n, num_heads, head_dim]`` bfloat16, float16 or float32, rotary embedding applied;
                num_heads is a multiple of num_kv_heads, and query head h uses KV head
                ``h // (num_heads // num_kv_heads)``.
            key: ``[num_seqs, n, num_kv_heads, head_dim]`` bfloat16, float16 or float32, rotary embedding applied;
                written in the cache's dtype. Prefill wants the query's dtype.
            value: ``[num_seqs, n, num_kv_heads, head_dim]``, like the keys.
            cache: the pages of all layers, in the query's dtype or 8-bit with scales, for num_seqs sequences and
                this num_kv_heads and head_dim. Donate it to the surrounding ``jax.jit``, or the write copies it.
                The first prefill into an empty 8-bit cache (no ``seq_lens`` above 0) sets the layer's scales, with
                room for values half as large again; fed one token at a time from the start they stay 1, unless
                you call ``cache.calibrate`` first.
            layer: index of this layer in the cache, in ``[0, cache.num_layers)``; int or int32 scalar, may be traced.
            positions: ``[num_seqs, n]`` int32 position of each token in its sequence, below the tokens that its
                pages hold; with ``n > 1`` 0, 1, ... of a fresh prompt (this module has no chunked prefill). Negative
                marks padding or a finished sequence: nothing is written and the output is not meaningful (zeros when
                ``n == 1``).

        Returns:
            The output ``[num_seqs, n, num_heads, head_dim]`` in the query's dtype, and the cache with the
            new tokens in it. The cache's `seq_lens` are left for the model to advance, once per step and
            not once per layer.

        Raises:
            TypeError: a dtype that the ops do not take, or a query of another dtype than an unquantised cache's.
            ValueError: shapes that do not fit each other, or a forced implementation that cannot serve, with its
                reason.
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
