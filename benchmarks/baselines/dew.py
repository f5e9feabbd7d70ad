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


def attend(case: Any) -> Any:
    package = importlib.import_module(MODULE)
    options = dict(is_causal=case.causal, window_size=baselines.window(case))

    def whole(query, key, value):
        out = package.flash_mha(query, key, value, **options)
        return out, out

    def packed(query, key, value):
        """Every row's documents, end to end."""
        ends = itertools.accumulate(case.documents * case.batch)
        starts = jnp.array([0, *ends], jnp.int32)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
        out = package.flash_mha_varlen(*flat, starts, max(case.documents), **options).reshape(query.shape)
        return out, out

    return packed if case.documents else whole
