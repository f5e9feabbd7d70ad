"""Attention with functions of the caller's own in float64 numpy: one sequence and one query head at a time.

The functions are JAX's, and are asked for all pairs of a head at once.
"""

from typing import Any, NamedTuple

import jax
import numpy as np


class Rules(NamedTuple):
    """What there is beside the functions, in the order in which it counts: scale, soft cap, score_mod, ALiBi, masks."""

    scale: float
    score_mod: Any = None
    mask_mod: Any = None
    softcap: float | None = None
    alibi_slopes: np.ndarray | None = None
    causal: bool = True
    sliding_window: int | None = None
    sinks: np.ndarray | None = None


def attention(batch: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, rules: Rules):
    """(out [q_len, num_heads, value_dim], lse [q_len, num_heads]) of sequence `batch`, whose newest tokens are the
    queries [q_len, num_heads, dim]; over all its keys [length, num_kv_heads, dim] and values."""
    (q_len, num_heads, _), (length, num_kv_heads, _) = query.shape, key.shape
    at = (np.arange(length - q_len, length)[:, None], np.arange(length)[None, :])
    out = np.zeros((q_len, num_heads, value.shape[-1]))
    lse = np.full((q_len, num_heads), -np.inf)
    if length == 0:
        return out, lse
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        logits = query[:, head].astype(np.float64) @ key[:, kv_head].astype(np.float64).T * rules.scale
        if rules.softcap is not None:
            logits = rules.softcap * np.tanh(logits / rules.softcap)
        if rules.score_mod is not None:
            logits = _asked(rules.score_mod, logits, batch, head, *at)
        if rules.alibi_slopes is not None:
            logits = logits + float(rules.alibi_slopes[head]) * (at[1] - at[0])
        seen = np.broadcast_to(at[0] >= 0, logits.shape)
        if rules.causal:
            seen = seen & (at[1] <= at[0])
        if rules.sliding_window is not None:
            seen = seen & (at[0] - at[1] < rules.sliding_window)
        if rules.mask_mod is not None:
            seen = seen & _asked(rules.mask_mod, batch, head, *at)
        logits = np.where(seen, logits, -np.inf)
        if rules.sinks is not None:  # a key with this logit and no value
            sink = np.full((q_len, 1), float(rules.sinks[head]))
            logits = np.concatenate([logits, sink], axis=1)
        top = logits.max(axis=1, keepdims=True)
        weights = np.where(np.isfinite(logits), np.exp(logits - np.where(np.isfinite(top), top, 0)), 0)
        total = weights.sum(axis=1)
        some = total > 0
        out[some, head] = (weights[some, :length] / total[some, None]) @ value[:, kv_head].astype(np.float64)
        lse[some, head] = top[some, 0] + np.log(total[some])
    return out, lse


def _asked(mod: Any, *arguments: Any) -> np.ndarray:
    places = [np.int32(x) if np.ndim(x) == 0 else x.astype(x.dtype if x.dtype == float else np.int32)
              for x in arguments]  # fmt: skip
    shape = np.broadcast_shapes(*(np.shape(x) for x in places))
    with jax.enable_x64(True):
        return np.broadcast_to(np.asarray(mod(*map(jax.numpy.asarray, places))), shape)
