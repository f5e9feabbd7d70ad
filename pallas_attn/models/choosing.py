"""Choosing the next token of each row from its logits, on the device.

A row's token depends on its own logits, settings and tokens only: random numbers derive from its seed and the place in
its text, and no operation mixes rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .sampling import MOST_LOGPROBS, How, Rows

# Relative error of sums of float32 probabilities, so that 10 of 100 equal tokens reach 0.1.
_ROUNDING = 2.0**-20


class Seen(NamedTuple):
    """Tokens of each row, [num_rows, vocab_size]: bools for its prompt, int32 counts for its answer."""

    prompt: jax.Array
    answer: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, prompt_lengths: jax.Array, vocab_size: int) -> "Seen":
        """From tokens [num_rows, n], -1 after a text's end; the first `prompt_lengths` of each row are its prompt."""
        first = jnp.arange(tokens.shape[1]) < prompt_lengths[:, None]
        nothing = jnp.zeros((tokens.shape[0], vocab_size), jnp.int32)
        prompt = _counted(nothing, jnp.where(first, tokens, -1))
        return cls(prompt > 0, _counted(nothing, jnp.where(first, -1, tokens)))

    def plus(self, tokens: jax.Array) -> "Seen":
        """With the next token of each row [num_rows], -1 for none."""
        return self._replace(answer=_counted(self.answer, tokens[:, None]))


def _counted(counts: jax.Array, tokens: jax.Array) -> jax.Array:
    rows, nowhere = jnp.arange(counts.shape[0])[:, None], counts.shape[1]
    return counts.at[rows, jnp.where(tokens >= 0, tokens, nowhere)].add(1, mode="drop")


class Logprobs(NamedTuple):
    """chosen [..., num_rows], top [..., num_rows, k] float32, ids [..., num_rows, k] int32, likeliest first."""

    chosen: jax.Array
    top: jax.Array
    ids: jax.Array


def logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """The model's log-probabilities of tokens [num_rows] and of the likeliest ones."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = jax.lax.top_k(logs, min(MOST_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0], top, ids)


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row; the lowest id wins a tie.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.

    Returns:
        ``[num_rows]`` int32.
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def choose(logits: jax.Array, places: jax.Array, rows: Rows, how: How, seen: Seen | None = None) -> jax.Array:
    """A token for each row, each by its own settings.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        places: ``[num_rows]`` int32, of the token in its text: with the row's seed it decides what is drawn, whatever
            else is in the batch and however often the request was sent back.
        rows: the settings.
        how: what any row needs.
        seen: the rows' texts, where any has a penalty.

    Returns:
        ``[num_rows]`` int32.
    """
    if how.penalised:
        assert seen is not None
        logits = _penalised(logits, rows, seen)
    if not how.sampled:
        return greedy(logits)
    keys = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(rows.seed, places)
    cold = rows.temperature == 0
    # Relative to the likeliest token, which becomes 0, so that no quotient is +inf however small the temperature.
    top = jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(logits == top, 0.0, logits - top)
    scaled /= jnp.where(cold, 1.0, rows.temperature)[:, None]
    if how.cut:
        scaled = _cut(scaled, rows)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    return jnp.where(cold, greedy(logits), drawn)


def _penalised(logits: jax.Array, rows: Rows, seen: Seen) -> jax.Array:
    said = seen.answer > 0
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen.prompt | said, repeated, logits)
    return logits - rows.frequency_penalty[:, None] * seen.answer - rows.presence_penalty[:, None] * said


def _cut(scaled: jax.Array, rows: Rows) -> jax.Array:
    """Logits with -inf for tokens that are not drawn from: those after the last that top_k and top_p keep, ordered by
    likelihood and then by id, and those below min_p."""
    ids = jnp.broadcast_to(jnp.arange(scaled.shape[-1], dtype=jnp.int32), scaled.shape)
    descending, order = jax.lax.sort((-scaled, ids), num_keys=2)
    rank = jnp.arange(scaled.shape[-1])
    among = rank < rows.top_k[:, None]
    descending = -descending
    probabilities = jax.nn.softmax(jnp.where(among, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = rows.top_p[:, None]
    # Rounding must neither empty the set nor, at top_p = 1, cut its tail.
    inside = among & ((before < top_p * (1 - _ROUNDING)) | (top_p >= 1) | (rank == 0))
    last = jnp.sum(inside, axis=-1, keepdims=True) - 1
    value, token = (jnp.take_along_axis(of, last, axis=-1) for of in (descending, order))
    kept = (scaled > value) | ((scaled == value) & (ids <= token))
    kept &= scaled >= jnp.log(rows.min_p)[:, None]
    return jnp.where(kept, scaled, -jnp.inf)
