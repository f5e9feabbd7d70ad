"""Attention with functions of the caller's own in float64 numpy: one sequence and one query head at a time.

The functions are JAX's, and are asked for all pairs of all heads at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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


def attention(
    queries: Sequence[np.ndarray], keys: Sequence[np.ndarray], values: Sequence[np.ndarray], rules: Rules
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(out [q_len, num_heads, value_dim], lse [q_len, num_heads]) of each sequence, whose newest tokens are the
    queries [q_len, num_heads, dim]; over all its keys [length, num_kv_heads, dim] and values."""
    q_lens, lengths = ([len(one) for one in side] for side in (queries, keys))
    num_heads, group = queries[0].shape[1], queries[0].shape[1] // keys[0].shape[1]
    logits = np.zeros((len(queries), num_heads, max(q_lens), max(lengths)))
    for seq, (query, key) in enumerate(zip(queries, keys, strict=True)):
        for head in range(num_heads):
            product = query[:, head].astype(np.float64) @ key[:, head // group].astype(np.float64).T
            logits[seq, head, : len(query), : len(key)] = product * rules.scale
    first = (np.array(lengths) - np.array(q_lens))[:, None, None, None]
    query_at = first + np.arange(logits.shape[2])[:, None]
    key_at = np.arange(logits.shape[3])
    # A query before the sequence's start is at 0 to functions, and sees what is not causal.
    placed = np.maximum(query_at, 0)
    at = np.arange(len(queries))[:, None, None, None], np.arange(num_heads)[:, None, None], placed, key_at
    if rules.softcap is not None:
        logits = rules.softcap * np.tanh(logits / rules.softcap)
    if rules.score_mod is not None:
        logits = _asked(rules.score_mod, logits, *at)
    if rules.alibi_slopes is not None:
        logits = logits + rules.alibi_slopes.astype(np.float64)[:, None, None] * (key_at - query_at)
    seen = np.broadcast_to(key_at < np.array(lengths)[:, None, None, None], logits.shape)
    if rules.causal:
        seen = seen & (key_at <= query_at)
    if rules.sliding_window is not None:
        seen = seen & (query_at - key_at < rules.sliding_window)
    if rules.mask_mod is not None:
        seen = seen & _asked(rules.mask_mod, *at)
    logits = np.where(seen, logits, -np.inf)
    return [
        _softmax(one[:, :n], value, rules.sinks) for one, n, value in zip(logits, q_lens, values, strict=True)
    ]


def _softmax(
    logits: np.ndarray, value: np.ndarray, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    num_heads, q_len, _ = logits.shape
    out, lse = np.zeros((q_len, num_heads, value.shape[-1])), np.full((q_len, num_heads), -np.inf)
    for head in range(num_heads if len(value) else 0):
        one = logits[head, :, : len(value)]
        if sinks is not None:  # a key with this logit and no value
            one = np.concatenate([one, np.full((q_len, 1), float(sinks[head]))], axis=1)
        top = one.max(axis=1, keepdims=True)
        weights = np.where(np.isneginf(one), 0, np.exp(one - np.where(np.isneginf(top), 0, top)))
        total = weights.sum(axis=1)
        some = total > 0
        of_head = value[:, head * value.shape[1] // num_heads].astype(np.float64)
        out[some, head] = weights[some, : len(value)] @ of_head / total[some, None]
        lse[some, head] = top[some, 0] + np.log(total[some])
    return out, lse


def _asked(mod: Any, *arguments: np.ndarray) -> np.ndarray:
    shape = np.broadcast_shapes(*(x.shape for x in arguments))
    with jax.enable_x64(True):
        given = (jnp.asarray(x if x.dtype == np.float64 else x.astype(np.int32)) for x in arguments)
        return np.broadcast_to(np.asarray(mod(*given)), shape)
