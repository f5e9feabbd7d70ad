"""Block-sparse prefill on Hopper: the CUDA kernel of csrc/blocksparse, called through XLA's FFI; or that of
csrc/attention, which takes more, and is to take its place once it is measured."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi, hopper_lists
from pallas_attn._tile import low_bits
from pallas_attn.ops.blocksparse_attention import walk
from pallas_attn.ops.blocksparse_attention.kernel import heads_together
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import Problem

BY_LISTS = False
"""Whether csrc/attention serves, not csrc/blocksparse. Read where a call is traced."""
HEAD_DIM = 128
TILE = 128
"""Queries of a head in a tile, and keys per step."""
MOST_TILES = 2**30
"""The most tiles of all heads, which the kernel counts in 32 bits."""


def unsupported(operands: Operands) -> str | None:
    """The reason the CUDA kernel cannot serve a call, or None."""
    problem, dtype, sizes = Problem.of(operands), operands.query.dtype, operands.layout.sizes
    if problem.kinds == "decode":
        return "serves prefill, and these sequences have one query each"
    if problem.cache_layout is not None:
        return "needs keys in rows, got pages"
    if BY_LISTS:
        dim, (block_kv, block_q) = problem.pool.head_dim, sizes
        return hopper_lists.unsupported(
            dtype,
            (dim, dim),
            (block_q, block_kv),
            queries=problem.num_tokens,
            num_heads=problem.num_heads,
            num_seqs=problem.num_seqs,
        )
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, got {dtype.name}"
    if problem.pool.head_dim != HEAD_DIM:
        return f"needs head_dim {HEAD_DIM}, got {problem.pool.head_dim}"
    if problem.rules.softcap is not None:
        return "has no softcap"
    if min(sizes) < TILE:
        return (
            f"needs blocks of at least {TILE} tokens, got {sizes[0]} by {sizes[1]} (block_size, q_block_size)"
        )
    if (tiles := walk.num_items(problem, TILE) * problem.num_heads) > MOST_TILES:
        return f"takes at most {MOST_TILES} tiles of {TILE} queries of all heads, got {tiles}"
    return None


def is_slower(operands: Operands) -> bool:
    """Whether Pallas measured faster: for short sequences most of a tile's rows are wasted."""
    return operands.query.shape[0] < TILE * operands.num_seqs


def prefill(operands: Operands, *, problem: Problem, keep: bool = False) -> tuple[jax.Array, ...]:
    """As `kernel.prefill`: (out, lse [num_tokens, num_heads, 2]) and, with `keep`, a byte of out's lower bits; of
    sequences with one query, where the call is mixed, nothing is written.

    vmap calls it once for each of the batch, one after the other. It knows nothing of a mesh: `partition` does.
    """
    if BY_LISTS:
        return _by_lists(operands, problem, keep)
    ffi.register()
    query, layout = operands.query, operands.layout
    call = jax.ffi.ffi_call(
        "pallas_attn_blocksparse_prefill_sm90",
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((*query.shape[:2], 2), jnp.float32),
            # Without `keep` nothing is written.
            jax.ShapeDtypeStruct(query.shape if keep else (0, *query.shape[1:]), jnp.int8),
            # A counter: an output, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        vmap_method="sequential",
    )
    out, lse, low, _ = call(
        query,
        operands.key,
        operands.value,
        operands.cu_q_lens,
        operands.cu_k_lens,
        layout.row_pointers,
        layout.columns,
        scale=np.float32(problem.scale),
        block_size=np.int64(layout.block_size),
        q_block_size=np.int64(layout.q_block_size),
        heads_together=np.int64(heads_together(problem, query.dtype.itemsize)),
        skip_single=problem.kinds == "mixed",
    )
    return (out, lse, low) if keep else (out, lse)


def _by_lists(operands: Operands, problem: Problem, keep: bool) -> tuple[jax.Array, ...]:
    layout, query = operands.layout, operands.query
    assert operands.cu_q_lens is not None
    assert operands.cu_k_lens is not None
    lists = hopper_lists.OfLayout(
        layout.columns,
        layout.row_pointers,
        operands.cu_q_lens,
        operands.cu_k_lens,
        layout.q_block_size,
        layout.block_size,
    )
    out, lse, *kept = hopper_lists.forward(
        query[None],
        operands.key[None],
        operands.value[None],
        lists,
        scale=jnp.full(1, problem.scale, jnp.float32),
        softcap=problem.rules.softcap,
        skip_rows=int(problem.kinds == "mixed"),
        keep=keep and low_bits.are_lost(query.dtype),
    )
    # All of it is the rest of a maximum of 0.
    parts = (lse, kept[0]) if kept else (jnp.where(lse == -jnp.inf, -np.inf, np.float32(0)), lse)
    return out[0], jnp.stack(parts, axis=-1)[0], *(low[0] for low in kept[1:])
