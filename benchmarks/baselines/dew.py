"""FlashAttention-3 for JAX, forward and backward: package dew-flash-attn-cu13, rows and whole documents, no pages."""

import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp

import baselines

TITLE = "FA3 for JAX (dew)"
OPS = ("flash_attention", "flash_attention_gradients")
PLAIN = False
MODULE = "dew_flash_attn"


def available() -> str | None:
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU"
    return baselines.importable(MODULE)


def supports(case: Any) -> str | None:
    if case.layout != "BTNH":
        return "takes BTNH"
    if case.q_offset or case.q_len != case.kv_len:
        return "is set up for queries at their own places here"
    return baselines.other_values(case) or baselines.plain_only(case, but=("sliding_window", "documents"))


def packed(
    query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, longest: int, **options: Any
) -> jax.Array:
    """Attention of documents that lie end to end in the rows of [rows, tokens, heads, dim], where each begins and the
    last one ends: by its varlen function."""
    flat = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    attend = importlib.import_module(MODULE).flash_mha_varlen
    return attend(*flat, starts, longest, **options).reshape(query.shape)


def attend(case: Any) -> Any:
    options = dict(is_causal=case.causal, window_size=baselines.window(case))

    def call(query, key, value):
        if case.documents:
            starts = jnp.array([0, *itertools.accumulate(case.documents * case.batch)], jnp.int32)
            out = packed(query, key, value, starts, max(case.documents), **options)
        else:
            out = importlib.import_module(MODULE).flash_mha(query, key, value, **options)
        return out, out

    return call
