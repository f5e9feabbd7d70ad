"""What an engine has the device compute in a step: programs of static shape.

`tables` and `rows` (of sampling) are the host's, which may change them from step to step; the cache is donated.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_attn._call.optional import needs_extra

with needs_extra("models", user="pallas_attn.models.steps"):
    from flax import nnx

from . import sampling
from .deepseek import DeepSeek
from .llama import Cache, Llama, for_a_loop

type Decoder = Llama | DeepSeek

_program = functools.partial(
    jax.jit, static_argnames=("graph", "sampled", "stops", "burst"), donate_argnums=1
)


@_program
def mixed(weights, cache: Cache, tables, rows, tokens, positions, bounds, *, graph, sampled, stops, burst):
    """(the next token of each row that has tokens here, [1, rows], the cache)."""
    model: Decoder = nnx.merge(graph, weights)
    cache = cache.replace(block_tables=tables)
    hidden, cache = model(tokens, positions, cache, cu_q_lens=bounds)
    last = jnp.maximum(bounds[1:] - 1, 0)
    chosen = _choose(model.logits(hidden[last]), positions[last] + 1, rows, sampled)
    return jnp.where(bounds[1:] > bounds[:-1], chosen, -1)[None], cache


@_program
def decode(weights, cache: Cache, tables, rows, tokens, positions, left, *, graph, sampled, stops, burst):
    """(up to `left` next tokens of each row, [burst, rows], the cache); rows stop at a stop token."""
    model: Decoder = nnx.merge(graph, weights)
    forward = for_a_loop(model)

    def go_on(carry):
        index, _, positions, *_ = carry
        return (index < burst) & jnp.any(positions >= 0)

    def one_token(carry):
        index, tokens, positions, chosen, cache = carry
        hidden, cache = forward(tokens[:, None], positions[:, None], cache)
        tokens = _choose(model.logits(hidden[:, 0]), positions + 1, rows, sampled)
        chosen = chosen.at[index].set(jnp.where(positions >= 0, tokens, -1))
        ends = jnp.isin(tokens, jnp.array(stops, jnp.int32)) | (index + 1 >= left)
        # A row that has ended attends to nothing and writes nothing.
        return index + 1, tokens, jnp.where(ends | (positions < 0), -1, positions + 1), chosen, cache

    chosen = jnp.full((burst, len(tokens)), -1, jnp.int32)
    start = jnp.int32(0), tokens, positions, chosen, cache.replace(block_tables=tables)
    *_, chosen, cache = jax.lax.while_loop(go_on, one_token, start)
    return chosen, cache


def _choose(logits: jax.Array, places: jax.Array, rows: sampling.Rows, sampled: bool) -> jax.Array:
    return sampling.sample_rows(logits, places, rows) if sampled else sampling.greedy(logits)
