"""Calls of ops beside those of lowered_modules.py, whose modules are compared: every option, both directions, configs
given. A call is a function and what is traced, by name: so that neither depends on how an op is written."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import lowering

import pallas_attn
from pallas_attn import SparseLayout
from pallas_attn.ops.ragged_attention.config import RaggedTiles

struct = jax.ShapeDtypeStruct
BF16, F32, I32, I8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
E4M3 = jnp.float8_e4m3fn
type Arrays = dict[str, Any]
type Row = tuple[Callable[..., Any], Arrays, dict[str, Any]]
"""A public function; what is traced, by argument; what is not."""

DECODE = pallas_attn.PagedAttentionConfig(block_q=16, block_kv=32, num_splits=4)
LATENT = pallas_attn.MLADecodeConfig(
    block_q=16, block_kv=32, num_splits=4, num_warps=4, min_split_tokens=128, target_programs=64
)
CHOSEN = [pallas_attn.SparseMLAConfig(16, 32, splits, num_warps=4) for splits in (1, 4)]
LONG = RaggedTiles(block_q=64, block_kv=64, num_splits=1, num_warps=4, num_stages=3)
CUT = RaggedTiles(block_q=64, block_kv=64, num_splits=4, num_warps=4, num_stages=3)
SHORT = RaggedTiles(block_q=16, block_kv=32, num_splits=0, num_warps=4, num_stages=3)
RAGGED = pallas_attn.RaggedAttentionConfig(long=LONG, short=SHORT)
CUT_RAGGED = pallas_attn.RaggedAttentionConfig(long=CUT, short=SHORT)
ALONE = pallas_attn.RaggedAttentionConfig(long=CUT, short=None)


def _pools(layout: str, stored: Any, dim: int = 64, value_dim: int | None = None, heads: int = 2) -> Arrays:
    x, width = 16 // jnp.dtype(stored).itemsize, value_dim or dim
    key, value = {
        "NHD": ((900, 16, heads, dim), (900, 16, heads, width)),
        "HND": ((900, heads, 16, dim), (900, heads, 16, width)),
        "PACKED": ((900, heads, dim // x, 16, x), (900, heads, width, 16)),
    }[layout]
    return {"key_cache": struct(key, stored), "value_cache": struct(value, stored)}


def _floats(*shape: int) -> Any:
    return struct(shape, F32)


def paged() -> Iterator[Row]:
    def row(
        arrays: Arrays, *, layout: str = "NHD", stored: Any = BF16, q_len: int = 1, **options: Any
    ) -> Row:
        base = {
            "query": struct((9, q_len, 8, 64), BF16),
            **_pools(layout, stored),
            "block_tables": struct((9, 52), I32),
            "seq_lens": struct((9,), I32),
        }
        return pallas_attn.paged_attention, base | arrays, dict(layout=layout, return_lse=True) | options

    tree = {"tree_mask": struct((9, 5, 5), jnp.bool_)}
    placed = tree | {"query_positions": struct((9, 5), I32)}
    window = {"sliding_window": struct((), I32)}
    heads = {"alibi_slopes": _floats(8), "sinks": _floats(8)}
    by_page = {"k_scale": _floats(900, 2), "v_scale": _floats(900, 2)}
    yield row(tree, q_len=5, config=DECODE)
    yield row(placed | heads, q_len=5, sliding_window=100, config=DECODE)
    yield row(placed | window | heads, q_len=5, softcap=20.0)
    yield row(window, config=DECODE)
    yield row(window | by_page, stored=E4M3, layout="HND", config=DECODE)
    yield row(by_page | heads, stored=I8, layout="PACKED", q_len=2)
    yield row(
        {"k_scale": _floats(2), "v_scale": _floats(900, 2)} | window | placed | heads, stored=E4M3, q_len=5
    )
    yield row(heads, batch_invariant=True)
    yield row({}, batch_invariant=True, stored=I8)


def mla() -> Iterator[Row]:
    def row(stored: Any = BF16, **options: Any) -> Row:
        width = 656 if stored == jnp.uint8 else 576
        arrays = {
            "query": struct((8, 2, 16, 576), BF16),
            "latent_cache": struct((900, 64, 1, width), stored),
            "block_tables": struct((8, 12), I32),
            "seq_lens": struct((8,), I32),
        }
        return pallas_attn.mla_decode, arrays, dict(return_lse=True) | options

    yield row(causal=True, batch_invariant=True)
    yield row(jnp.uint8, causal=True)
    yield row(jnp.uint8, config=LATENT)


def sparse() -> Iterator[Row]:
    def row(arrays: Arrays, *, stored: Any = BF16, heads: int = 16, **options: Any) -> Row:
        width = 656 if stored == jnp.uint8 else 576
        base = {
            "query": struct((4, 2, heads, 576), BF16),
            "latent_cache": struct((900, 64, 1, width), stored),
            "indices": struct((4, 2, 2048), I32),
        }
        return pallas_attn.sparse_mla_decode, base | arrays, dict(return_lse=True) | options

    tables, lengths = {"block_tables": struct((4, 64), I32)}, {"topk_length": struct((4,), I32)}
    sinks = {"sinks": _floats(16)}
    for config in (*CHOSEN, None):
        yield row({}, config=config)
        yield row(tables | lengths | sinks, addressing="positions", config=config)
    yield row(sinks, stored=jnp.uint8, config=CHOSEN[1])
    yield row(lengths, stored=jnp.uint8, heads=128)
    yield row(tables, heads=128, addressing="positions")

    def prefill(arrays: Arrays, *, stored: Any = BF16, heads: int = 128, **options: Any) -> Row:
        base = {
            "query": struct((1024, heads, 576), BF16),
            "latents": struct((9000, 1, 656 if stored == jnp.uint8 else 576), stored),
            "indices": struct((1024, 1, 2048), I32),
        }
        return pallas_attn.sparse_mla_prefill, base | arrays, options

    yield prefill({})
    yield prefill(lengths | {"topk_length": struct((1024,), I32)}, stored=jnp.uint8)
    yield prefill(sinks, heads=16, config=CHOSEN[0])


def _ragged(tokens: int, layout: str, stored: Any, dim: int, value_dim: int | None, num_seqs: int) -> Arrays:
    return {
        "query": struct((tokens, 8, dim), BF16),
        **_pools(layout, stored, dim, value_dim),
        "block_tables": struct((num_seqs, 64), I32),
        "seq_lens": struct((num_seqs,), I32),
        "cu_q_lens": struct((num_seqs + 1,), I32),
    }


OPTIONS = {
    "heads": {"alibi_slopes": _floats(8), "sinks": _floats(8)},
    "by page": {"k_scale": _floats(900, 2), "v_scale": _floats(900, 2)},
    "scaled": {"k_scale": _floats(2), "v_scale": _floats(2)},
    "window": {"sliding_window": struct((), I32)},
    "count": {"num_seqs": struct((), I32)},
}


def ragged() -> Iterator[Row]:
    def row(
        *names: str, tokens: int = 256, layout: str = "NHD", stored: Any = BF16, dim: int = 64,
        value_dim: int | None = None, num_seqs: int = 4, tree: int = 0, **options: Any,
    ) -> Row:  # fmt: skip
        arrays = _ragged(tokens, layout, stored, dim, value_dim, num_seqs)
        for name in names:
            arrays |= OPTIONS[name]
        if tree:
            arrays["tree_mask"] = struct((tokens, tree), jnp.bool_)
            arrays["query_positions"] = struct((tokens,), I32)
        return pallas_attn.ragged_paged_attention, arrays, dict(layout=layout, return_lse=True) | options

    for config in (RAGGED, CUT_RAGGED, ALONE, None):
        yield row("count", config=config)
        yield row("heads", "window", softcap=30.0, config=config)
    yield row("scaled", stored=E4M3, layout="HND", config=CUT_RAGGED)
    yield row("by page", "heads", stored=I8, layout="PACKED", config=CUT_RAGGED)
    yield row("by page", "window", stored=E4M3, config=RAGGED)
    yield row("heads", tree=8, sliding_window=100, config=CUT_RAGGED)
    yield row("window", tree=8)
    yield row(dim=192, value_dim=128, causal=False)
    yield row(tokens=64, num_seqs=64)
    yield row(out_dtype="float8_e4m3fn", out_scale=2.0, config=CUT_RAGGED)


def prefix() -> Iterator[Row]:
    def row(
        *names: str, tokens: int = 256, layout: str = "NHD", stored: Any = BF16, tree: int = 0,
        out: bool = False, **options: Any,
    ) -> Row:  # fmt: skip
        arrays = _ragged(tokens, layout, stored, 64, None, 4)
        arrays |= dict.fromkeys(("key", "value"), struct((tokens, 2, 64), BF16))
        for name in names:
            arrays |= OPTIONS[name]
        if tree:
            arrays["tree_mask"] = struct((tokens, tree), jnp.bool_)
        if out:
            arrays["out"] = struct((tokens, 8, 64), BF16)
        return pallas_attn.prefix_prefill, arrays, dict(layout=layout, return_lse=True) | options

    for config in (RAGGED, CUT_RAGGED, None):
        yield row("count", config=config)
        yield row("scaled", "heads", stored=E4M3, out=True, config=config)
        yield row("window", out=True, skip_decode=True, config=config)
    yield row("by page", stored=I8, layout="HND", skip_decode=True, config=RAGGED)
    yield row(tree=8, config=CUT_RAGGED)

    def latents(form: str, stored: Any = BF16) -> Row:
        width = 656 if stored == jnp.uint8 else 576
        arrays = {
            "query": struct((1024, 16, 192), BF16),
            "latent_cache": struct((900, 64, 1, width), stored),
            "block_tables": struct((4, 64), I32),
            "seq_lens": struct((4,), I32),
            "cu_q_lens": struct((5,), I32),
            "key_up": struct((16, 128, 512), BF16),
            "value_up": struct((16, 128, 512), BF16),
        }
        return pallas_attn.mla_prefill, arrays, dict(form=form, return_lse=True)

    yield latents("absorbed")
    yield latents("projected")
    yield latents("projected", jnp.uint8)


def _gradients(function: Callable[..., Any], asked: tuple[str, ...]) -> Callable[..., Any]:
    """Of a sum of all results."""

    def summed(floats: Arrays, **others: Any) -> Any:
        return sum(jnp.sum(result.astype(F32)) for result in jax.tree.leaves(function(**floats, **others)))

    def differentiated(**operands: Any) -> Any:
        floats = {name: operands.pop(name) for name in asked if name in operands}
        return jax.grad(summed)(floats, **operands)

    return differentiated


def _both(
    function: Callable[..., Any], asked: tuple[str, ...], arrays: Arrays, options: Any
) -> Iterator[Row]:
    yield function, arrays, options
    yield _gradients(function, asked), arrays, options


def flash() -> Iterator[Row]:
    asked = ("query", "key", "value", "bias", "sinks")

    def row(
        arrays: Arrays, *, dim: int = 64, length: int = 512, dtype: Any = BF16, **options: Any
    ) -> Iterator[Row]:
        def tokens(heads: int) -> Any:
            order = (heads, length) if options.get("layout") == "BNTH" else (length, heads)
            return struct((2, *order, dim), dtype)

        base = {"query": tokens(8), "key": tokens(2), "value": tokens(2)} | arrays
        yield from _both(pallas_attn.flash_attention, asked, base, dict(return_lse=True) | options)

    tiles = pallas_attn.FlashAttentionConfig(
        **{
            kernel: pallas_attn.ops.flash_attention.config.FlashAttentionTiles(64, 64, 4, 2)
            for kernel in pallas_attn.ops.flash_attention.config.KERNELS
        }
    )
    bias, mask = {"bias": struct((1, 8, 512, 512), BF16)}, {"mask": struct((2, 1, 1, 512), jnp.bool_)}
    sinks, ids = {"sinks": _floats(8)}, {"segment_ids": struct((2, 512), I32)}
    for config in (tiles, None):
        yield from row({}, causal=True, config=config)
        yield from row(sinks | ids, causal=True, softcap=30.0, config=config)
        yield from row(bias | mask, layout="BNTH", config=config)
    yield from row({}, dim=128, causal=True, sliding_window=100, dtype=jnp.float16)
    yield from row(bias | mask | sinks | ids, causal=True)


def blocksparse() -> Iterator[Row]:
    layout = SparseLayout(struct((1, 129), I32), struct((1, 900), I32), 64, 64)
    asked = ("query", "key", "value")
    tiles = pallas_attn.BlockSparseConfig(block_q=64, block_kv=64, num_warps=4)

    def row(tokens: int, arrays: Arrays, keys: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
        base = {"query": struct((tokens, 8, 64), BF16), "layout": layout}
        base |= dict.fromkeys(("key", "value"), struct(keys, BF16))
        return pallas_attn.blocksparse_attention, asked, base | arrays, dict(return_lse=True) | options

    ends = {name: struct((5,), I32) for name in ("cu_q_lens", "cu_k_lens")}
    for config in (tiles, None):
        yield from _both(*row(1024, ends, (2048, 2, 64), config=config))
    yield from _both(*row(1024, {"cu_k_lens": ends["cu_k_lens"]}, (1024, 2, 64), softcap=30.0))
    tables = {"block_tables": struct((4, 64), I32), "seq_lens": struct((4,), I32)}
    decoding = row(4, {"cu_k_lens": ends["cu_k_lens"]}, (2048, 2, 64))
    paged = row(1024, tables | {"cu_q_lens": ends["cu_q_lens"]}, (900, 16, 2, 64))
    for function, _, arrays, options in (decoding, paged):
        yield function, arrays, options


def writes() -> Iterator[Row]:
    def row(layout: str, stored: Any, scales: Arrays) -> Row:
        arrays = {
            "key": struct((64, 2, 64), BF16),
            "value": struct((64, 2, 64), BF16),
            **_pools(layout, stored),
        }
        arrays["slot_mapping"] = struct((64,), I32)
        return pallas_attn.write_kv, arrays | scales, dict(layout=layout)

    yield row("NHD", I8, OPTIONS["scaled"])
    yield row("HND", E4M3, OPTIONS["by page"])


OPS = {
    "paged": paged, "mla": mla, "sparse": sparse, "ragged": ragged, "prefix": prefix, "flash": flash,
    "blocksparse": blocksparse, "write": writes,
}  # fmt: skip


def calls() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(name, tag, what lowers it by an implementation)."""
    for op, rows in OPS.items():
        for i, (function, arrays, options) in enumerate(rows()):
            yield f"{op} more {i}", op, functools.partial(_lower, function, arrays, options)


def _lower(
    function: Callable[..., Any], arrays: Arrays, options: dict[str, Any], *, implementation: str
) -> Any:
    def call(arrays: Arrays) -> Any:
        return function(**arrays, **options, implementation=implementation)

    return lowering.lower_for_gpu(call, arrays)
