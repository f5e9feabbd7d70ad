"""Names of array dimensions, and the annotations built from them.

Legend, used in every signature, docstring and error message:

| name | meaning |
|---|---|
| num_seqs | sequences in the batch |
| num_tokens | tokens of all sequences, laid end to end |
| num_heads | query heads |
| num_kv_heads | key/value heads; num_heads is a multiple of it (GQA, MQA) |
| q_len | query tokens of a sequence (more than one when decoding speculatively) |
| head_dim | elements of one head's query, key or value |
| num_pages | pages in a cache pool |
| page_size | tokens a page holds |
| max_pages | columns of a block table: pages a sequence may have |

The annotations are jaxtyping's. They are enforced in tests only, so jaxtyping is not needed at run time:
without it they fall back to plain `jax.Array`.
"""

from typing import TYPE_CHECKING, Any, Literal

import jax

Layout = Literal["NHD", "HND", "PACKED"]
"""A page's dimensions: "NHD" [page_size, num_kv_heads, head_dim], "HND" [num_kv_heads, page_size, head_dim], or
"PACKED" (vLLM's x-packed cache, x = 16 bytes of elements): keys [num_kv_heads, head_dim/x, page_size, x] and values
[num_kv_heads, head_dim, page_size]."""

if TYPE_CHECKING:
    type Query = jax.Array
    type NewKV = jax.Array
    type KVCache = jax.Array
    type BlockTables = jax.Array
    type SeqLens = jax.Array
    type SlotMapping = jax.Array
    type Lse = jax.Array
else:
    try:
        from jaxtyping import Float, Int, Num

        Query = Float[jax.Array, "num_seqs *q_len num_heads head_dim"]
        NewKV = Float[jax.Array, "num_tokens num_kv_heads head_dim"]
        KVCache = Num[jax.Array, "num_pages ..."]
        BlockTables = Int[jax.Array, "num_seqs max_pages"]
        SeqLens = Int[jax.Array, "num_seqs"]
        SlotMapping = Int[jax.Array, "num_tokens"]
        Lse = Float[jax.Array, "num_seqs *q_len num_heads"]
    except ImportError:
        Query = NewKV = KVCache = BlockTables = SeqLens = SlotMapping = Lse = Any
