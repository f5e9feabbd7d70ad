"""What a kernel answers to whom asks it for a gradient."""

from collections.abc import Callable
from typing import Any

import jax


def refuse(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose derivatives are refused in words: JAX's own rules would fail inside, or be wrong."""
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{name}: the kernel has no gradients; implementation 'xla' has")

    return refusing
