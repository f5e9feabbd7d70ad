"""The programs of static shape that an engine runs in a step.

`tables` and `rows` (of sampling) are the host's, which may change them from step to step; the cache is donated.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.steps"):
    from flax import nnx

from . import choosing
from .deepseek import DeepSeek
from .llama import Cache, Llama, for_a_loop
from .sampling import How

type Decoder = Llama | DeepSeek

_program = functools.partial(jax.jit, static_argnames=("graph", "how", "stops", "burst"), donate_argnums=1)


class Texts(NamedTuple):
    """The rows' tokens, for penalties: tokens [num_rows, n] int32, -1 behind the end; prompt_lengths [num_rows]."""

    tokens: Any
    prompt_lengths: Any


@_program
def mixed(weights, cache: Cache, tables, rows, texts, tokens, positions, bounds, *, graph, how, stops, burst):
    """(the next token of each row that has tokens here, [1, rows], its log-probabilities or None, the cache)."""
    logits, cache = _forward(graph, weights, cache, tables, tokens, positions, bounds)
    return *_choose(logits, rows, texts, positions, bounds, how), cache


@_program
def scores(
    weights, cache: Cache, tables, rows, texts, tokens, positions, bounds, *, graph, how, stops, burst
):
    """`mixed` without choosing: (scores [rows, vocab_size], None, the cache)."""
    logits, cache = _forward(graph, weights, cache, tables, tokens, positions, bounds)
    return logits, None, cache


@functools.partial(jax.jit, static_argnames="how")
def choose(logits, rows, texts, positions, bounds, *, how):
    """The choice of `mixed`: (next token of each row with tokens here, [1, rows], log-probabilities or None)."""
    return _choose(logits, rows, texts, positions, bounds, how)


def of_rows[Rows: Any](rows: Any, new: Rows, old: Rows) -> Rows:
    """Arrays [1, rows, ...]: `new` where `rows` [rows] bool says so."""
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(1, -1, *[1] * (a.ndim - 2)), a, b), new, old)


def _forward(graph, weights, cache: Cache, tables, tokens, positions, bounds) -> tuple[jax.Array, Cache]:
    model: Decoder = nnx.merge(graph, weights)
    cache = cache.replace(block_tables=tables)
    hidden, cache = model(tokens, positions, cache, cu_q_lens=bounds)
    return model.logits(hidden[_last(bounds)]), cache


def _last(bounds: jax.Array) -> jax.Array:
    return jnp.maximum(bounds[1:] - 1, 0)


def _choose(logits, rows, texts, positions, bounds, how: How) -> tuple[jax.Array, Any]:
    chosen = choosing.choose(logits, positions[_last(bounds)] + 1, rows, how, _seen(texts, logits))
    logs = jax.tree.map(lambda x: x[None], choosing.logprobs(logits, chosen)) if how.logprobs else None
    return jnp.where(bounds[1:] > bounds[:-1], chosen, -1)[None], logs


@_program
def decode(weights, cache: Cache, tables, rows, texts, tokens, positions, left, *, graph, how, stops, burst):
    """(up to `left` next tokens of each row, [burst, rows], their log-probabilities or None, the cache); rows stop at a
    stop token."""
    model: Decoder = nnx.merge(graph, weights)
    forward = for_a_loop(model)

    def go_on(carry):
        index, _, positions, *_ = carry
        return (index < burst) & jnp.any(positions >= 0)

    def one_token(carry):
        index, tokens, positions, chosen, logs, seen, cache = carry
        hidden, cache = forward(tokens[:, None], positions[:, None], cache)
        logits = model.logits(hidden[:, 0])
        tokens = choosing.choose(logits, positions + 1, rows, how, seen)
        new = jnp.where(positions >= 0, tokens, -1)
        chosen = chosen.at[index].set(new)
        if logs is not None:
            logs = jax.tree.map(
                lambda all, one: all.at[index].set(one), logs, choosing.logprobs(logits, tokens)
            )
        seen = seen and seen.plus(new)
        ends = jnp.isin(tokens, jnp.array(stops, jnp.int32)) | (tokens[:, None] == rows.stops).any(axis=1)
        ends |= index + 1 >= left
        # A row that has ended attends to nothing and writes nothing.
        return (
            index + 1,
            tokens,
            jnp.where(ends | (positions < 0), -1, positions + 1),
            chosen,
            logs,
            seen,
            cache,
        )

    cache = cache.replace(block_tables=tables)
    chosen = jnp.full((burst, len(tokens)), -1, jnp.int32)
    scores = jax.ShapeDtypeStruct((len(tokens), model.config.vocab_size), jnp.float32)
    logs = jax.eval_shape(choosing.logprobs, scores, tokens) if how.logprobs else None
    logs = jax.tree.map(lambda x: jnp.zeros((burst, *x.shape), x.dtype), logs)
    start = jnp.int32(0), tokens, positions, chosen, logs, _seen(texts, scores), cache
    *_, chosen, logs, _, cache = jax.lax.while_loop(go_on, one_token, start)
    return chosen, logs, cache


def _seen(texts: Texts | None, logits: Any) -> choosing.Seen | None:
    return None if texts is None else choosing.Seen.of(*texts, logits.shape[-1])
