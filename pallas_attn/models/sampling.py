"""Choosing the next token from logits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import LARGEST_FLOAT32, LEAST_FLOAT32, check_int, fail, is_number, plain


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    Attributes:
        temperature: 0 takes the most likely token; above 0 the logits are divided by it and sampled. What is too small
            to divide by in float32 (below 1.2e-38) is 0.
        top_k: sample among so many of the most likely tokens (and what is as likely as the last of them); None: all.
        top_p: in (0, 1]: sample among the fewest tokens whose probabilities together reach it.
        seed: in ``[0, 2**32)``. What is drawn depends on it and on the place in the text alone.

    Raises:
        TypeError, ValueError: a field of another type or out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check("Sampling", self.temperature, self.top_p, self.seed)
        if self.top_k is not None:
            check_int("Sampling", "top_k", self.top_k, least=1)

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature)


class Rows(NamedTuple):
    """`Sampling` of many rows, each field [num_rows]; a temperature of 0 is greedy."""

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any

    @classmethod
    def greedy(cls, num_rows: int) -> "Rows":
        """On the host, to be filled in."""
        fields = (np.float32, 0.0), (np.int32, 0), (np.float32, 1.0), (np.uint32, 0)
        return cls(*(np.full(num_rows, value, dtype) for dtype, value in fields))

    def fill(self, row: int, sampling: Sampling) -> None:
        self.temperature[row] = 0.0 if sampling.greedy else sampling.temperature
        every = np.iinfo(np.int32).max  # no vocabulary has more
        self.top_k[row], self.top_p[row] = min(sampling.top_k or every, every), sampling.top_p
        self.seed[row] = sampling.seed


def is_greedy(temperature: Any) -> bool:
    return plain(temperature) < LEAST_FLOAT32


def check(function: str, temperature: Any, top_p: Any, seed: Any) -> None:
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if not is_number(value):
            fail(function, name, "a number", f"{value!r:.40} of type {type(value).__name__}", TypeError)
    if not 0 <= plain(temperature) <= LARGEST_FLOAT32:
        fail(function, "temperature", "a finite number of at least 0", str(temperature))
    if not 0 < top_p <= 1:
        fail(function, "top_p", "a number in (0, 1]", str(top_p))
    # Of larger ones JAX would take the lower 32 bits.
    check_int(function, "seed", seed, least=0, most=2**32 - 1)


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
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))
    return _draw(keys, _nucleus(logits, temperature, top_p, None))


def sample_rows(logits: jax.Array, places: jax.Array, rows: Rows) -> jax.Array:
    """Draws one token per row, each by its own settings.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        places: ``[num_rows]`` int32, of the token in its text: with the row's seed it decides what is drawn, whatever
            else is in the batch and however often the request was sent back.
        rows: the settings.

    Returns:
        ``[num_rows]`` int32.
    """
    keys = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(rows.seed, places)
    cold = rows.temperature == 0
    temperature = jnp.where(cold, 1.0, rows.temperature)[:, None]
    drawn = _draw(keys, _nucleus(logits, temperature, rows.top_p[:, None], rows.top_k[:, None]))
    return jnp.where(cold, greedy(logits), drawn)


def _draw(keys: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(
    logits: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array | None
) -> jax.Array:
    """The logits over the temperature, -inf where a token is none of those to draw from."""
    # The likeliest token's is 0, so that no quotient overflows to +inf, however small the temperature.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    descending = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    if top_k is not None:
        descending = jnp.where(rank < top_k, descending, -jnp.inf)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Rounding must not empty the nucleus nor, at top_p = 1, cut its tail.
    inside = (before < top_p) | (top_p >= 1.0) | (rank == 0)
    if top_k is not None:
        inside &= rank < top_k
    smallest = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= smallest, scaled, -jnp.inf)
