"""The calls that tuning and benchmarks are about: one type for each op, and the cells of benchmarks.

`pallas-attn tune` measures such cases, too, with the sizes it is given.
"""

import functools
import itertools
from typing import Any

import numpy as np

from pallas_attn.testing.case import (
    SHORT_DTYPE,
    Case,
    DecodeCase,
    MLADecodeCase,
    RaggedCase,
    SparseMLACase,
    SparsePrefillCase,
)

__all__ = [
    "SHORT_DTYPE",
    "Case",
    "DecodeCase",
    "MLADecodeCase",
    "RaggedCase",
    "SparseMLACase",
    "SparsePrefillCase",
    "cells",
    "served",
]


def cells(op: str) -> list[Case]:
    """Those of the READMEs' tables, of sizes as served: 47 of paged_attention, 58 of mla_decode."""
    return [case for case in (*_paged_cells(), *_mla_cells(), *_ragged_cells()) if case.op == op]


def served(
    num_seqs: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    **options: Any,
) -> DecodeCase:
    """Sequences of equal length whose block table is full; `options` are DecodeCase's other fields."""
    sizes = (num_heads, num_kv_heads, head_dim, page_size)
    return DecodeCase((num_tokens,) * num_seqs, *sizes, lengths=f"s{num_tokens}", spare_pages=0, **options)


LONG = (1024, 8192, 32768)


def _paged_cells() -> list[DecodeCase]:
    """Four head counts, 1 to 256 sequences, as far as 80 GB suffice."""
    heads = [(32, 8), (64, 8), (8, 1), (32, 32)]
    return [
        served(num_seqs, tokens, *shape, 128, 16)
        for shape, num_seqs, tokens in itertools.product(heads, (1, 16, 64, 256), LONG)
        if 2 * 2 * num_seqs * tokens * shape[1] * 128 < 80e9
    ]


def _mla_cells() -> list[MLADecodeCase]:
    """The cells of FlashMLA's own benchmark (128 sequences), and serving with few requests."""
    varied = np.random.default_rng(0).normal(4096, 2048, 128).clip(2, None).astype(int)
    lengths = {f"s{n}": (n,) * 128 for n in (1024, 4096, 8192, 16384)}
    lengths["normal4096"] = tuple(varied.tolist())
    cells = [(name, *sizes) for name, *sizes in itertools.product(lengths.items(), (16, 32, 64, 128), (1, 2))]
    cells += [
        ((f"s{n}", (n,) * b), heads, 1) for b, n, heads in itertools.product((1, 4, 8), LONG, (16, 128))
    ]
    return [
        MLADecodeCase(
            seq_lens,
            heads,
            q_len=q_len,
            causal=q_len > 1,
            lengths=name,
            spare_pages=0,
        )
        for (name, seq_lens), heads, q_len in cells
    ]


def _ragged_cells() -> list[RaggedCase]:
    """Prompts whole and continued, and decoding beside them: {name: (tokens of each context, new tokens)}."""
    contexts, news = (
        (0, 8192, 1000, 4096, 333, 6144, 2048, 7777),
        (512, 733, 1024, 1291, 1536, 1801, 2048, 900),
    )
    cells = {
        "1x16384": ((0,), (16384,)),
        "2048on30720": ((30720,), (2048,)),
        "ragged8": (contexts, news),
        "64decodes2prompts": ((4095,) * 64 + (0, 0), (1,) * 64 + (2048, 2048)),
        "512on32256": ((32256,), (512,)),
        "64x8192": ((8191,) * 64, (1,) * 64),
    }
    plain = [_ragged_cell(name, *sizes) for name, sizes in cells.items()]
    windows = [_ragged_cell("1x32768", (0,), (32768,), sliding_window=window) for window in (None, 4096)]
    continued = functools.partial(_ragged_cell, "2048on30720", *cells["2048on30720"])
    caches = [continued(cache_dtype=dtype) for dtype in ("float8_e4m3fn", "int8")]
    heads = [
        continued(32, 8, head_dim, 16, value_dim=value_dim)
        for head_dim, value_dim in ((64, None), (96, None), (192, 128), (256, None))
    ]
    return [*plain, *windows, *caches, *heads]


def _ragged_cell(
    name: str, contexts: tuple[int, ...], news: tuple[int, ...], *sizes: int, **options: Any
) -> RaggedCase:
    lens = tuple(context + new for context, new in zip(contexts, news, strict=True))
    num_heads, num_kv_heads, head_dim, page_size = sizes or (32, 8, 128, 16)
    return RaggedCase(
        lens, num_heads, num_kv_heads, head_dim, page_size, q_lens=news, lengths=name, padding=0, spare_seqs=0,
        spare_pages=0, **options,
    )  # fmt: skip
