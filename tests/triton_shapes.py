"""One call or two of every op, whose kernels are compiled for GPUs that are not there by implementation "triton"."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lowered_modules
import lowering

import pallas_attn
from pallas_attn import PagedKVCache, SparseLayout

struct = jax.ShapeDtypeStruct
# Tables, lengths, and where tokens of a sequence begin.
LENGTHS = [struct(sizes, jnp.int32) for sizes in ((4, 64), (4,), (5,))]


def flash(
    dim: int,
    *,
    implementation: str,
    device: tuple[str, int],
    bias: bool = False,
    documents: bool = False,
    **options: Any,
) -> Any:
    """The kernels of the gradients too."""

    def loss(query, key, value, bias, ids):
        out = pallas_attn.flash_attention(
            query, key, value, bias=bias, segment_ids=ids, implementation=implementation, **options
        )
        return out.astype(jnp.float32).sum()

    query, keys = (struct((2, 2048, heads, dim), jnp.bfloat16) for heads in (8, 2))
    added = struct((1, 8, 2048, 2048), jnp.bfloat16) if bias else None
    asked = (0, 1, 3) if bias else (0, 1)
    ids = struct((2, 2048), jnp.int32) if documents else None
    return lowering.lower_for_gpu(jax.grad(loss, asked), query, keys, keys, added, ids, device=device)


def ragged(dim: int, tokens: int, *, implementation: str, device: tuple[str, int], **options: Any) -> Any:
    call = functools.partial(pallas_attn.ragged_paged_attention, implementation=implementation, **options)
    query, pool = struct((tokens, 8, dim), jnp.bfloat16), struct((900, 16, 2, dim), jnp.bfloat16)
    return lowering.lower_for_gpu(call, query, pool, pool, *LENGTHS, device=device)


def blocksparse(dim: int, tokens: int, *, implementation: str, device: tuple[str, int]) -> Any:
    """The kernels of the gradients too, whose forward pass has no kernel for single queries."""
    layout = SparseLayout(struct((1, 129), jnp.int32), struct((1, 900), jnp.int32), 64, 64)

    def attend(query, keys, layout, ends):
        return pallas_attn.blocksparse_attention(
            query, keys, keys, layout, cu_q_lens=ends, cu_k_lens=ends, implementation=implementation
        )

    def loss(*operands):
        return attend(*operands).astype(jnp.float32).sum()

    def both(*operands):
        return attend(*operands), jax.grad(loss, (0, 1))(*operands)

    query, keys = (struct((tokens, heads, dim), jnp.bfloat16) for heads in (8, 2))
    ends = struct((5,), jnp.int32)
    return lowering.lower_for_gpu(both, query, keys, layout, ends, device=device)


def growing(
    dim: int, layout: str, cache_dtype: str, *, implementation: str | None, device: tuple[str, int]
) -> Any:
    """Written where pages have scales of their own."""
    sizes = dict(num_layers=2, num_pages=9, page_size=24, num_kv_heads=3, head_dim=dim, layout=layout)

    def empty() -> Any:
        tables = jnp.zeros((4, 2), jnp.int32)
        stored = jnp.dtype(cache_dtype)
        return PagedKVCache.create(**sizes, block_tables=tables, dtype=stored, scale_per_page=True)

    def call(cache, new, positions):
        return cache.write(1, new, new, positions, implementation=implementation)

    new, positions = struct((4, 5, 3, dim), jnp.bfloat16), struct((4, 5), jnp.int32)
    return lowering.lower_for_gpu(call, jax.eval_shape(empty), new, positions, device=device)


POOL = struct((900, 64, 1, 656), jnp.uint8)


def latents(*, implementation: str, device: tuple[str, int]) -> Any:
    """Written, and read whole."""

    def call(new, pool, slots, query, tables, lens):
        pool = pallas_attn.write_latents(new, pool, slots, implementation=implementation)
        return pallas_attn.mla_decode(query, pool, tables, lens, implementation=implementation)

    new, query = (struct(shape, jnp.bfloat16) for shape in ((4, 576), (4, 1, 16, 576)))
    lengths = [struct(sizes, jnp.int32) for sizes in ((4, 64), (4,))]
    return lowering.lower_for_gpu(call, new, POOL, struct((4,), jnp.int32), query, *lengths, device=device)


def sparse(heads: int, *, implementation: str, device: tuple[str, int]) -> Any:
    call = functools.partial(pallas_attn.sparse_mla_decode, implementation=implementation)
    query, ids = struct((4, 2, heads, 576), jnp.bfloat16), struct((4, 2, 2048), jnp.int32)
    return lowering.lower_for_gpu(call, query, POOL, ids, device=device)


def sparse_prefill(width: int, *, implementation: str, device: tuple[str, int]) -> Any:
    call = functools.partial(pallas_attn.sparse_mla_prefill, implementation=implementation)
    query, ids = struct((1024, 128, 576), jnp.bfloat16), struct((1024, 1, 2048), jnp.int32)
    pool = struct((9000, 1, width), jnp.uint8 if width == POOL.shape[-1] else jnp.bfloat16)
    return lowering.lower_for_gpu(call, query, pool, ids, device=device)


def prefix(*, implementation: str, device: tuple[str, int]) -> Any:
    call = functools.partial(pallas_attn.prefix_prefill, implementation=implementation)
    query, keys = (struct((1024, heads, 128), jnp.bfloat16) for heads in (8, 2))
    pool = struct((900, 16, 2, 128), jnp.float8_e4m3fn)
    return lowering.lower_for_gpu(call, query, keys, keys, pool, pool, *LENGTHS, device=device)


def latent_prefill(*, implementation: str, device: tuple[str, int]) -> Any:
    """The absorbed form. The projected one has kernels as prefix's, also of latents of 656 bytes."""

    def call(query, pool, key_up, value_up, *lengths):
        options = dict(key_up=key_up, value_up=value_up, form="absorbed", implementation=implementation)
        return pallas_attn.mla_prefill(query, pool, *lengths, **options)

    query, pool = struct((1024, 16, 192), jnp.bfloat16), struct((900, 64, 1, 576), jnp.bfloat16)
    up = struct((16, 128, 512), jnp.bfloat16)
    return lowering.lower_for_gpu(call, query, pool, up, up, *LENGTHS, device=device)


