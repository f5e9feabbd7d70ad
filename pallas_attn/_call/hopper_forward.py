"""The CUDA kernel of csrc/attention, called through XLA's FFI: attention over dense, packed or paged keys on Hopper."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import ffi
from pallas_attn._call.sizes import MAX_HEAD_DIM

TARGET = "pallas_attn_attention_forward_sm90"
DTYPES = (jnp.bfloat16, jnp.float16)
CACHE_DTYPES = (jnp.float8_e4m3fn, jnp.int8)
"""Of pages, beside the query's own."""
TILE_ROWS = 128
"""Rows of a tile (queries times heads of a KV head), at least, whatever the head_dim."""
NARROW_HEAD_DIM, NARROW_TILE_ROWS = 64, 192
"""Heads of at most so many elements may have tiles of so many rows."""
MOST_SEQS = 8192
FEW_TILES, MOST_PARTS = 264, 528
"""Tiles of all KV heads: twice the multiprocessors of a Hopper GPU (132); and parts of tiles that are split."""
L2_BYTES = 40 * 2**20
"""Bytes of keys and values that concurrent heads may reread: the L2 has 50 MB, of which other data takes some."""


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Where each sequence's queries and keys lie.

    q_bounds, k_bounds: [num_seqs + 1], sequences laid end to end; None: each batch entry is one sequence.
    block_tables, seq_lens: [num_seqs, max_pages] and [num_seqs] where keys lie in pages.
    q_table, k_table: [batch, documents, 3] (`segments.Documents.table`), documents whose tokens may lie anywhere in
        their batch entry; q_ranks, k_ranks: [batch, tokens], each token's document; None: no other's tokens lie between
        a document's.
    num_seqs: [1], how many sequences there are, of documents the most in a batch entry; None: all.
    new: (key, value) of the queries' own tokens, laid out like these, where pages hold only earlier tokens.
    taken: int32 [num_seqs], not 0 of sequences that another call serves: nothing of theirs is written.
    """

    q_bounds: jax.Array | None = None
    k_bounds: jax.Array | None = None
    block_tables: jax.Array | None = None
    seq_lens: jax.Array | None = None
    q_table: jax.Array | None = None
    k_table: jax.Array | None = None
    q_ranks: jax.Array | None = None
    k_ranks: jax.Array | None = None
    num_seqs: jax.Array | None = None
    new: tuple[jax.Array, jax.Array] | None = None
    taken: jax.Array | None = None

    def count(self, batch: int) -> int:
        if self.q_table is not None:
            return batch * self.q_table.shape[1]
        if self.block_tables is not None:
            return self.block_tables.shape[0]
        return batch if self.q_bounds is None else self.q_bounds.shape[0] - 1


def unsupported(
    dtype, head_dim: int, value_dim: int, group: int, num_seqs: int, cache_dtype=None
) -> str | None:
    """The reason why the kernel cannot serve such heads and sequences, or None; cache_dtype: None is the query's."""
    if dtype not in DTYPES:
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype).name}"
    own = cache_dtype is None or cache_dtype == dtype
    if not own and not any(cache_dtype == jnp.dtype(d) for d in CACHE_DTYPES):
        named = ", ".join(jnp.dtype(d).name for d in (dtype, *CACHE_DTYPES))
        return f"needs a cache of one of {named}, got {jnp.dtype(cache_dtype).name}"
    copied = 8 if own else 16  # elements of 16 bytes
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim > MAX_HEAD_DIM or dim % copied:
            return f"needs a {name} of at most {MAX_HEAD_DIM}, a multiple of {copied}, got {dim}"
    if group > TILE_ROWS:
        return f"needs at most {TILE_ROWS} query heads for a KV head, got {group}"
    if num_seqs > MOST_SEQS:
        return f"takes at most {MOST_SEQS} sequences, got {num_seqs}"
    return None


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequences: Sequences,
    *,
    window: jax.Array,
    scale: jax.Array,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    ends_aligned: bool = False,
    q_offset: int = 0,
    query_heads_first: bool = False,
    key_heads_first: bool = False,
    lse_heads_first: bool = False,
    base2_lse: bool = False,
    skip_rows: int = 0,
    sinks_without_keys: bool = False,
    keep: bool = False,
    kept: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """(out, lse), or with `keep` (out, the parts of lse, of `softmax.Lse`, a byte of out's lower bits).

    Args:
        query: [batch, tokens, heads, dim], or heads before tokens; key, value: likewise, or pools of pages.
        window: int32 [2], how many keys to the left and right of its position a query sees; negative: all.
        scale: float32 [1].
        key_scale, value_scale: of pools of CACHE_DTYPES, float32 [kv_heads] or [num_pages, kv_heads]; the former also
            of rows.
        ends_aligned: a sequence's last query is at its last key; otherwise query i is at key i + q_offset.
        lse_heads_first: lse is [batch, heads, tokens], else [batch, tokens, heads]; base2_lse: in base 2.
        skip_rows: sequences with at most this many rows (queries times heads of a KV head) are not written.
        sinks_without_keys: the sink counts for queries of sequences without keys, too.
        kept: (out, lse), written in place.

    vmap calls it once for each entry of the batch, sequentially.
    """
    ffi.register()
    batch = query.shape[0]
    tokens, heads = (query.shape[2], query.shape[1]) if query_heads_first else query.shape[1:3]
    kv_heads = key.shape[1 if key_heads_first else 2]
    num_seqs = sequences.count(batch)
    tile_tokens = TILE_ROWS // (heads // kv_heads)
    max_items = batch * (tokens // tile_tokens + 1)
    documents = sequences.q_table is not None
    if sequences.q_bounds is not None or documents:
        max_items += num_seqs + 2
    if documents:
        max_items = min(max_items, batch * tokens)  # each has a query of its document
    # Where there may be fewer tiles than multiprocessors, their keys are split into at most this many parts.
    of_prompts = sequences.block_tables is not None or (documents and sequences.q_ranks is None)
    split = of_prompts or max_items * kv_heads < FEW_TILES
    places = -(-MOST_PARTS // kv_heads) if split else 0
    narrow = max(query.shape[-1], value.shape[-1]) <= NARROW_HEAD_DIM
    most_rows = NARROW_TILE_ROWS if narrow else TILE_ROWS
    nothing = jnp.zeros(0, jnp.int32)
    before_kept = 18
    call = jax.ffi.ffi_call(
        TARGET,
        (
            *results(query, value, query_heads_first, lse_heads_first, keep),
            # Scratch: outputs, because a handler that allocates cannot be part of a command buffer.
            jax.ShapeDtypeStruct((4,), jnp.int32),
            jax.ShapeDtypeStruct((max_items + places, 8), jnp.int32),
            jax.ShapeDtypeStruct((places, 8), jnp.int32),
            jax.ShapeDtypeStruct((num_seqs + 3 if num_seqs > MOST_SEQS else 0,), jnp.int32),
            jax.ShapeDtypeStruct((places, kv_heads, most_rows, value.shape[-1]), jnp.float32),
            jax.ShapeDtypeStruct((places, kv_heads, most_rows, 2), jnp.float32),
        ),
        vmap_method="sequential",
        input_output_aliases=None if kept is None else {before_kept: 0, before_kept + 1: 1},
    )

    def or_nothing(array: jax.Array | None, empty: jax.Array = nothing) -> jax.Array:
        return empty if array is None else array

    def flat(array: jax.Array | None) -> jax.Array:
        return or_nothing(array).reshape(-1)

    new_key, new_value = sequences.new or (None, None)
    kept_out, kept_lse = kept or (None, None)
    operands = (
        query,
        key,
        value,
        flat(sequences.q_table if documents else sequences.q_bounds),
        flat(sequences.k_table if documents else sequences.k_bounds),
        flat(sequences.q_ranks),
        flat(sequences.k_ranks),
        or_nothing(sequences.block_tables, nothing.reshape(0, 0)),
        or_nothing(sequences.seq_lens),
        or_nothing(sequences.num_seqs),
        window,
        scale,
        or_nothing(sinks, jnp.zeros(0, jnp.float32)),
        or_nothing(alibi_slopes, jnp.zeros(0, jnp.float32)),
        or_nothing(key_scale, jnp.zeros(0, jnp.float32)),
        or_nothing(value_scale, jnp.zeros(0, jnp.float32)),
        or_nothing(new_key),
        or_nothing(new_value),
        or_nothing(kept_out),
        or_nothing(kept_lse),
        or_nothing(sequences.taken),
    )
    assert kept is None or operands[before_kept] is kept_out
    out, lse, rest, low, *_ = call(
        *operands,
        query_heads_first=query_heads_first,
        key_heads_first=key_heads_first,
        lse_heads_first=lse_heads_first,
        base2_lse=base2_lse,
        ends_aligned=ends_aligned,
        sinks_without_keys=sinks_without_keys,
        q_offset=np.int64(q_offset),
        bounds_step=np.int64(3 if documents else 1),
        seqs=np.int64(num_seqs),
        skip_rows=np.int64(skip_rows),
        keys_in_l2=np.int64(L2_BYTES // ((key.shape[-1] + value.shape[-1]) * key.dtype.itemsize)),
        softcap=np.float32(softcap or 0.0),
    )
    return (out, lse, rest, low) if keep else (out, lse)


def results(
    query: jax.Array, value: jax.Array, heads_first: bool, lse_heads_first: bool, keep: bool
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """out, lse and, empty unless `keep`, what a backward pass wants of them: see `forward`."""
    batch, *sides = query.shape[:3]
    out, lse = (*query.shape[:-1], value.shape[-1]), (batch, *sides)
    if heads_first != lse_heads_first:
        lse = (batch, *reversed(sides))
    kept_lse, kept_out = (lse, out) if keep else ((0,), (0,))
    return (
        jax.ShapeDtypeStruct(out, query.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
        jax.ShapeDtypeStruct(kept_lse, jnp.float32),
        jax.ShapeDtypeStruct(kept_out, jnp.int8),
    )


def heads_in_l2(kv_heads: int, bytes_of_head: int) -> int:
    """KV heads whose keys and values fit in the L2 together: they may run concurrently and reread them."""
    return math.gcd(kv_heads, 2 ** max(0, int(math.log2(max(1, L2_BYTES // max(1, bytes_of_head))))))
