"""Query rows: the query tokens of a sequence times the heads of a KV head's group, as one dimension of a tile.

    row = token * group + place in the group

so that a few new tokens fill the tensor core's tile instead of needing more programs. `pack` and `unpack` rearrange
whole arrays; kernels compute indices: `Rows` holds the token and head of each of a program's rows, and `elements`
locates rows in an array [*leading, head, dim]. The caller chooses the leading indices: (sequence, token) in a batch
whose sequences have equally many query tokens, (first token of the sequence + token,) where tokens are laid end to end.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.sizes import Chunk, reaches_beyond
from pallas_attn._tile import triton


class Rows(NamedTuple):
    """Some query rows of one sequence; arrays are [rows], but `kv_head` may be a scalar for all."""

    index: jax.Array
    """Number of the row among those of its KV head."""
    real: jax.Array
    kv_head: jax.Array
    token: jax.Array
    """Query token, from 0 for the oldest."""
    head: jax.Array
    """Query head."""


def of_program(head_block: jax.Array, *, block_q: int, num_rows: int, group: int) -> Rows:
    """The `block_q` rows of a program; each KV head's `num_rows` take as many programs as they fill."""
    q_blocks = math.ceil(num_rows / block_q)
    index = jnp.arange(block_q) + head_block % q_blocks * block_q
    return _rows(index, index < num_rows, head_block // q_blocks, group)


def across_heads(flat: jax.Array, *, num_kv_heads: int, num_rows: int, group: int) -> Rows:
    """Rows numbered through all KV heads."""
    real = flat < num_kv_heads * num_rows
    return _rows(flat % num_rows, real, flat // num_rows, group)


def _rows(index, real, kv_head, group: int) -> Rows:
    head = kv_head * group + index % group
    return Rows(index, real, kv_head, index // group, head)


def elements(
    ref: Any, leading: tuple[jax.Array, ...], real: jax.Array, chunk: Chunk, *, neighbours: int | None = None
) -> tuple[Any, jax.Array]:
    """(place, mask), each [rows, size], of elements `chunk` of rows located by `leading` indices. So many of a row are
    `neighbours` for all that the compiler knows; None: all."""
    first, size = chunk
    dim = jnp.arange(size)
    if neighbours is not None:
        number = np.int32(neighbours)
        dim = lax.div(dim, number) * number + lax.rem(dim, number)
    dim = first + dim[None, :]
    tile = jnp.zeros((real.shape[0], size), jnp.int32)
    index = (jnp.broadcast_to(i, real.shape)[:, None] + tile for i in leading)
    mask = real[:, None] & (tile == 0)
    if reaches_beyond(chunk, ref.shape[-1]):
        mask &= dim < ref.shape[-1]
    return ref.at[(*index, dim + tile)], mask


def batched(rows: Rows, seq) -> tuple[jax.Array, ...]:
    """Leading indices in arrays [num_seqs, q_len, head, ...]."""
    return (seq, rows.token)


def load(ref: Any, rows: Rows, leading: tuple[jax.Array, ...], chunk: Chunk) -> jax.Array:
    """Elements `chunk` of rows of an array [*leading, head, dim]; 0 for rows that are not real."""
    place, mask = elements(ref, (*leading, rows.head), rows.real, chunk)
    return triton.load(place, mask=mask, other=0.0)
