"""The cases that numerics against float64 are asked for: boundary lengths, every option.

`fast` ones are a few that together touch every part of the kernel.
"""

import functools

from pallas_attn._tile.masking import LocalStride
from pallas_attn.testing.cases import Case, DecodeCase, MLADecodeCase, RaggedCase


def of(op: str) -> list[Case]:
    return [case for case in _all_cases() if case.op == op]


def boundary_lengths(page_size: int) -> tuple[int, ...]:
    """Lengths at which paging and splitting go wrong: 0, 1, around a page and a split, a prime, several splits."""
    split = 256
    return (0, 1, page_size - 1 or 2, page_size, page_size + 1, split - 1, split + 1, 89, 3 * split + 5)


@functools.cache
def _all_cases() -> tuple[Case, ...]:
    return (
        *_shapes_and_dtypes(),
        *_transposed_products(),
        *_options_of_paged_attention(),
        *_mla_tests(),
        *_ragged_tests(),
    )


def _shapes_and_dtypes() -> list[DecodeCase]:
    """Every head size, page size, dtype, layout and grouping of `paged_attention` at least once, with one split and
    with several."""
    splits = (("num_splits", 4),)
    return [
        # head sizes, with page sizes, head counts and groups going round
        DecodeCase(boundary_lengths(8), 63, 9, 32, 8),
        DecodeCase(boundary_lengths(24), 126, 1, 64, 24, config=splits),
        DecodeCase(boundary_lengths(32), 9, 3, 80, 32),
        DecodeCase(boundary_lengths(128), 4, 1, 112, 128),
        DecodeCase(boundary_lengths(16), 1, 1, 120, 16),
        DecodeCase(boundary_lengths(16), 8, 2, 128, 16, config=splits, fast=True),
        DecodeCase(boundary_lengths(16), 2, 1, 192, 16, config=splits),
        DecodeCase(boundary_lengths(32), 7, 1, 256, 32),
        # the other dtypes and layout; pages of one token
        DecodeCase(boundary_lengths(16), 8, 2, 128, 16, "float16", "HND"),
        DecodeCase(boundary_lengths(16), 4, 2, 64, 16, "float32", config=splits),
        DecodeCase(boundary_lengths(64), 4, 4, 96, 64, "float32", "HND"),
        DecodeCase(boundary_lengths(1), 128, 8, 32, 1, "float16"),
        # tiles larger and smaller than a page
        DecodeCase(
            boundary_lengths(16), 4, 2, 64, 16, config=(("block_kv", 128), ("num_splits", 3)), fast=True
        ),
        DecodeCase(boundary_lengths(128), 4, 2, 64, 128, config=(("block_kv", 16),)),
        # more splits than are merged at once
        DecodeCase(
            (2011, 40), 2, 1, 32, 16, config=(("block_kv", 16), ("num_splits", 128), ("min_split_tokens", 16))
        ),
    ]


def _transposed_products() -> list[DecodeCase]:
    """Programs of eight rows: every kind of cache, options that differ between rows, and several programs for a KV
    head."""
    lengths, splits, transposed = boundary_lengths(16), (("num_splits", 4),), (("block_q", 8),)
    long = (0, 1, 63, 64, 700, 1029)
    return [
        DecodeCase(
            lengths, 8, 2, 128, 16, cache_dtype="float8_e4m3fn", config=(*transposed, *splits), fast=True
        ),
        DecodeCase(lengths, 8, 2, 80, 16, cache_dtype="float8_e5m2", scale_per_head=True, config=transposed),
        DecodeCase(
            lengths,
            8,
            2,
            64,
            32,
            "float16",
            "HND",
            cache_dtype="int8",
            scale_per_page=True,
            config=transposed,
        ),
        DecodeCase(
            long, 4, 2, 64, 16, sinks=True, sliding_window=100, config=(*transposed, ("block_kv", 64))
        ),
        DecodeCase(
            long, 12, 2, 64, 16, "float32", q_len=3, sliding_window=130, config=(*transposed, *splits)
        ),
        DecodeCase(
            long, 8, 2, 64, 16, q_len=4, tree="positions", alibi=True, config=(*transposed, ("block_kv", 64))
        ),
        DecodeCase(
            long,
            8,
            2,
            64,
            16,
            "bfloat16",
            "PACKED",
            cache_dtype="float8_e4m3fn",
            scale_per_head=True,
            softcap=20.0,
            alibi=True,
            block_sparse=LocalStride(64, 2, 3, 1),
            config=(*transposed, *splits),
        ),
    ]


