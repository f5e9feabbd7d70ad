"""Ready-made mods, each a few lines: to use, and to read before writing others.

Those that take arrays capture them: a new array of the same shape compiles nothing. `heads` and lengths count as the
call's do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import fail, shown
from pallas_attn.mods.program import NAMES

type MaskMod = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, q_idx, kv_idx) -> whether the query sees the key."""
type ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
"""(score, batch, head, q_idx, kv_idx) -> score; it is float32, scaled, and natural."""


def and_masks(*masks: MaskMod) -> MaskMod:
    """What all of them let through; of none, everything."""
    _check("and_masks", "masks", *masks)
    return lambda b, h, q, k: _joined(jnp.logical_and, True, [mask(b, h, q, k) for mask in masks])


def or_masks(*masks: MaskMod) -> MaskMod:
    """What any of them lets through; of none, nothing."""
    _check("or_masks", "masks", *masks)
    return lambda b, h, q, k: _joined(jnp.logical_or, False, [mask(b, h, q, k) for mask in masks])


def not_mask(mask: MaskMod) -> MaskMod:
    """What it hides."""
    _check("not_mask", "mask", mask)
    return lambda b, h, q, k: jnp.logical_not(mask(b, h, q, k))


def _check(function: str, argument: str, *masks: Any) -> None:
    for mask in masks:
        if not callable(mask):
            fail(function, argument, f"functions of ({', '.join(NAMES[1:])})", shown(mask), TypeError)


def _joined(join: Any, empty: bool, found: Sequence[Any]) -> Any:
    result = jnp.asarray(found[0] if found else empty)
    for one in found[1:]:
        result = join(result, one)
    return result


def causal(offset: int = 0) -> MaskMod:
    """Keys up to the query's own place, which is q_idx + offset."""
    return lambda b, h, q, k: k <= q + offset


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """The `left` tokens before the query, itself, and the `right` ones behind it."""
    return lambda b, h, q, k: (k >= q - left) & (k <= q + right)


def sinks_and_window(sinks: int, left: int) -> MaskMod:
    """Causal: the first `sinks` tokens of all, and a window (Xiao et al., StreamingLLM, 2023)."""
    return and_masks(causal(), lambda b, h, q, k: (k < sinks) | (k >= q - left))


def documents(of_queries: jax.Array, of_keys: jax.Array | None = None) -> MaskMod:
    """Tokens of one document, by ids [tokens] or [batch, tokens]; keys' own where they are others."""
    keys = of_queries if of_keys is None else of_keys
    if of_queries.ndim == 2:
        return lambda b, h, q, k: of_queries[b, q] == keys[b, k]
    return lambda b, h, q, k: of_queries[q] == keys[k]


def prefix_lm(lengths: jax.Array) -> MaskMod:
    """Causal, but for a prefix that all see: `lengths` [batch]."""
    return lambda b, h, q, k: (k <= q) | (k < lengths[b])


def dilated(step: int, left: int) -> MaskMod:
    """Causal: every `step`-th token of the `left` before the query, and itself."""
    return lambda b, h, q, k: (k <= q) & (k >= q - left) & ((q - k) % step == 0)


def neighborhood(width: int, height: int, kernel: int) -> MaskMod:
    """For an image, row by row: each pixel sees the `kernel` x `kernel` pixels around it, moved inside at the edges
    (Hassani et al., NATTEN, 2022). `kernel` is odd, and at most the image's sides."""
    half = kernel // 2

    def near(query: Any, key: Any, size: int) -> Any:
        center = jnp.clip(query, half, size - 1 - half)
        return (key >= center - half) & (key <= center + half)

    return lambda b, h, q, k: near(q // width, k // width, height) & near(q % width, k % width, width)


def block_diffusion(length: int, block: int) -> MaskMod:
    """For `length` noised tokens followed by the clean ones: a noised block sees itself and the clean blocks before it,
    a clean block the clean ones up to itself (Arriola et al., 2025)."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        own, other = (q % length) // block, (k % length) // block
        noised = q < length
        return jnp.where(k < length, noised & (own == other), (other < own) | (~noised & (other == own)))

    return mask


def alibi(slopes: jax.Array) -> ScoreMod:
    """Falls with distance: `slopes` [heads] (Press et al., 2021)."""
    return lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)


def distance_table(table: jax.Array, first: int) -> ScoreMod:
    """Adds `table` [heads, distances], where place 0 is the distance q_idx - kv_idx = `first`. Further ones have its
    ends."""
    last = table.shape[1] - 1
    return lambda score, b, h, q, k: score + table[h, jnp.clip(q - k - first, 0, last)]


def t5_table(
    weights: jax.Array, q_len: int, kv_len: int, *, bidirectional: bool, max_distance: int = 128
) -> jax.Array:
    """The table [heads, q_len + kv_len - 1] for `distance_table(..., first=1 - kv_len)` of T5's `weights`
    [buckets, heads]: buckets are worked out once for each distance, not for each pair (Raffel et al., 2019)."""
    distance = np.arange(1 - kv_len, q_len)
    buckets, first = weights.shape[0], np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    return weights[first + np.where(distance < exact, distance, far)].T


def soft_cap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap)."""
    return lambda score, b, h, q, k: cap * jnp.tanh(score / cap)


def gate(factors: jax.Array) -> ScoreMod:
    """A factor for each head, [heads], or for each query too, [heads, q_len]."""
    if factors.ndim == 2:
        return lambda score, b, h, q, k: score * factors[h, q]
    return lambda score, b, h, q, k: score * factors[h]
