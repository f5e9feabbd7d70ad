"""Attention as it is written down, softmax(Q K^T) V in three steps of jnp: all weights are in memory at once."""

from typing import Any

import jax
import jax.numpy as jnp

import baselines

TITLE = "manual, softmax(QK^T)V"
OPS = ("flash_attention", "flash_attention_gradients")
MOST_BYTES = 64 << 30  # XLA spends minutes on a program that no device holds
PLAIN = True  # calls one after another: their weights would not fit side by side


def available() -> str | None:
    return None


def supports(case: Any) -> str | None:
    logits = 4 * case.batch * case.num_heads * case.q_len * case.kv_len
    if logits > MOST_BYTES:
        return f"its logits alone take {logits >> 30} GiB"
    return baselines.plain_only(case)


def attend(case: Any) -> Any:
    heads = "bthd" if case.layout == "BTNH" else "bhtd"
    theirs = heads.replace("t", "s")

    def call(query, key, value):
        axis = 2 if case.layout == "BTNH" else 1
        key, value = (jnp.repeat(x, case.num_heads // case.num_kv_heads, axis=axis) for x in (key, value))
        logits = jnp.einsum(f"{heads},{theirs}->bhts", query, key, preferred_element_type=jnp.float32)
        if case.causal:
            places = jnp.arange(case.q_len)[:, None] + case.q_offset >= jnp.arange(case.kv_len)
            logits = jnp.where(places, logits, -jnp.inf)
        weights = jax.nn.softmax(logits * case.head_dim**-0.5, axis=-1).astype(value.dtype)
        out = jnp.einsum(f"bhts,{theirs}->{heads}", weights, value)
        return out, out

    return call
