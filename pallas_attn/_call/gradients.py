"""What is answered to whom asks for a derivative that there is not."""

import contextlib
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def in_reverse_mode(function: str, besides: str) -> Iterator[None]:
    """Around what has derivatives in reverse mode: those in forward mode are refused in words. Under a jax.jit of the
    caller's JAX finds out when it lowers the program, and says in its own that a custom_vjp function is in the way."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise NotImplementedError(
            f"{function}: has derivatives in reverse mode alone (jax.grad, jax.vjp, jax.jacrev), not by jax.jvp, "
            f"jax.jacfwd or jax.hessian; {besides}"
        ) from error
