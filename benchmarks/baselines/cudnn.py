"""cuDNN's attention, as `jax.nn.dot_product_attention` calls it."""

from typing import Any

import jax

import baselines

TITLE = "cuDNN (jax.nn)"
OPS = ("flash_attention", "flash_attention_gradients")
PLAIN = False


def available() -> str | None:
    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU"


def supports(case: Any) -> str | None:
    if case.layout != "BTNH":
        return "is set up for BTNH here"
    return baselines.plain_only(case)


def attend(case: Any) -> Any:
    def call(query, key, value):
        out = jax.nn.dot_product_attention(query, key, value, is_causal=case.causal, implementation="cudnn")
        return out, out

    return call
