"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row; the lowest id wins a tie.

    Args:
        logits: ``[num_seqs, vocab_size]`` float32.

    Returns:
        ``[num_seqs]`` int32.
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """Draws one token per row from the nucleus: the fewest most likely tokens that together reach `top_p`.

    Args:
        logits: ``[num_seqs, vocab_size]`` float32.
        key: a JAX random key. Each row draws from its own fold of it, so that what a sequence draws depends
            on its row and not on how many others share the batch.
        temperature: scalar above 0, a normal float32; the logits are divided by it.
        top_p: scalar in (0, 1]. The most likely token always stays.

    Returns:
        ``[num_seqs]`` int32.
    """
    # The likeliest token's is 0, so that no quotient overflows to +inf, however small the temperature.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    descending = -jnp.sort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding must not empty the nucleus nor, at top_p = 1, cut its tail.
    likeliest = jnp.arange(logits.shape[-1]) == 0
    inside = (before < top_p) | (top_p >= 1.0) | likeliest
    smallest = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    nucleus = jnp.where(scaled >= smallest, scaled, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, nucleus).astype(jnp.int32)
