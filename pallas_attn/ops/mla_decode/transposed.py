"""The walk over tokens with both products transposed, for 32 query rows by one warpgroup, or 64 by two, on Hopper.

    S^T [tokens, rows] = K [tokens, 576] Q^T          O^T [dims, rows] += V^T [dims, tokens] P^T

Hopper's asynchronous products need 64 rows or more. Here tokens and dims are the rows, and query rows the columns, of
which 32 suffice. The four warps read a product's operands from shared memory once together, where in warp-level
products (`kernel.py`) each warp reads them: 0.28 MB a tile including writes, instead of 0.54.

The reference of the exponentials is only updated once a logit exceeds it by 8 (base 2; an idea of FlashAttention-4). So
a typical tile needs no maximum over tokens, which takes shuffles and a barrier, and no rescaling of O, just one vote.

With two warpgroups, each computes all of a tile's tokens for half of the rows, and half of the dims of O for all rows.

Some details are due to Triton's compiler:

- The softmax and the second product are in a branch that is always taken. Triton issues the next tile's copies before a
  branch, but after everything else: with two buffers they would start when the tile's work is done. Logits are scaled
  before the branch: Triton 3.6 cannot pipeline a product that is used only in a branch.
- With two warpgroups logits are masked in a branch of their own, and the rotary product is scaled before it is added.
  Where Triton sees that one product feeds another, it puts all warps along the first side, and with 64 tokens the
  second warpgroup would repeat the first one's work.
- Queries are transposed before the loop. Triton 3.9 writes an operand to shared memory at its transposition: in the
  loop that would happen for every tile, from registers that the accumulators need.
- Page ids are masked to the bits that they may have, and row offsets are sums of single bits (`_row_offsets`), so that
  the address of each copy is a shared register plus a constant. Otherwise 36 addresses cost a thread hundreds of a
  tile's cycles, and registers.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.sizes import next_power_of_2
from pallas_attn._tile import masking, pages, softmax, triton
from pallas_attn._tile.latents import LATENT_DIM, ROPE_DIM
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.problem import Problem

# Each block of query rows reads latents once, so other data should stay in the L2.
LATENTS = "evict_first"
# The largest weight before the exponentials' reference is updated; it still fits in fp16.
MOST = np.float32(2**8)
# before the first tile: not above any logit, and its difference to -inf is not NaN
LOWEST = np.finfo(np.float32).min
WARPGROUP = 4  # warps


def walk_tokens(
    query: Sequence[jax.Array],
    refs: Operands,
    seq,
    kv_head,
    begin,
    end,
    row_end,
    problem: Problem,
) -> tuple[softmax.OnlineSoftmax, jax.Array]:
    """As `kernel._walk_tokens`, of queries [block_q, 512] and [block_q, 64], a pool [num_pages, elements], and tiles
    inside a page."""
    pool, config = problem.pool, problem.config
    block_q, block_kv, page_size = config.block_q, config.block_kv, pool.page_size
    one_warpgroup = config.num_warps == WARPGROUP
    token = jnp.arange(block_kv)
    last_column = jnp.maximum(end - 1, 0) // page_size
    columns = [rows.T for rows in query]

    def page_of(first, last) -> jax.Array:
        return pages.look_up(refs.block_tables, seq, jnp.minimum(first // page_size, last))

    def read(first, page, held) -> list[jax.Array]:
        # The upper bits are 0 anyway; the mask tells the compiler that offsets are not negative.
        page = jnp.where(masking.usable_pages(page, pool.num_pages), page, 0)
        page &= next_power_of_2(pool.num_pages) - 1
        width = pool.num_kv_heads * pool.head_dim
        slot = 0 if block_kv == page_size else first % page_size & page_size - block_kv
        start = slot * width + kv_head * pool.head_dim

        def elements(first_dim: int, size: int) -> jax.Array:
            place = (_row_offsets(block_kv, width)[:, None] + (first_dim + jnp.arange(size)[None, :])) + start
            mask = jnp.broadcast_to(held, place.shape)
            where = refs.latent_cache.at[jnp.broadcast_to(page, place.shape), place]
            return triton.load(where, mask=mask, other=0.0, eviction_policy=LATENTS)

        return [elements(0, LATENT_DIM), elements(LATENT_DIM, ROPE_DIM)]

    def step(i, carry):
        state, bad, page = carry
        first = begin + i * block_kv
        next_page = page_of(first + block_kv, last_column)
        bad |= ~masking.usable_pages(page, pool.num_pages)
        held = masking.within(token, end - first)[:, None]
        keys = read(first, page, held)
        products, factor = map(triton.dot, keys, columns), problem.scale * softmax.LOG2_E  # base 2

        def masked(logits: jax.Array) -> jax.Array:
            visible = held
            if row_end is not None:
                visible &= masking.within((first + token)[:, None], row_end[None, :])
            return masking.apply(logits, visible)

        if one_warpgroup:
            logits = triton.rounded(functools.reduce(jnp.add, products) * factor)
        else:
            logits = functools.reduce(jnp.add, [product * factor for product in products])
            logits = lax.cond(first + block_kv <= unmasked_end, lambda x: x, masked, logits)

        def taken_in() -> softmax.OnlineSoftmax:
            return _take_in(state, masked(logits) if one_warpgroup else logits, keys[0])

        return lax.cond(first < end, taken_in, lambda: state), bad, next_page

    unmasked_end = end if row_end is None else jnp.minimum(end, jnp.min(row_end))
    # Transposed: rows are last.
    start = softmax.OnlineSoftmax(
        jnp.full((block_q,), LOWEST, jnp.float32),
        jnp.zeros((block_kv, block_q), jnp.float32),
        jnp.zeros((LATENT_DIM, block_q), jnp.float32),
    )
    num_tiles = (end - begin + block_kv - 1) // block_kv
    carry = (start, jnp.bool_(False), page_of(begin, problem.max_pages - 1))
    state, bad, _ = lax.fori_loop(0, num_tiles, step, carry)
    return softmax.OnlineSoftmax(state.maximum, jnp.sum(state.total, axis=0), (state.acc.T,)), bad


def _take_in(state: softmax.OnlineSoftmax, logits: jax.Array, values: jax.Array) -> softmax.OnlineSoftmax:
    """The state with a tile added; its `maximum` is a reference set by some earlier maximum."""
    reference, total, acc = state
    weights = triton.exp2(logits - reference[None, :])

    def followed():
        maximum = jnp.maximum(reference, jnp.max(logits, axis=0))
        decay = triton.exp2(reference - maximum)[None, :]
        return maximum, total * decay, acc * decay, triton.exp2(logits - maximum[None, :])

    # Not `> MOST`: NaN in one row must not keep the others from updating.
    far = ~(_largest(weights) <= MOST)
    reference, total, acc, weights = lax.cond(far, followed, lambda: (reference, total, acc, weights))
    acc += triton.dot(values.T, weights.astype(values.dtype))
    return softmax.OnlineSoftmax(reference, total + weights, acc)


def _largest(tile: jax.Array) -> jax.Array:
    """The maximum of a product's result, of which a thread holds four neighbouring pairs of columns.

    For 32 columns it is taken over those pairs, then over tokens, then over columns: reduced at once, Triton 3.6 has
    every thread read the result from shared memory, and ptxas spills in the loop around it. 64 columns belong to two
    warpgroups, which would have to synchronise in each of the three steps.
    """
    if tile.shape[1] == 64:
        return jnp.max(tile.reshape(-1))
    return jnp.max(jnp.max(jnp.max(tile.reshape(tile.shape[0], -1, 8), axis=1), axis=0))


def _row_offsets(count: int, stride: int) -> jax.Array:
    """stride * arange(count), summed bit by bit: bits that differ between a thread's rows, not between threads, become
    constants."""
    index = jnp.arange(2)
    while index.size < count:
        index = ((jnp.arange(2) * index.size)[:, None] + index[None, :]).reshape(-1)
    # Multiplied last, so that Triton sees multiples of 64 elements, as 16-byte copies need.
    return index * stride
