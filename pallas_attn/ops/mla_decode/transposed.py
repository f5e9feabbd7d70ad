"""The walk over tokens with both products transposed, for 32 query rows by one warpgroup, or 64 by two, on Hopper.

    S^T [tokens, rows] = K [tokens, 576] Q^T          O^T [dims, rows] += V^T [dims, tokens] P^T

Hopper's asynchronous products have 64 rows or more. Here tokens and dims are those rows, and query rows are columns, of
which 32 will do. A product's operands are read from shared memory once by all four warps, where warp-level products
(`kernel.py`) read what they share once a warp: 0.28 MB a tile with the writes, not 0.54.

What exponentials are relative to follows the maximum only once a logit is 2**8 above it (an idea of FlashAttention-4).
So a usual tile has no maximum over tokens, which takes shuffles and a barrier, and no rescaling of O: one vote instead.

With two warpgroups each has all of a tile's tokens for half of the rows, and half of the dims of O for all of them.

Some things are as they are for the sake of Triton's compiler:

- The softmax and the second product are in a branch that is always taken. Triton puts the next tile's copies before a
  branch, but behind everything else: with two buffers they would begin when the tile's work is done. Logits are scaled
  before it: Triton 3.6 cannot pipeline a product that is used in the branch alone.
- With two warpgroups logits are masked, or not, in a branch of their own, and the rotary ones are added scaled. Where
  Triton sees that one product feeds another, it has all warps along its first side, and of 64 tokens the second
  warpgroup would only repeat what the first computes.
- Queries are transposed before the loop. Triton 3.9 writes what a loop's product reads to shared memory where it is
  transposed: in every tile, from registers that the accumulators need.
- Page ids lose bits that none has, and row offsets come from sums of single bits (`_row_offsets`). So the address of a
  copy is a register that all copies share plus a constant. Else 36 addresses take a thread hundreds of a tile's cycles,
  and registers.
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

# Latents are read once by each block of query rows: what else is in L2 is worth more.
LATENTS = "evict_first"
# How large a weight may be before what exponentials are relative to follows. It still fits in fp16.
MOST = np.float32(2**8)
LOWEST = np.finfo(np.float32).min  # before the first tile: below no logit, and with a difference to -inf
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
        # All but the lowest bits are 0 anyway. Now the compiler knows that offsets are not negative.
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
        products, factor = map(triton.dot, keys, columns), problem.scale * softmax.LOG2_E

        def masked(logits2: jax.Array) -> jax.Array:
            visible = held
            if row_end is not None:
                visible &= masking.within((first + token)[:, None], row_end[None, :])
            return masking.apply(logits2, visible)

        if one_warpgroup:
            logits2 = triton.rounded(functools.reduce(jnp.add, products) * factor)
        else:
            logits2 = functools.reduce(jnp.add, [product * factor for product in products])
            logits2 = lax.cond(first + block_kv <= unmasked_end, lambda x: x, masked, logits2)

        def taken_in() -> softmax.OnlineSoftmax:
            return _take_in(state, masked(logits2) if one_warpgroup else logits2, keys[0])

        return lax.cond(first < end, taken_in, lambda: state), bad, next_page

    unmasked_end = end if row_end is None else jnp.minimum(end, jnp.min(row_end))
    # Transposed: rows are the last dimension.
    start = softmax.OnlineSoftmax(
        jnp.full((block_q,), LOWEST, jnp.float32),
        jnp.zeros((block_kv, block_q), jnp.float32),
        jnp.zeros((LATENT_DIM, block_q), jnp.float32),
    )
    num_tiles = (end - begin + block_kv - 1) // block_kv
    carry = (start, jnp.bool_(False), page_of(begin, problem.max_pages - 1))
    state, bad, _ = lax.fori_loop(0, num_tiles, step, carry)
    return softmax.OnlineSoftmax(state.maximum, jnp.sum(state.total, axis=0), (state.acc.T,)), bad


def _take_in(state: softmax.OnlineSoftmax, logits2: jax.Array, values: jax.Array) -> softmax.OnlineSoftmax:
    """The state with a tile, whose `maximum` is a reference that some earlier maximum set."""
    reference, total, acc = state
    weights = triton.exp2(logits2 - reference[None, :])

    def followed():
        maximum = jnp.maximum(reference, jnp.max(logits2, axis=0))
        decay = triton.exp2(reference - maximum)[None, :]
        return maximum, total * decay, acc * decay, triton.exp2(logits2 - maximum[None, :])

    # Not `> MOST`: NaN in one row must not keep the others from following.
    far = ~(_largest(weights) <= MOST)
    reference, total, acc, weights = lax.cond(far, followed, lambda: (reference, total, acc, weights))
    acc += triton.dot(values.T, weights.astype(values.dtype))
    return softmax.OnlineSoftmax(reference, total + weights, acc)


def _largest(tile: jax.Array) -> jax.Array:
    """The maximum of a product's result, of which a thread has four neighbouring pairs of columns.

    Of 32 columns over those first, then over tokens, and over columns at last: Triton 3.6 reduces all at once to one
    element that every thread then reads from shared memory, and ptxas has threads store and load registers in the loop
    around it. 64 columns are of two warpgroups, which would meet in each of the three steps.
    """
    if tile.shape[1] == 64:
        return jnp.max(tile.reshape(-1))
    return jnp.max(jnp.max(jnp.max(tile.reshape(tile.shape[0], -1, 8), axis=1), axis=0))


def _row_offsets(count: int, stride: int) -> jax.Array:
    """stride * arange(count), added up bit by bit: the bits that differ from row to row within a thread, not between
    threads, are constants to the compiler then."""
    index = jnp.arange(2)
    while index.size < count:
        index = ((jnp.arange(2) * index.size)[:, None] + index[None, :]).reshape(-1)
    # Multiplied at last, so that Triton sees that all are multiples of 64 elements, as copies of 16 bytes need.
    return index * stride
