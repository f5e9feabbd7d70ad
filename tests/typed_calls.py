"""Calls as users write them, read by `test_types.py` and never run: a type checker finds what the comments say, and
nothing else. `is: T` is the type of the line's call, `refused: NAME` an error that names what is wrong."""

from typing import Any, reveal_type

import jax
import jax.numpy as jnp

import pallas_attn as pa
from pallas_attn import nn


def calls(x: jax.Array, flag: bool, layout: pa.SparseLayout, **sizes: Any) -> None:
    # fmt: off
    reveal_type(pa.flash_attention(x, x, x))  # is: Array
    reveal_type(pa.flash_attention(x, x, x, return_lse=False, causal=True))  # is: Array
    reveal_type(pa.flash_attention(x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.flash_attention(x, x, x, return_lse=flag))  # is: Array | tuple[Array, Array]
    reveal_type(pa.dot_product_attention(x, x, x, is_causal=True))  # is: Array
    reveal_type(pa.dot_product_attention(x, x, x, return_residual=True))  # is: tuple[Array, Array]
    reveal_type(pa.paged_attention(x, x, x, x, x))  # is: Array
    reveal_type(pa.paged_attention(x, x, x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.ragged_paged_attention(x, x, x, x, x, x))  # is: Array
    reveal_type(pa.ragged_paged_attention(x, x, x, x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.prefix_prefill(x, x, x, x, x, x, x, x, 3))  # is: Array
    reveal_type(pa.prefix_prefill(x, x, x, x, x, x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.mla_prefill(x, x, x, x, x, key_up=x, value_up=x))  # is: Array
    reveal_type(pa.mla_prefill(x, x, x, x, x, key_up=x, value_up=x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.mla_decode(x, x, x, x))  # is: Array
    reveal_type(pa.mla_decode(x, x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.sparse_mla_decode(x, x, x))  # is: Array
    reveal_type(pa.sparse_mla_decode(x, x, x, return_lse=True))  # is: tuple[Array, Array]
    reveal_type(pa.blocksparse_attention(x, x, x, layout))  # is: Array
    reveal_type(pa.blocksparse_attention(x, x, x, layout, return_lse=True))  # is: tuple[Array, Array]

    # Names that there are.
    pa.flash_attention(x, x, x, implementation="triton", layout="BNTH")
    pa.mla_decode(x, x, x, x, implementation="cuda")
    pa.blocksparse_attention(x, x, x, layout, implementation="cuda", cache_layout="HND")
    pa.ragged_paged_attention(x, x, x, x, x, x, layout="PACKED", out_dtype=jnp.float8_e4m3fn)
    pa.ragged_paged_attention(x, x, x, x, x, x, out_dtype="float8_e5m2")
    nn.PagedAttention(implementation="interpret")
    pa.PagedKVCache.create(**sizes, block_tables=x, dtype="int8")

    # Names that there are not, for the op or for any.
    pa.flash_attention(x, x, x, implementation="mosaic")  # refused: mosaic
    pa.flash_attention(x, x, x, implementation="triton", layout="NHD")  # refused: NHD
    pa.dot_product_attention(x, x, x, implementation="cudnn")  # refused: cudnn
    pa.paged_attention(x, x, x, x, x, implementation="cuda")  # refused: cuda
    pa.paged_attention(x, x, x, x, x, layout="BTNH")  # refused: BTNH
    pa.ragged_paged_attention(x, x, x, x, x, x, out_dtype="fp8")  # refused: fp8
    pa.mla_prefill(x, x, x, x, x, key_up=x, value_up=x, form="absorb")  # refused: absorb
    pa.mla_decode(x, x, x, x, implementation="flash_mla")  # refused: flash_mla
    pa.sparse_mla_decode(x, x, x, addressing="pages")  # refused: pages
    pa.sparse_mla_prefill(x, x, x, implementation="jax")  # refused: jax
    pa.blocksparse_attention(x, x, x, layout, cache_layout="BTNH")  # refused: BTNH
    pa.write_kv(x, x, x, x, x, implementation="cuda")  # refused: cuda
    pa.write_latents(x, x, x, scales="power of two")  # refused: power of two
    pa.flash_mla_sparse_fwd(x, x, x, 1.0, implementation="flashmla")  # refused: flashmla
    pa.convert_layout(x, x, source="NHD", target="NDH")  # refused: NDH
    pa.PagedKVCache.create(**sizes, block_tables=x, dtype="fp8")  # refused: fp8
    nn.PagedAttention(implementation="cuda")  # refused: cuda