def _options_of_paged_attention() -> list[DecodeCase]:
    """Every option, alone or with unrelated ones, and all at once."""
    lengths, splits = boundary_lengths(16), (("num_splits", 4),)
    long = (0, 1, 63, 64, 700, 1029)
    small = (("block_kv", 32),)
    tiles = (*small, *splits)
    return [
        # quantised caches
        DecodeCase(lengths, 8, 2, 64, 16, cache_dtype="float8_e4m3fn", sinks=True, config=splits),
        DecodeCase(lengths, 8, 2, 80, 16, cache_dtype="float8_e5m2", scale_per_head=True),
        DecodeCase(lengths, 8, 2, 64, 32, "float16", "HND", cache_dtype="int8", scale_per_head=True),
        DecodeCase(lengths, 6, 2, 64, 16, "float32", q_len=5, cache_dtype="float8_e4m3fn"),
        DecodeCase(
            lengths, 8, 2, 64, 16, cache_dtype="float8_e4m3fn", scale_per_page=True, config=splits, fast=True
        ),
        DecodeCase(
            lengths, 4, 2, 64, 16, "float16", "PACKED", cache_dtype="int8", scale_per_page=True, softcap=20.0
        ),
        # PACKED; the window is longer than any sequence
        DecodeCase(long, 8, 2, 128, 16, "bfloat16", "PACKED", sliding_window=5000),
        DecodeCase(lengths, 8, 2, 80, 8, "float32", "PACKED", q_len=2, sinks=True),
        DecodeCase(
            lengths, 8, 2, 64, 16, "bfloat16", "PACKED", cache_dtype="float8_e4m3fn", config=splits, fast=True
        ),
        DecodeCase(lengths, 4, 4, 112, 32, "float16", "PACKED", q_len=3, cache_dtype="int8", alibi=True),
        # several query tokens; lengths below q_len included
        DecodeCase(lengths, 8, 2, 64, 16, q_len=2, config=splits, fast=True),
        DecodeCase(lengths, 32, 1, 64, 16, q_len=4, softcap=2.0),
        # windows
        DecodeCase(long, 4, 2, 64, 16, sliding_window=100, config=splits, fast=True),
        DecodeCase(long, 4, 2, 64, 16, sliding_window=1),
        DecodeCase(long, 4, 2, 64, 32, "float32", q_len=3, sliding_window=130, config=splits),
        # ALiBi
        DecodeCase(lengths, 12, 3, 64, 16, "float32", alibi=True),
        # block-sparse: one pattern for all heads, one for each KV head, one for each query head; tensor parallel
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(64, 2, 4), config=tiles),
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(32, 1, 3, -1), config=small),
        DecodeCase(long, 8, 2, 64, 32, "float32", block_sparse=LocalStride(64, 1, 8, 1), config=small),
        DecodeCase(
            long, 8, 2, 64, 16, block_sparse=LocalStride(16, 3, 8, 2, tp_rank=1), config=(("block_kv", 16),)
        ),
        DecodeCase(
            long, 6, 1, 64, 16, block_sparse=LocalStride(64, 1, 5, 3), config=(("block_kv", 16), *splits)
        ),
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(64, 1, 1), config=small),
        DecodeCase(long, 4, 2, 64, 16, q_len=3, block_sparse=LocalStride(32, 2, 4, 1), config=small),
        DecodeCase(long, 4, 2, 64, 16, sliding_window=300, block_sparse=LocalStride(32, 1, 4), config=tiles),
        # trees of drafts
        DecodeCase(lengths, 8, 2, 64, 16, q_len=7, tree="slots", config=splits, fast=True),
        DecodeCase(long, 4, 2, 64, 16, "float32", q_len=5, tree="positions", alibi=True, sliding_window=70),
        DecodeCase(
            long, 6, 1, 64, 16, q_len=4, tree="positions", block_sparse=LocalStride(32, 2, 4, 1), config=small
        ),
        # all at once
        DecodeCase(
            long,
            8,
            2,
            64,
            16,
            "bfloat16",
            "PACKED",
            cache_dtype="float8_e4m3fn",
            scale_per_head=True,
            q_len=2,
            sliding_window=600,
            softcap=20.0,
            alibi=True,
            sinks=True,
            block_sparse=LocalStride(64, 2, 3, 1),
            config=tiles,
            fast=True,
        ),
    ]


