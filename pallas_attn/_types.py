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

from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import numpy as np

Layout = Literal["NHD", "HND", "PACKED"]
"""A page's dimensions: "NHD" [page_size, num_kv_heads, head_dim], "HND" [num_kv_heads, page_size, head_dim], or
"PACKED" (vLLM's x-packed cache, x = 16 bytes of elements): keys [num_kv_heads, head_dim/x, page_size, x] and values
[num_kv_heads, head_dim, page_size]."""

Implementation = Literal["pallas", "triton", "xla", "interpret"]
"""The names that every op's `implementation` takes, beside None, which chooses."""

ImplementationOrCuda = Literal["cuda", Implementation]
"""The same for ops that also have a CUDA kernel."""

FloatName = Literal["bfloat16", "float16", "float32"]
Fp8Name = Literal["float8_e4m3fn", "float8_e5m2"]

if TYPE_CHECKING:

    class _HasDtype(Protocol):
        @property
        def dtype(self) -> np.dtype: ...

    type Dtype = type[Any] | np.dtype[Any] | _HasDtype
    """`jnp.bfloat16` or `jnp.dtype("bfloat16")`; beside it, functions take the names that they serve."""
    type Array = jax.Array
    """Of an op's operands; inside a kernel, the ref to it."""
    type Query = jax.Array
    type NewKV = jax.Array
    type KVCache = jax.Array
    type BlockTables = jax.Array
    type SeqLens = jax.Array
    type SlotMapping = jax.Array
    type Lse = jax.Array
else:
    Dtype = Array = Any
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
