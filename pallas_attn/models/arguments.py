"""Checks that `generate` and the engine share."""

from typing import Any

import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models"):
    from flax import nnx


def check_model(function: str, model: Any) -> None:
    """Raises TypeError for anything but a decoder."""
    wanted = "a Llama or a DeepSeek, or a decoder with their methods"
    if isinstance(getattr(model, "model", None), nnx.Module):
        fail(function, "model", wanted, f"a {type(model).__name__}: pass its .model", TypeError)
    config = getattr(model, "config", None)
    needs = {"create_cache": model, "logits": model, "vocab_size": config, "context_length": config}
    for name, owner in needs.items():
        if not hasattr(owner, name):
            where = "config." if owner is config else ""
            fail(function, "model", wanted, f"a {type(model).__name__} without {where}{name}", TypeError)


def checked_prompt(function: str, name: str, prompt: Any, vocab_size: int) -> tuple[int, ...]:
    """Checks for at least one token id, all in the vocabulary."""
    tokens = checked_tokens(function, name, prompt)
    if len(tokens) == 0:
        fail(function, name, "at least one token", "none")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            fail(function, name, f"token ids in [0, {vocab_size})", str(token))
    return tokens


def checked_tokens(function: str, name: str, tokens: Any) -> tuple[int, ...]:
    """Of a list, a tuple or an integer array."""
    wanted = "a sequence of int token ids"
    if isinstance(tokens, str | bytes) or not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) != 1:
        fail(function, name, wanted, described(tokens), TypeError)
    if hasattr(tokens, "tolist"):  # numpy and JAX arrays, in one copy
        tokens = tokens.tolist()
    for token in tokens:
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, np.integer)):
            fail(function, name, wanted, f"{described(token)} among them", TypeError)
    return tuple(map(int, tokens))


def described(value: Any) -> str:
    return f"{value!r:.40} of type {type(value).__name__}"
