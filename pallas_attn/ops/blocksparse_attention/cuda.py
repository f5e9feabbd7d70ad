"""Block-sparse prefill on Hopper: the CUDA kernel of csrc/blocksparse, called through XLA's FFI; or that of
csrc/attention, which takes more, and is to take its place once it is measured."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi, hopper_backward, hopper_lists, sharding
from pallas_attn._call.hopper_forward import Sequences
from pallas_attn._tile import low_bits, softmax
from pallas_attn.ops.blocksparse_attention import walk
from pallas_attn.ops.blocksparse_attention.config import BlockSparseCudaConfig
from pallas_attn.ops.blocksparse_attention.kernel import heads_together
from pallas_attn.ops.blocksparse_attention.layout import transposed
from pallas_attn.ops.blocksparse_attention.operands import BackwardOperands, Operands, as_prefill
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


def backward_unsupported(operands: Operands) -> str | None:
    """Of what `unsupported` leaves: the reason the CUDA kernel cannot serve its gradients, or None."""
    block_kv, block_q = operands.layout.sizes
    return hopper_backward.blocks_unsupported(block_q, block_kv)


def takes_backward(config: BlockSparseCudaConfig | None) -> bool:
    """Whose gradients are, where the forward pass is the CUDA kernel's: the tiled kernels measured faster, and have
    them where the caller does not ask for this one."""
    return config is not None and config.backward == "cuda"


def check(operands: Operands, config: BlockSparseCudaConfig) -> None:
    hopper_backward.check_asked("blocksparse_attention", config.backward, backward_unsupported(operands))


def backward(operands: BackwardOperands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `backward.backward`, of what `backward_unsupported` leaves."""
    operands = as_prefill(operands)
    layout, of_keys = operands.layout, transposed(operands.layout)
    rows = operands.maximum, softmax.finite(operands.rest), operands.delta, operands.total
    gradients = hopper_backward.backward(
        operands.query[None],
        operands.key[None],
        operands.value[None],
        operands.d_out[None],
        tuple(row[None] for row in rows),
        sequences(operands),
        scale=operands.scale,
        right=0,
        softcap=operands.rules.softcap,
        blocks=hopper_backward.Layout(
            (of_keys.row_pointers, of_keys.columns),
            (jnp.asarray(layout.row_pointers), jnp.asarray(layout.columns)),
            layout.q_block_size,
            layout.block_size,
        ),
    )
    d_query, d_key, d_value = (gradient[0] for gradient in gradients)
    return sharding.vary((d_query, d_key, d_value), sharding.varying_axes(operands))


def sequences(operands: Operands) -> Sequences:
    """Where they lie; of one that cannot be right, nowhere. Then queries that are no sequence's, or are more than its
    keys, and keys that are none's, so that each token is someone's."""
    assert operands.cu_q_lens is not None
    assert operands.cu_k_lens is not None
    num_queries, num_keys = operands.query.shape[0], operands.key.shape[0]
    q_ends = jnp.clip(operands.cu_q_lens, 0, num_queries)
    q_begin, q_end = q_ends[:-1], q_ends[1:]
    k_begin, k_end = operands.cu_k_lens[:-1], operands.cu_k_lens[1:]
    bad = (k_begin < 0) | (k_end < k_begin) | (k_end > num_keys)
    # The farthest key of those in front.
    k_last = jax.lax.cummax(jnp.where(bad, 0, k_end))
    k_before = jnp.concatenate([jnp.zeros(1, jnp.int32), k_last])
    k_begin, k_end = (jnp.where(bad, k_before[:-1], bound) for bound in (k_begin, k_end))
    q_first = q_end - jnp.minimum(q_end - q_begin, k_end - k_begin)

    def table(first, end, gaps_first, gaps_end, *, queries: bool) -> jax.Array:
        gaps = jnp.stack([gaps_first, gaps_end], axis=1)
        none = jnp.zeros_like(gaps)
        bounds = jnp.concatenate(
            [jnp.stack([first, end], axis=1), *((gaps, none) if queries else (none, gaps))]
        )
        return jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=1)[None]  # in one piece

    q_gaps = (jnp.concatenate([jnp.zeros(1, jnp.int32), q_end]), jnp.append(q_first, jnp.int32(num_queries)))
    k_gaps = (k_before, jnp.append(k_begin, jnp.int32(num_keys)))
    return Sequences(
        q_table=table(q_first, q_end, *q_gaps, queries=True),
        k_table=table(k_begin, k_end, *k_gaps, queries=False),
    )


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
