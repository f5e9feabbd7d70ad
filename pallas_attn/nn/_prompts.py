"""Attention of prompts over themselves, and which positions the modules can serve.

Both are dense: a prompt that begins a sequence needs no page. What came before a chunk that goes on with one lies in
pages, which dense attention does not read: such positions, and others a module has no way to serve, are refused where
they are known and give NaN where they are traced.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, is_traced
from pallas_attn._tile import masking

FRESH = "fresh prompts padded on the right: 0, 1, ... and then negative in each row"
NEWEST = (
    "consecutive ones, ending with the row's newest in the last column; negative before the sequence's start"
)


def fresh(positions: Any) -> Any:
    """[num_seqs] bool: rows that are `FRESH`, or hold nothing; of numpy's arrays and of traced ones."""
    column = np.arange(positions.shape[1], dtype=np.int32)
    count = (positions >= 0).sum(axis=1, keepdims=True)
    return ((positions == column) | (column >= count)).all(axis=1)


def newest(positions: Any) -> Any:
    """[num_seqs] bool: rows that are `NEWEST`, or hold nothing."""
    ahead = np.arange(positions.shape[1] - 1, -1, -1, dtype=np.int32)
    last = positions.max(axis=1, keepdims=True)
    return ((positions == last - ahead) | (positions < 0)).all(axis=1)


def poison_unserved(
    check: ArgumentChecker,
    output: jax.Array,
    positions: jax.Array,
    layer: int | jax.Array,
    rule: Callable[[Any], Any],
    expected: str,
) -> jax.Array:
    """`output` [num_seqs, n, ...] with NaN in rows whose traced positions do not follow the rule; an error if they are
    known. A traced layer out of range, which is -1, makes every row NaN: what it wrote went nowhere."""
    if is_traced(positions):
        served = rule(positions)
    else:
        served = rule(np.asarray(positions))
        if not served.all():
            row = int(np.argmin(served))
            check.fail("positions", expected, f"{_shortened(np.asarray(positions)[row])} in row {row}")
        if isinstance(layer, int):
            return output
    served = jnp.asarray(served & (layer >= 0))
    return jnp.where(served.reshape(-1, *[1] * (output.ndim - 1)), output, jnp.nan)


def _shortened(row: np.ndarray, most: int = 8) -> str:
    return "[" + ", ".join(map(str, row[:most])) + (", ..." if len(row) > most else "") + "]"


def attend_to_themselves(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    scale: float | None,
    softcap: float | None = None,
    sliding_window: Any = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of fresh prompts [num_seqs, n, heads, head_dim], by the rules of `paged_attention`.

    Padding sits after the real tokens, so the causal mask alone keeps it out of every real row.
    """
    lengths = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    # float32 inputs mean float32 products: on a GPU the default would be TF32.
    with jax.default_matmul_precision("highest"):
        if softcap is None and sliding_window is None and alibi_slopes is None and sinks is None:
            return jax.nn.dot_product_attention(
                query, key, value, scale=scale, is_causal=True, key_value_seq_lengths=lengths
            )
        num_seqs, n, num_heads, head_dim = query.shape
        group = num_heads // key.shape[2]
        grouped = query.reshape(num_seqs, n, -1, group, head_dim)
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32)
        logits = masking.cap(logits * (head_dim**-0.5 if scale is None else scale), softcap)

        def by_head(per_head: jax.Array) -> jax.Array:
            return per_head.reshape(-1, group, 1, 1)

        key_at, query_at = jnp.arange(n), jnp.arange(n)[:, None]
        if alibi_slopes is not None:
            logits += masking.alibi(by_head(alibi_slopes), key_at, query_at)
        visible = masking.causal(key_at, query_at)
        if sliding_window is not None:
            visible &= masking.in_window(key_at, query_at, sliding_window)
        logits = masking.apply(logits, visible)
        # Every query sees itself, so no row is without a finite logit.
        peak = jnp.max(logits, axis=-1, keepdims=True)
        total = 0.0
        if sinks is not None:
            peak = jnp.maximum(peak, by_head(sinks))
            total = jnp.exp(by_head(sinks) - peak)
        weights = jnp.exp(logits - peak)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + total)
        out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)
        return out.reshape(query.shape)
