"""Where a program writes the result of some query rows: to the final arrays if it saw all of a sequence, otherwise to
its split's place.

`out` is a tuple of chunks of head_dim, float32 and normalised; `lse` is natural, unless its parts are asked for. Both
are NaN where `bad`: an invalid length or page id makes its sequence NaN rather than silently wrong.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.sizes import Chunk
from pallas_attn._tile import quantization, softmax, triton
from pallas_attn._tile.rows import Rows, elements


class Result(NamedTuple):
    rows: Rows
    leading: tuple[jax.Array, ...]
    """Indices before the head's in the final arrays."""
    chunks: Sequence[Chunk]
    out: Sequence[jax.Array]
    lse: softmax.Lse

    def poisoned(self, bad: jax.Array) -> "Result":
        out = tuple(softmax.poison(chunk, bad) for chunk in self.out)
        return self._replace(out=out, lse=self.lse._replace(rest=softmax.poison(self.lse.rest, bad)))


def store(
    result: Result, refs: Sequence[Any], place, one_split, *, eviction_policy: str | None = None
) -> None:
    """Writes to (out, lse) or, if the sequence has several splits, to `place` of (partial out, partial lse)."""

    def final():
        store_out(result, refs[0], eviction_policy=eviction_policy)
        store_lse(result, refs[1])

    if len(refs) == 2:
        final()
        return
    triton.when(one_split)(final)

    @triton.when(~one_split)
    def _():
        index = (place, result.rows.kv_head, result.rows.index)
        _store_out(result, refs[2], index, eviction_policy)
        _store_parts(result, refs[3], index)


def store_out(result: Result, out_ref: Any, *, eviction_policy: str | None = None) -> None:
    _store_out(result, out_ref, (*result.leading, result.rows.head), eviction_policy)


def store_lse(result: Result, lse_ref: Any) -> None:
    """Writes the natural lse or, if the array has a dimension for them, its parts."""
    index = (*result.leading, result.rows.head)
    if len(lse_ref.shape) == len(index):
        store_row(result, lse_ref, result.lse.natural())
    else:
        _store_parts(result, lse_ref, index)


def store_row(result: Result, ref: Any, values: jax.Array) -> None:
    """Writes one number a row, indexed as lse."""
    _store_row(result, ref, (*result.leading, result.rows.head), values)


def _store_out(result: Result, ref: Any, index: tuple[jax.Array, ...], eviction_policy: str | None) -> None:
    for values, chunk in zip(result.out, result.chunks, strict=True):
        place, mask = elements(ref, index, result.rows.real, chunk)
        triton.store(
            place, quantization.saturated(values, ref.dtype), mask=mask, eviction_policy=eviction_policy
        )


def _store_parts(result: Result, ref: Any, index: tuple[jax.Array, ...]) -> None:
    for part, values in enumerate(result.lse):
        _store_row(result, ref, (*index, part), values)


def _store_row(result: Result, ref: Any, index: tuple[Any, ...], values: jax.Array) -> None:
    place = ref.at[tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), values.shape) for i in index)]
    triton.store(place, values, mask=result.rows.real)


def shapes(
    problem: Any, dim: int, dtype: Any, *, final: tuple[int, ...] | None = None, parts: bool = False
) -> list[jax.ShapeDtypeStruct]:
    """Shapes of what `store` writes to: (out, lse) and, where sequences may be cut, (partial out, partial lse); the
    latter's last dimension holds the parts of `Lse`.

    `final`: the shape of lse, [num_seqs, q_len, num_heads] by default, [num_tokens, num_heads] where tokens are laid
    end to end. `parts`: it, too, has a last dimension for the parts.
    """
    final = final or (problem.num_seqs, problem.q_len, problem.num_heads)
    lse = (*final, 2) if parts else final
    outputs = [jax.ShapeDtypeStruct((*final, dim), dtype), jax.ShapeDtypeStruct(lse, jnp.float32)]
    if problem.num_places:
        partial = (problem.num_places, problem.pool.num_kv_heads, problem.rows)
        outputs.append(jax.ShapeDtypeStruct((*partial, dim), jnp.float32))
        outputs.append(jax.ShapeDtypeStruct((*partial, 2), jnp.float32))
    return outputs
