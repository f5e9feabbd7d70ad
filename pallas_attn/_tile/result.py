"""What a program does with the sums of some query rows: the final result if it saw all of a sequence, else a piece.

`out` is a tuple of chunks of head_dim, float32 and normalised; `lse2` base 2. Both are NaN where `bad`: a length or a
page id that cannot be right makes its sequence NaN rather than quietly wrong.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import quantization, softmax, triton
from pallas_attn._tile.rows import Chunk, Rows, elements


class Result(NamedTuple):
    rows: Rows
    leading: tuple[jax.Array, ...]
    """Indices before the head's in the final arrays."""
    chunks: Sequence[Chunk]
    out: Sequence[jax.Array]
    lse2: jax.Array

    def poisoned(self, bad: jax.Array) -> "Result":
        out = tuple(softmax.poison(chunk, bad) for chunk in self.out)
        return self._replace(out=out, lse2=softmax.poison(self.lse2, bad))


def store(
    result: Result, refs: Sequence[Any], place, one_piece, *, eviction_policy: str | None = None
) -> None:
    """Into (out, lse) or, where a sequence is not in one piece, `place` of (partial out, partial lse2)."""

    def final():
        store_out(result, refs[0], eviction_policy=eviction_policy)
        store_lse(result, refs[1])

    if len(refs) == 2:
        final()
        return
    triton.when(one_piece)(final)

    @triton.when(~one_piece)
    def _():
        index = (place, result.rows.kv_head, result.rows.index)
        _store_out(result, refs[2], index, eviction_policy)
        _store_lse(result, refs[3], index, result.lse2)


def store_out(result: Result, out_ref: Any, *, eviction_policy: str | None = None) -> None:
    _store_out(result, out_ref, (*result.leading, result.rows.head), eviction_policy)


def store_lse(result: Result, lse_ref: Any) -> None:
    _store_lse(result, lse_ref, (*result.leading, result.rows.head), softmax.natural_lse(result.lse2))


def _store_out(result: Result, ref: Any, index: tuple[jax.Array, ...], eviction_policy: str | None) -> None:
    for values, chunk in zip(result.out, result.chunks, strict=True):
        place, mask = elements(ref, index, result.rows.real, chunk)
        triton.store(
            place, quantization.saturated(values, ref.dtype), mask=mask, eviction_policy=eviction_policy
        )


def _store_lse(result: Result, ref: Any, index: tuple[jax.Array, ...], lse: jax.Array) -> None:
    place = ref.at[tuple(jnp.broadcast_to(i, lse.shape) for i in index)]
    triton.store(place, lse, mask=result.rows.real)


def shapes(
    problem: Any, dim: int, dtype: Any, *, final: tuple[int, ...] | None = None
) -> list[jax.ShapeDtypeStruct]:
    """What `store` writes to: (out, lse) and, where sequences may be cut, (partial out, partial lse2).

    `final`: the shape of lse, of which [num_seqs, q_len, num_heads] is the usual one, and [num_tokens, num_heads] where
    tokens are laid end to end.
    """
    final = final or (problem.num_seqs, problem.q_len, problem.num_heads)
    outputs = [jax.ShapeDtypeStruct((*final, dim), dtype), jax.ShapeDtypeStruct(final, jnp.float32)]
    if problem.num_places:
        partial = (problem.num_places, problem.pool.num_kv_heads, problem.rows)
        outputs.append(jax.ShapeDtypeStruct((*partial, dim), jnp.float32))
        outputs.append(jax.ShapeDtypeStruct(partial, jnp.float32))
    return outputs
