"""Which keys a query sees: small pure functions on token positions, composed at trace time.

Further rules (windows, ALiBi, soft caps, block sparsity) join here as functions of the same kind, so that a kernel
contains none of them by name.
"""

import jax
import jax.numpy as jnp


def within(positions: jax.Array, end: jax.Array) -> jax.Array:
    """Tokens before `end`: the cache slots that hold something."""
    return positions < end


def usable_pages(pages: jax.Array, num_pages: int) -> jax.Array:
    """Page ids that may be dereferenced."""
    return (pages >= 0) & (pages < num_pages)


def apply(logits: jax.Array, visible: jax.Array) -> jax.Array:
    return jnp.where(visible, logits, -jnp.inf)
