"""Paged attention as a Flax NNX module."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_attn import PagedKVCache
from pallas_attn._call.checks import check_int, fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._paged import Options, write_and_attend


class PagedAttention(nnx.Module):
    """Writes new keys and values into a `PagedKVCache` and attends to what it holds.

    Projections and rotary embeddings belong to the model; the module's only parameter is that of `sinks`, if asked for.

    Decoding goes through `pallas_attn.paged_attention` (Kwon et al. 2023, see there), writing through
    `pallas_attn.write_kv`, prompts through `jax.nn.dot_product_attention` or, with any option below but `scale`, its
    like in jnp.

    Args:
        scale: factor of the scores before the softmax, above 0; ``None`` means ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; a number above 0, or ``None``.
        sliding_window: each query sees the newest `sliding_window` tokens up to itself; an int of at least 1, or
            ``None``.
        alibi_slopes: a number for each query head, times how far the key lies behind the query, is subtracted from the
            score (see `pallas_attn.nn.alibi_slopes`); ``None`` subtracts nothing.
        sinks: whether each head has a learned score without a value that joins its softmax: the parameter `sinks`
            ``[num_heads]`` float32, 0 at first.
        num_heads: query heads; needed for `sinks`, and for nothing else.
        implementation: which implementation of the two ops to force: "pallas" (NVIDIA GPUs from sm_80; an e4m3 cache
            from sm_89), "triton" (the same by Triton itself), "xla" (anywhere) or "interpret" (the Pallas kernels in
            Python, slow); ``None`` takes pallas on a GPU that can, else xla.

    Raises:
        TypeError: an option of the wrong type. ValueError: one out of its range, or `num_heads` missing or in excess.
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        alibi_slopes: Sequence[float] | jax.Array | None = None,
        sinks: bool = False,
        num_heads: int | None = None,
        implementation: str | None = None,
    ):
        self.options = Options.checked(scale, softcap, sliding_window, alibi_slopes, sinks, implementation)
        if sinks:
            check_int("PagedAttention", "num_heads", num_heads, least=1)
            self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32))
        elif num_heads is not None:
            fail("PagedAttention", "num_heads", "None without sinks", repr(num_heads))
        else:
            self.sinks = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedKVCache,
        layer: jax.Array | int,
        positions: jax.Array,
        *,
        sliding_window: int | jax.Array | None = None,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Attends from `n` new tokens of every sequence.

        With ``n == 1`` (decoding) the token attends to the ``positions + 1`` tokens in its pages. With
        ``n > 1`` (prefill) the sequences are fresh prompts, right-padded to the same length: positions
        count from 0 and attention is over the prompt itself, while its keys and values go to the pages.

        Chunks that go on with a prompt, prompts padded on the left, and several new tokens of a sequence at once are
        not the module's: `PagedKVCache.write` and `pallas_attn.paged_attention` with a 4-D query serve them all in
        one path (`PagedKVCache` shows it). Here they are an error, or NaN where positions are traced.

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
                room for values half as large again; prompts that join later find them set, and what they hold beyond
                saturates (``cache.saturation`` says how much). Fed one token at a time from the start they stay 1,
                unless you call ``cache.calibrate`` first.
            layer: index of this layer in the cache, in ``[0, cache.num_layers)``; an int or an integer scalar that may
                be traced. Out of range it is an error, or, traced, writes nothing and gives NaN.
            positions: ``[num_seqs, n]`` int32 position of each token in its sequence, below the tokens that its
                pages hold; with ``n > 1`` 0, 1, ... of a fresh prompt. Negative marks padding behind it or a finished
                sequence: nothing is written and the output is not meaningful (zeros when ``n == 1``). Rows of any
                other pattern get NaN if positions are traced; known positions are checked, which outside jit reads
                them from the device.
            sliding_window: this layer's, in place of the module's: an int of at least 1, or an int32 scalar that may
                be traced (below 1 it counts as 1), where `paged_attention` takes one; for layers that are scanned
                while their windows alternate.

        Returns:
            The output ``[num_seqs, n, num_heads, head_dim]`` in the query's dtype, and the cache with the
            new tokens in it. The cache's `seq_lens` are left for the model to advance, once per step and
            not once per layer.

        Raises:
            TypeError: another cache, a dtype that the ops do not take, or a query of another dtype than an unquantised
                cache's.
            ValueError: shapes that do not fit each other, a layer out of range, positions that the module cannot
                serve, or a forced implementation that cannot, with its reason.
        """
        sinks = None if self.sinks is None else self.sinks[...]
        return write_and_attend(
            *(self.options, query, key, value, cache, layer, positions),
            sliding_window=sliding_window,
            sinks=sinks,
        )
