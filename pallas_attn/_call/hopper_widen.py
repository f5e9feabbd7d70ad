"""16-bit rows of what long prompts see in 8-bit pages: a CUDA kernel of csrc/attention/widen, called through XLA's FFI.

The forward kernel converts what it reads of such pages for each tile of 128 rows of queries again. Of sequences with
many tiles it takes less time to write keys and values once, 16 bits a number, and to read them as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.hopper_forward import Sequences

TARGET = "pallas_attn_attention_widen_sm90"
LEAST_ROWS = 1024
"""Rows (queries times heads of a KV head) from which on it takes less time: eight tiles. To move three bytes for each
number of 128 keys and their values takes 25 ns of all multiprocessors, to convert them in a tile another 4 ns."""
LEAST_PAIRS, TILE = 8192, 128
"""Pairs of TILE rows and TILE keys, of all heads and all such sequences: two launches more, and two ends of a kernel,
are some 20 us, and of these pairs a causal mask leaves half."""
ELEMENT_BYTES = 2
MOST = 2**31 - 1


class Widened(NamedTuple):
    """key, value: [1, kv_heads, tokens, dim] of the query's dtype, for the sequences that are taken.
    q_table, k_table: [1, num_seqs, 3], where those have their queries and rows; the others have none.
    taken: int32 [num_seqs], whether a sequence is.
    """

    key: jax.Array
    value: jax.Array
    q_table: jax.Array
    k_table: jax.Array
    taken: jax.Array

    @property
    def sequences(self) -> Sequences:
        return Sequences(q_table=self.q_table, k_table=self.k_table)


def room(
    budget: int, *, kv_heads: int, dims: int, query_tokens: int, group: int, num_seqs: int, max_len: int
) -> int:
    """Tokens for which rows are given room, `budget` bytes of them at most; 0: no sequence can be taken.

    dims: elements of a key and its value; max_len: tokens that a row of the block table has room for.
    """
    most_taken = min(num_seqs, query_tokens * group // LEAST_ROWS)
    most_pairs = (query_tokens * group // TILE + most_taken) * -(-max_len // TILE)
    if most_pairs * kv_heads < LEAST_PAIRS:
        return 0
    fits = budget // (kv_heads * dims * ELEMENT_BYTES)
    return min(fits, most_taken * max_len, MOST // max(num_seqs, kv_heads))


def widen(
    key_cache: jax.Array,
    value_cache: jax.Array,
    sequences: Sequences,
    *,
    window: jax.Array,
    dtype: jnp.dtype,
    tokens: int,
    query_tokens: int,
    group: int,
    heads_first: bool,
) -> Widened:
    """Sequences with LEAST_ROWS and more are taken in order, as long as what they see fits in `tokens`; none, if they
    have fewer than LEAST_PAIRS.

    Lengths that cannot be right are not. What a page outside the pool would hold is NaN in keys and 0 in values. vmap
    calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    heads = key_cache.shape[1 if heads_first else 2]
    num_seqs = sequences.count(1)
    table = jax.ShapeDtypeStruct((1, num_seqs, 3), jnp.int32)
    call = jax.ffi.ffi_call(
        TARGET,
        (
            jax.ShapeDtypeStruct((1, heads, tokens, key_cache.shape[-1]), dtype),
            jax.ShapeDtypeStruct((1, heads, tokens, value_cache.shape[-1]), dtype),
            table,
            table,
            jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
        ),
        vmap_method="sequential",
    )
    made = call(
        key_cache,
        value_cache,
        sequences.block_tables,
        sequences.seq_lens,
        sequences.q_bounds,
        sequences.num_seqs,
        window,
        heads_first=heads_first,
        q_tokens=np.int64(query_tokens),
        group=np.int64(group),
        least_rows=np.int64(LEAST_ROWS),
        least_pairs=np.int64(-(-LEAST_PAIRS // heads)),
    )
    return Widened(*made)
