"""The CUDA kernel of csrc/attention where lists name the keys: blocks of a mask, or of a layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.hopper_forward import DTYPES, MAX_HEAD_DIM, MOST_SEQS, heads_in_l2, results

TARGET = "pallas_attn_attention_lists_sm90"
TILE = 128
"""Queries of a tile, all of one list."""
LEAST_BLOCK = 64
"""Keys of a block; of a layout whose blocks have as many keys, queries too: two rows are then a tile's."""
MOST_ITEMS = 2**30
"""Tiles of all heads."""


@dataclasses.dataclass(frozen=True)
class OfMask:
    """For each block of queries the blocks of keys that it sees, the whole ones first.

    blocks: [batch or 1, heads or 1, rows, columns]; ends: likewise, [..., 2], of the whole ones and of all.
    bits, first_bits: `mods.bits.Bits`.
    """

    blocks: jax.Array
    ends: jax.Array
    first_bits: jax.Array
    bits: jax.Array
    block_q: int
    block_kv: int


@dataclasses.dataclass(frozen=True)
class OfLayout:
    """A compressed sparse row matrix for each head, over where queries and keys stand in their sequences; causal.

    row_pointers: [heads or 1, rows + 1]; blocks: [heads or 1, columns].
    q_bounds, k_bounds: [num_seqs + 1], where each sequence's queries and keys lie; its last query is at its last key.
    """

    blocks: jax.Array
    row_pointers: jax.Array
    q_bounds: jax.Array
    k_bounds: jax.Array
    block_q: int
    block_kv: int


def unsupported(
    dtype,
    dims: tuple[int, int],
    blocks: tuple[int, int],
    *,
    queries: int,
    num_heads: int,
    num_seqs: int | None,
) -> str | None:
    """The reason the kernel cannot serve such a call, or None.

    Args:
        dims: of a head, its query's and its value's.
        blocks: queries and keys of a block.
        queries: of all sequences.
        num_seqs: of a layout; None: a mask, and as many as the batch has.
    """
    if dtype not in DTYPES:
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype).name}"
    for name, dim in zip(("head_dim", "value_dim"), dims, strict=True):
        if dim > MAX_HEAD_DIM or dim % 8:
            return f"needs a {name} of at most {MAX_HEAD_DIM}, a multiple of 8, got {dim}"
    unites = num_seqs is not None and blocks == (LEAST_BLOCK, LEAST_BLOCK)
    if (blocks[0] < TILE and not unites) or blocks[1] < LEAST_BLOCK:
        needed, got = (f"{q} queries and {kv} keys" for q, kv in ((TILE, LEAST_BLOCK), blocks))
        return f"needs blocks of at least {needed}, got {got}"
    if num_seqs is not None and num_seqs > MOST_SEQS:
        return f"takes at most {MOST_SEQS} sequences, got {num_seqs}"
    tiles = (queries // TILE + 2 * ((num_seqs or 0) + 2)) * num_heads
    return f"takes at most {MOST_ITEMS} tiles of all heads, got {tiles}" if tiles > MOST_ITEMS else None


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lists: OfMask | OfLayout,
    *,
    scale: jax.Array,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    heads_first: bool = False,
    lse_heads_first: bool = False,
    skip_rows: int = 0,
    keep: bool = False,
) -> tuple[jax.Array, ...]:
    """As `hopper_forward.forward`, over the keys that the lists name; lse is in base 2."""
    ffi.register()
    batch, kv_tokens = query.shape[0], key.shape[2 if heads_first else 1]
    tokens, heads = (query.shape[2], query.shape[1]) if heads_first else query.shape[1:3]
    kv_heads = key.shape[1 if heads_first else 2]
    nothing = jnp.zeros(0, jnp.int32)
    if isinstance(lists, OfLayout):
        num_seqs, list_heads = lists.q_bounds.shape[0] - 1, lists.blocks.shape[0]
        tiles = tokens // TILE + 2 * (num_seqs + 2)
        bounds, right = (lists.q_bounds, lists.k_bounds), 0
        rows = lists.row_pointers.shape[1] - 1
        arrays = (lists.blocks, nothing, nothing, nothing, lists.row_pointers)
    else:
        list_heads, tiles = lists.blocks.shape[1], batch * -(-tokens // TILE)
        bounds, right, rows = (nothing, nothing), -1, lists.blocks.shape[2]
        arrays = (lists.blocks, lists.ends, lists.first_bits, lists.bits, nothing)
    uniting = list_heads if lists.block_q < TILE else 0
    bytes_of_head = batch * kv_tokens * (key.shape[-1] + value.shape[-1]) * key.dtype.itemsize
    call = jax.ffi.ffi_call(
        TARGET,
        (
            *results(query, value, heads_first, lse_heads_first, keep),
            # Scratch: outputs, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((4,), jnp.int32),
            jax.ShapeDtypeStruct((tiles * list_heads, 8), jnp.int32),
            jax.ShapeDtypeStruct((uniting, lists.blocks.shape[-1]), jnp.int32),
            jax.ShapeDtypeStruct((uniting, (rows + 1) // 2, 5), jnp.int32),
        ),
        vmap_method="sequential",
    )
    out, lse, rest, low, *_ = call(
        query,
        key,
        value,
        *bounds,
        *arrays,
        jnp.array([-1, right], jnp.int32),
        scale,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks,
        query_heads_first=heads_first,
        key_heads_first=heads_first,
        lse_heads_first=lse_heads_first,
        block_q=np.int64(lists.block_q),
        block_kv=np.int64(lists.block_kv),
        skip_rows=np.int64(skip_rows),
        heads_together=np.int64(heads_in_l2(kv_heads, bytes_of_head) * (heads // kv_heads)),
        softcap=np.float32(softcap or 0.0),
    )
    return (out, lse, rest, low) if keep else (out, lse)