# Of all architectures, and with options of all kinds.
BROAD: dict[str, tuple[Callable[..., Any], tuple[int, ...], dict[str, Any]]] = {
    "paged": (lowered_modules.paged, (64, 512, 32, 8, 128, 16), {"cache_dtype": "float8_e5m2"}),
    "rules": (
        lowered_modules.paged,
        (4, 256, 32, 8, 128, 16),
        {"sliding_window": 1024, "softcap": 30.0, "alibi": True, "sinks": True, "q_len": 2},
    ),
    "packed": (
        lowered_modules.paged,
        (4, 256, 32, 8, 128, 16),
        {"dtype": "float16", "layout": "PACKED", "cache_dtype": "int8"},
    ),
    "mla": (lowered_modules.mla, (128, 64, 64, 1, 1, 64), {"num_parts": 132}),
    "write": (lowered_modules.write, (64, 3, 80, 100, 16), {"layout": "NHD", "cache_dtype": "float8_e5m2"}),
    "flash": (flash, (64,), {"causal": True}),
}
# Of sm_90.
OTHERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], dict[str, Any]]] = {
    "ragged": (ragged, (64, 1024), {"softcap": 30.0}),
    "bias": (flash, (64,), {"bias": True}),
    "documents": (flash, (128,), {"causal": True, "documents": True}),
    "blocksparse": (blocksparse, (64, 1024), {}),
    "growing": (growing, (80, "PACKED", "int8"), {}),
    "latents": (latents, (), {}),
    "mla of 32 rows": (lowered_modules.mla, (128, 64, 32, 1, 1, 64), {}),
    "sparse": (sparse, (128,), {}),
    "sparse of 16 heads": (sparse, (16,), {}),
    "sparse prefill": (sparse_prefill, (576,), {}),
    "sparse prefill fp8": (sparse_prefill, (656,), {}),
    "prefix": (prefix, (), {}),
    "latent prefill": (latent_prefill, (), {}),
}
SHAPES = BROAD | OTHERS
# Their kernels for short sequences, and those that merge, are ragged's.
MAIN = {"prefix": "_ragged_attention", "latent prefill": "_ragged_attention"}
