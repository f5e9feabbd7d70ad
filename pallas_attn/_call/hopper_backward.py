"""The CUDA kernel of csrc/attention/sm90/backward, called through XLA's FFI."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.checks import fail
from pallas_attn._call.hopper_forward import Sequences

TARGET = "pallas_attn_attention_backward_sm90"
DIMS = (64, 96, 128)
"""Widths of heads whose gradients are made in one pass; others are filled up. Wider ones, up to the widest of the
forward kernel, take three."""
BLOCK_KV = 128
"""Keys of a tile, and queries where there are three passes; the fewest of a mask's block."""
COUNT_COLUMNS = 8
"""Of a row of sums, behind a query's gradient: what was multiplied with keys."""
MOST_PASSES = 3
HEADS_TOGETHER = 32
"""KV heads whose key tiles are interleaved. Tiles of one head wait for each other, so few of them should start
together: all of 16 heads of 128 were the fastest at 2k, 4k and 16k causal tokens, all of 32 of 64 at 2k and 4k (by 3%
and 1% from 16, which were at 16k, by 3%; H200)."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A mask's blocks of BLOCK_KV tokens and more: for each of one side those of the other that it meets.

    of_keys, of_queries: [batch or 1, heads or 1, rows, columns, 2], each its number, and the number that the pair has
        among `bits`, or -1 where all of it is seen; and [batch or 1, heads or 1, rows], how many there are.
    bits: `mods.bits.Bits.words`.
    """

    of_keys: tuple[jax.Array, jax.Array]
    of_queries: tuple[jax.Array, jax.Array]
    bits: jax.Array
    block_q: int
    block_kv: int


def blocks_unsupported(block_q: int, block_kv: int) -> str | None:
    """The reason there are no gradients over blocks of so many queries and keys, or None."""
    if min(block_q, block_kv) < BLOCK_KV:
        return (
            f"takes blocks of at least {BLOCK_KV} queries and {BLOCK_KV} keys, got {block_q} and {block_kv}"
        )
    return None


def check_asked(function: str, backward: str | None, reason: str | None) -> None:
    """Refuses a config whose `backward` asks for this kernel where there is a reason that it cannot serve."""
    if backward == "cuda" and reason is not None:
        fail(function, "config", "backward 'tiled' or None", f"'cuda', which {reason}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout's blocks, of BLOCK_KV tokens and more, over where tokens stand in their sequences; causal besides.

    of_keys, of_queries: for each block of one side those of the other, ascending, as compressed sparse rows: pointers
        [heads or 1, rows + 1] and blocks [heads or 1, entries]. Pointers of keys that begin below 0 make a head's
        gradients NaN.
    """

    of_keys: tuple[jax.Array, jax.Array]
    of_queries: tuple[jax.Array, jax.Array]
    block_q: int
    block_kv: int


def blocks_of(of_queries, of_keys, first_bits: jax.Array, bits: jax.Array, block: tuple[int, int]) -> Blocks:
    """From lists, (order [batch or 1, heads or 1, rows, columns], ends [..., 2]), which name whole blocks first. Bits
    are in the order of queries' lists, those of a row from its `first_bits` on."""
    order, ends = of_queries
    place = jnp.arange(order.shape[-1], dtype=jnp.int32)
    whole = ends[..., :1]
    numbers = jnp.where(place < whole, -1, first_bits[..., None] + place - whole)
    by_block = jnp.take_along_axis(numbers, jnp.argsort(order, axis=-1), axis=-1)
    key_order, key_ends = of_keys
    key_numbers = jnp.take_along_axis(jnp.swapaxes(by_block, -1, -2), key_order, axis=-1)
    return Blocks(
        (jnp.stack([key_order, key_numbers], axis=-1), key_ends[..., 1]),
        (jnp.stack([order, numbers], axis=-1), ends[..., 1]),
        bits,
        *block,
    )


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    rows: tuple[jax.Array, ...],
    sequences: Sequences,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    offset: int = 0,
    softcap: float | None = None,
    heads_first: bool = False,
    ordered: bool = True,
    blocks: Blocks | Layout | None = None,
    alibi_slopes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value.

    Args:
        query, d_out: [batch, tokens, heads, dim], or heads before tokens; key, value: likewise.
        rows: maximum, rest, delta, total [batch, heads, tokens], as the tiled kernels take them.
        sequences: documents, or none: then each batch entry is one sequence.
        left, right, offset: query i sees keys from i + offset - left to i + offset + right; None is no bound.
        ordered: gradients of queries are added up in one order, so that the same inputs give the same bits. Without,
            they are in the order in which tiles happen to finish: the last bits vary from run to run. Heads that take
            three passes add nothing in memory: their bits are the same either way.
        blocks: a mask, in place of documents and bounds; or a layout, beside tables of documents (without ranks), whose
            last queries are at their last keys, and with `right` 0. All heads then take three passes.
        alibi_slopes: float32 [heads], of heads that take one pass, without a soft cap. Query i's logit of key k has
            slope * (k - i - offset) more; the maximum of `rows` is then one of natural logits.

    vmap calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    batch, head_dim = query.shape[0], query.shape[-1]
    tokens, heads = (query.shape[2], query.shape[1]) if heads_first else query.shape[1:3]
    kv_tokens, kv_heads = (key.shape[2], key.shape[1]) if heads_first else key.shape[1:3]
    widest = max(head_dim, value.shape[-1])
    width = None if blocks else next((dim for dim in DIMS if widest <= dim), None)
    documents = sequences.q_table is not None

    def tiles(tokens: int) -> jax.ShapeDtypeStruct:
        # Where there are documents, a tile may have a single token of its own.
        most = tokens if documents else -(-tokens // BLOCK_KV)
        return jax.ShapeDtypeStruct((batch * most, 4), jnp.int32)

    call = jax.ffi.ffi_call(
        TARGET,
        (
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, value)),
            # Scratch: outputs, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((MOST_PASSES, 2), jnp.int32),
            tiles(kv_tokens),
            tiles(0 if width else tokens),
            jax.ShapeDtypeStruct((batch, tokens if width else 0, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, tokens, width + COUNT_COLUMNS if width else 0), jnp.float32),
        ),
        vmap_method="sequential",
    )
    nothing = jnp.zeros(0, jnp.int32)

    def or_nothing(array: jax.Array | None) -> jax.Array:
        return nothing if array is None else array

    def bound(tokens: int | None) -> np.int64:
        return np.int64(-1 if tokens is None else min(tokens, 2**30))

    d_query, d_key, d_value, *_ = call(
        query,
        key,
        value,
        d_out,
        *rows,
        jnp.zeros(0, jnp.float32) if alibi_slopes is None else alibi_slopes,
        or_nothing(sequences.q_table),
        or_nothing(sequences.k_table),
        or_nothing(sequences.q_ranks),
        or_nothing(sequences.k_ranks),
        or_nothing(sequences.num_seqs),
        *(
            (*blocks.of_keys, *blocks.of_queries, blocks.bits)
            if isinstance(blocks, Blocks)
            else [nothing] * 5
        ),
        *((*blocks.of_keys, *blocks.of_queries) if isinstance(blocks, Layout) else [nothing] * 4),
        heads_first=heads_first,
        ordered=ordered,
        left=bound(left),
        right=bound(right),
        offset=np.int64(offset),
        block_q=np.int64(blocks.block_q if blocks else 0),
        block_kv=np.int64(blocks.block_kv if blocks else 0),
        heads_together=np.int64(min(kv_heads, HEADS_TOGETHER)),
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
    )
    return d_query, d_key, d_value
