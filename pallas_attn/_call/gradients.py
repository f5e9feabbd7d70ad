"""What a kernel answers to whom asks it for a gradient."""

from collections.abc import Callable
from typing import Any

import jax

KERNELS = "the kernel has no gradients; implementation 'xla' has"


def refuse(name: str, function: Callable[..., Any], reason: str = KERNELS) -> Callable[..., Any]:
    """`function`, whose derivatives are refused in words: JAX's own rules would fail inside, or be wrong."""
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{name}: {reason}")

    return refusing