def _mla_tests() -> list[MLADecodeCase]:
    """Head counts, q_len, page sizes, dtypes and both ways to cut the work of `mla_decode`, each at least once."""
    splits = (("num_splits", 4), ("min_split_tokens", 128), ("target_programs", 64))
    transposed = (("block_q", 32), ("block_kv", 64), ("num_warps", 4), ("num_stages", 2))
    wide = (("block_q", 64), ("block_kv", 64), ("num_warps", 8), ("num_stages", 2))
    lens = (0, 1, 63, 64, 65, 255, 257, 521)
    return [
        MLADecodeCase(lens, 3, config=(*splits, ("block_kv", 16))),
        MLADecodeCase(lens, 16, num_parts=7, fast=True),
        MLADecodeCase(lens, 9, q_len=2, causal=True, config=splits, fast=True),
        MLADecodeCase(lens, 6, 2, q_len=4, causal=True, page_size=16, num_parts=13, fast=True),
        MLADecodeCase(lens, 4, q_len=4, page_size=32),
        MLADecodeCase(lens, 8, 4, page_size=16),
        MLADecodeCase(lens, 63, q_len=2, causal=True, page_size=16),
        MLADecodeCase(lens, 126, dtype="float16"),
        MLADecodeCase(lens, 4, q_len=2, causal=True, dtype="float32", page_size=24, num_parts=3),
        # products transposed
        MLADecodeCase(lens, 32, num_parts=7, config=transposed, fast=True),
        MLADecodeCase(
            lens, 30, 2, q_len=2, causal=True, page_size=128, dtype="float16", config=(*splits, *transposed)
        ),
        MLADecodeCase(lens, 64, num_parts=7, config=wide),
        MLADecodeCase(
            lens, 60, 2, q_len=4, causal=True, page_size=128, dtype="float16", config=(*splits, *wide)
        ),
        # tiles larger than a page, and larger than a block of the schedule
        MLADecodeCase(lens, 4, page_size=16, config=(("block_kv", 64),), fast=True),
        MLADecodeCase(lens, 1, page_size=128, num_parts=5, config=(("block_kv", 128), ("num_stages", 2))),
    ]


def _ragged_tests() -> list[RaggedCase]:
    """Every way to read a cache and every rule of `ragged_paged_attention`, each at least once."""
    # A chunk of a long prompt, no query, decoding, a whole prompt, queries before the start, decoding, a chunk.
    q_lens, lens = (17, 0, 1, 70, 7, 1, 33), (300, 40, 1, 70, 3, 129, 65)
    cut = (("num_splits", 3), ("min_split_tokens", 16), ("target_programs", 64))
    small = (("block_kv", 16),)
    return [
        RaggedCase(lens, 4, 2, 64, 16, q_lens=q_lens, config=cut, fast=True),
        RaggedCase(
            lens, 7, 1, 128, 1, q_lens=q_lens, cache_dtype="float8_e5m2", short=False, padding=0, spare_seqs=0,
            config=(("block_q", 64),),
        ),
        RaggedCase(lens, 6, 2, 80, 16, "float16", "HND", q_lens=q_lens, sliding_window=20, config=small),
        RaggedCase(lens, 3, 1, 192, 64, "float32", q_lens=q_lens, value_dim=128),
        RaggedCase(
            lens, 4, 4, 112, 24, "float32", q_lens=q_lens, causal=False, sliding_window=50, sinks=True, config=small
        ),
        RaggedCase(
            lens, 8, 2, 64, 16, "float16", "HND", q_lens=q_lens, cache_dtype="int8", scale_per_head=True, alibi=True
        ),
        RaggedCase(
            lens, 4, 2, 64, 16, q_lens=q_lens, cache_dtype="float8_e4m3fn", scale_per_page=True, config=cut, fast=True
        ),
        RaggedCase(
            lens, 4, 1, 256, 32, q_lens=q_lens, cache_dtype="int8", scale_per_page=True, softcap=9.0, config=small
        ),
        # trees: of 17 tokens, which are several blocks, and below; longer sequences are causal
        RaggedCase(lens, 4, 2, 64, 16, q_lens=q_lens, tree="slots", max_tree=17, config=cut, fast=True),
        RaggedCase(
            lens, 4, 2, 32, 16, "float32", q_lens=q_lens, tree="positions", max_tree=33, alibi=True,
            sliding_window=30, config=(*small, *cut),
        ),
        # all at once
        RaggedCase(
            lens, 8, 2, 64, 16, "bfloat16", "PACKED", q_lens=q_lens, value_dim=32, cache_dtype="float8_e4m3fn",
            scale_per_head=True, sliding_window=90, softcap=20.0, alibi=True, sinks=True, config=(*small, *cut),
            fast=True,
        ),
    ]  # fmt: skip
