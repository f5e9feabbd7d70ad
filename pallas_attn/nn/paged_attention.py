"""Paged attention as a Flax NNX module."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_attn import PagedKVCache
from pallas_attn._call.checks import ArgumentChecker, check_int, fail
from pallas_attn._call.optional import needs_extra
from pallas_attn._types import Implementation

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._new_tokens import NewTokens
from ._paged import Options, write_and_attend


class PagedAttention(nnx.Module):
    """Writes new keys and values into a `PagedKVCache` and attends to what it holds.

    Projections and rotary embeddings belong to the model; the module's only parameter is that of `sinks`, if asked for.

    Writing goes through `pallas_attn.write_kv`, a token of each sequence through `pallas_attn.paged_attention` (Kwon et
    al. 2023, see there), and everything else, prompts and chunks of them among tokens of answers, through
    `pallas_attn.ragged_paged_attention`. On a GPU only implementation "xla" has gradients.

    Args:
        scale: factor of the scores before the softmax, above 0; ``None`` means ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; a number above 0 and up to 1e30, or ``None``.
        sliding_window: each query sees the newest `sliding_window` tokens up to itself; an int of at least 1, or
            ``None``.
        alibi_slopes: a number for each query head, times how far the key lies behind the query, is subtracted from the
            score (see `pallas_attn.nn.alibi_slopes`); ``None`` subtracts nothing.
        sinks: whether each head has a learned score without a value that joins its softmax: the parameter `sinks`
            ``[num_heads]`` float32, 0 at first.
        num_heads: query heads; needed for `sinks`, and for nothing else.
        implementation: which implementation of these ops to force: "pallas" (NVIDIA GPUs from sm_80; an e4m3 cache
            from sm_89), "triton" (the same by Triton itself), "xla" (anywhere) or "interpret" (the Pallas kernels in
            Python, slow); ``None`` takes pallas on a GPU that can, else xla.
        batch_invariant: a token's output has the same bits, given the same query, keys and values, whatever else is in
            the batch, in whichever form and chunks its sequence came, and however wide the table. Each token is then
            served as a sequence of its own by `paged_attention(batch_invariant=True)`: prompts read keys and values as
            often as they have tokens. A quantised cache keeps the scales that it has (1 at first, or by `replace`):
            none is calibrated, and pages have none of their own. Not with "xla".

    Raises:
        TypeError: an option of the wrong type.
        ValueError: one out of its range, or `num_heads` missing or in excess.
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
        implementation: Implementation | None = None,
        batch_invariant: bool = False,
    ):
        self.options = Options.checked(scale, softcap, sliding_window, alibi_slopes, sinks, implementation)
        ArgumentChecker("PagedAttention").flag("batch_invariant", batch_invariant)
        self.batch_invariant = bool(batch_invariant)
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
        positions: jax.Array | NewTokens,
        *,
        cu_q_lens: jax.Array | None = None,
        sliding_window: int | jax.Array | None = None,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Attends from the new tokens of every sequence to what its pages hold, these tokens included.

        The new tokens of a sequence follow each other. They may begin it, go on with it in chunks, or be one of an
        answer; what sequences have may differ. There are two forms: batched, `n` tokens of every sequence, with
        padding anywhere; and ragged, all tokens end to end, of which each sequence has as many as `cu_q_lens` says.

        Args:
            query: ``[num_seqs, n, num_heads, head_dim]``, or ragged ``[total_tokens, num_heads, head_dim]``, bfloat16,
                float16 or float32, rotary embedding applied; num_heads is a multiple of num_kv_heads, and query head h
                uses KV head ``h // (num_heads // num_kv_heads)``.
            key: ``[num_seqs, n, num_kv_heads, head_dim]``, or ragged ``[total_tokens, num_kv_heads, head_dim]``,
                bfloat16, float16 or float32, rotary embedding applied; written in the cache's dtype.
            value: like the keys, in their dtype.
            cache: the pages of all layers, in the query's dtype or 8-bit with scales, for num_seqs sequences and
                this num_kv_heads and head_dim. Donate it to the surrounding ``jax.jit``, or the write copies it.
                An 8-bit one made with ``scale_per_page`` takes its scales from what is written, whatever it is. One
                with scales of layers: the first prefill into it while empty (no ``seq_lens`` above 0) sets the layer's,
                with room for values half as large again; prompts that join later find them set, and what they hold
                beyond saturates (``cache.saturation`` says how much). Fed one token at a time from the start they stay
                1, unless you call ``cache.calibrate`` first.
            layer: index of this layer in the cache, in ``[0, cache.num_layers)``; an int or an integer scalar that may
                be traced. Out of range it is an error, or, traced, writes nothing and gives NaN.
            positions: ``[num_seqs, n]`` int32, or ragged ``[total_tokens]``: position of each token in its sequence,
                below the tokens that its pages hold. Negative marks padding or a finished sequence: nothing is written
                and the output is zeros. Positions of a sequence that do not follow each other give NaN in its tokens if
                they are traced; known ones are checked, which outside jit reads them from the device.
            cu_q_lens: ``[num_seqs + 1]`` int32, for the ragged form: where each sequence's tokens begin, from 0, and
                where the last one's end; not decreasing. A sequence may have none; tokens behind are padding, and
                all are where a traced array descends (a known one is refused).
            sliding_window: this layer's, in place of the module's: an int of at least 1, or an int32 scalar that may
                be traced (below 1 it counts as 1), where `paged_attention` takes one; for layers that are scanned
                while their windows alternate.

        Returns:
            The output in the query's shape and dtype, and the cache with the new tokens in it. The cache's `seq_lens`
            are left for the model to advance, once per step and not once per layer.

        Raises:
            TypeError: another cache, a dtype that the ops do not take, or a query of another dtype than an unquantised
                cache's.
            ValueError: shapes that do not fit each other, a layer out of range, positions that do not follow each
                other, or a forced implementation that cannot, with its reason.
        """
        sinks = None if self.sinks is None else self.sinks[...]
        return write_and_attend(
            *(self.options, query, key, value, cache, layer, positions),
            cu_q_lens=cu_q_lens,
            sliding_window=sliding_window,
            sinks=sinks,
            batch_invariant=self.batch_invariant,
        )
