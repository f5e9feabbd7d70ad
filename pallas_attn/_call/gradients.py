"""Error messages for derivatives that do not exist."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

KERNELS = "the kernel has no gradients; implementation 'xla' has"


def refuse(name: str, function: Callable[..., Any], reason: str = KERNELS) -> Callable[..., Any]:
    """`function` with derivatives refused by a clear message: JAX's own rules would fail inside it, or be wrong."""
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{name}: {reason}")

    return refusing


@contextlib.contextmanager
def in_reverse_mode(function: str, besides: str) -> Iterator[None]:
    """Around functions with reverse-mode derivatives: forward mode is refused by a clear message. Under the caller's
    jax.jit, JAX itself notices when it lowers the program, and its message speaks of a custom_vjp function."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise NotImplementedError(
            f"{function}: has derivatives in reverse mode alone (jax.grad, jax.vjp, jax.jacrev), not by jax.jvp, "
            f"jax.jacfwd or jax.hessian; {besides}"
        ) from error
