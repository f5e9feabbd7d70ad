"""`merge_states`: attention over several parts of a sequence's keys, put together from each part's out and lse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import options
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile import softmax


def merge_states(
    out_a: jax.Array,
    lse_a: jax.Array,
    out_b: jax.Array,
    lse_b: jax.Array,
    *others: jax.Array,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of keys that were attended to in parts: out = sum_i exp(lse_i - lse) out_i.

    Each part must hold keys that no other holds, and must have been computed without sinks, which would count once in
    every part: they enter here. Plain jnp in float32, with gradients; it works on any device and inside any
    transformation.

    A prefix that many sequences share is read once for all of their queries, instead of once for each. With
    `tables, seq_lens, cu_q_lens` those of what follows the prefix (lengths without it), and all of the prefix before
    every query:

        one = jnp.stack([cu_q_lens[0], cu_q_lens[num_seqs]])
        shared = ragged_paged_attention(
            query, keys, values, prefix_table[None], prefix_len[None], one, causal=False, return_lse=True)
        own = ragged_paged_attention(
            query, keys, values, tables, seq_lens, cu_q_lens, num_seqs, return_lse=True)
        out, lse = merge_states(*shared, *own)

    ALiBi and windows go by positions, which count from each part's start, so they do not fit this recipe.

    Args:
        out_a, out_b: [..., num_heads, head_dim], the parts' outputs: bf16, fp16 or float32, all of one dtype.
        lse_a, lse_b: [..., num_heads] float32, their natural log-sum-exp; -inf where a part had no key, or +inf, as
            `flash_mla_with_kvcache` and `flash_mla_sparse_fwd` return; its out is then ignored.
        others: out and lse of further parts, one after the other.
        sinks: [num_heads]; a logit without a value that joins each head's softmax once. A row without keys in any part
            stays empty.

    Returns:
        (out in the parts' dtype, lse float32); 0 and -inf where no part had a key.

    Raises:
        TypeError: an argument of the wrong dtype.
        ValueError: shapes that do not agree, or an out without its lse.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Juravsky et al., "Hydragen"
    (2024), for prefixes.
    """
    check = ArgumentChecker("merge_states")
    if len(others) % 2:
        check.fail("others", "out and lse of every further part", f"{len(others)} arrays")
    outs, lses = (out_a, out_b, *others[::2]), (lse_a, lse_b, *others[1::2])
    check.is_array("out_a", out_a)
    if len(out_a.shape) < 2:
        check.fail("out_a", "shape [..., num_heads, head_dim]", str(list(out_a.shape)))
    names = ["a", "b"] if not others else ["a", "b", *(str(i) for i in range(2, len(outs)))]
    for name, out, lse in zip(names, outs, lses, strict=True):
        check.array(f"out_{name}", out, out_a.shape, options.DTYPES if name == "a" else [out_a.dtype])
        check.array(f"lse_{name}", lse, out_a.shape[:-1], [jnp.float32])
    if sinks is not None:
        check.array("sinks", sinks, (out_a.shape[-2],), options.DTYPES)
    return merged(outs, lses, sinks)


@jax.jit
def merged(
    outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...], sinks: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`merge_states` without checks; out in the first part's dtype."""
    lses = tuple(jnp.where(jnp.isposinf(lse), -jnp.inf, lse) for lse in lses)
    highest = functools.reduce(jnp.maximum, lses)
    empty = jnp.isneginf(highest)
    if sinks is not None:
        sinks = softmax.finite_sink(sinks.astype(jnp.float32))
        highest = jnp.maximum(highest, sinks)
    highest = jax.lax.stop_gradient(jnp.where(empty, 0.0, highest))
    # A part without keys gets no gradient, even if its cotangent is NaN.
    weights = [
        jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(jnp.where(jnp.isneginf(lse), 0.0, lse) - highest))
        for lse in lses
    ]
    total = sum(weights)
    if sinks is not None:
        total += jnp.where(empty, 0.0, jnp.exp(sinks - highest))
    total = jnp.where(empty, 1.0, total)
    parts = [
        # A part without keys may hold anything; zeroed, it cannot become the gradient of its weight of 0.
        (weight / total)[..., None] * jnp.where(jnp.isneginf(lse)[..., None], 0.0, out.astype(jnp.float32))
        for weight, lse, out in zip(weights, lses, outs, strict=True)
    ]
    merged = functools.reduce(jnp.add, parts)
    return merged.astype(outs[0].dtype), jnp.where(empty, -jnp.inf, highest + jnp.log(total))
