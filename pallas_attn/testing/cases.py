"""Named shapes. One list feeds tests, benchmarks and tuning."""

import dataclasses

from pallas_attn._tile.masking import LocalStride

SHORT_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8",
}


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One call of `paged_attention`: a query token per sequence of the given lengths.

    `config` overrides fields of the kernel's config, e.g. (("num_splits", 4), ("block_kv", 32)).
    """

    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    layout: str = "NHD"
    spare_pages: int = 3
    """Columns of the block table, and pages of the pool, beyond what the lengths need."""
    config: tuple[tuple[str, int], ...] = ()
    q_len: int = 1
    cache_dtype: str | None = None
    """None: as `dtype`. An 8-bit dtype comes with scales."""
    scale_per_head: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    block_sparse: LocalStride | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def id(self) -> str:
        parts = [
            f"b{self.num_seqs}",
            f"q{self.num_heads}kv{self.num_kv_heads}",
            f"d{self.head_dim}",
            f"p{self.page_size}",
            SHORT_DTYPE[self.dtype],
        ]
        if self.layout != "NHD":
            parts.append(self.layout.lower())
        if self.cache_dtype:
            parts.append(f"kv{SHORT_DTYPE[self.cache_dtype]}" + ("ph" if self.scale_per_head else ""))
        if self.q_len > 1:
            parts.append(f"sq{self.q_len}")
        if self.sliding_window:
            parts.append(f"w{self.sliding_window}")
        if self.softcap:
            parts.append(f"cap{self.softcap:g}")
        if self.block_sparse:
            p = self.block_sparse
            parts.append(
                f"bs{p.block_size}l{p.local_blocks}v{p.vert_stride}s{p.head_sliding_step}t{p.tp_rank}"
            )
        parts += [name for name in ("alibi", "sinks") if getattr(self, name)]
        parts += [f"{name.removeprefix('num_')}{value}" for name, value in self.config]
        return "-".join(parts)


def boundary_lengths(page_size: int, split: int = 256) -> tuple[int, ...]:
    """Lengths at which paging and splitting go wrong: 0, 1, around a page and a split, a prime, several splits."""
    return (0, 1, page_size - 1 or 2, page_size, page_size + 1, split - 1, split + 1, 89, 3 * split + 5)


def decode_cases() -> list[DecodeCase]:
    """Every head size, page size, dtype, layout and kind of grouping of `paged_attention`, each at least once,
    with one split and with several."""
    splits = (("num_splits", 4),)
    cases = [
        # head sizes, with page sizes going round
        DecodeCase(boundary_lengths(8), 4, 2, 32, 8),
        DecodeCase(boundary_lengths(16), 4, 2, 64, 16, config=splits),
        DecodeCase(boundary_lengths(32), 6, 2, 80, 32, config=splits),
        DecodeCase(boundary_lengths(64), 4, 4, 96, 64),
        DecodeCase(boundary_lengths(128), 4, 1, 112, 128, config=splits),
        DecodeCase(boundary_lengths(16), 2, 1, 120, 16),
        DecodeCase(boundary_lengths(16), 8, 2, 128, 16, config=splits),
        DecodeCase(boundary_lengths(16), 2, 1, 192, 16, config=splits),
        DecodeCase(boundary_lengths(32), 2, 2, 256, 32),
        # head counts and groups
        DecodeCase(boundary_lengths(16), 1, 1, 64, 16, config=splits),
        DecodeCase(boundary_lengths(16), 9, 3, 64, 16, config=splits),
        DecodeCase(boundary_lengths(16), 7, 1, 64, 16),
        DecodeCase(boundary_lengths(16), 63, 9, 32, 16, config=splits),
        DecodeCase(boundary_lengths(16), 126, 1, 64, 16, config=splits),
        DecodeCase(boundary_lengths(16), 128, 8, 32, 16),
        # the other dtypes and layout; page sizes that are no power of two, and 1
        DecodeCase(boundary_lengths(16), 8, 2, 128, 16, "float16", "HND", config=splits),
        DecodeCase(boundary_lengths(16), 4, 2, 64, 16, "float32", config=splits),
        DecodeCase(boundary_lengths(64), 4, 2, 80, 64, "float32", "HND"),
        DecodeCase(boundary_lengths(8), 4, 4, 64, 8, "bfloat16", "HND", config=splits),
        DecodeCase(boundary_lengths(1), 4, 2, 64, 1, "float16", config=splits),
        DecodeCase(boundary_lengths(24), 4, 2, 64, 24, config=splits),
        # tiles larger and smaller than a page
        DecodeCase(boundary_lengths(16), 4, 2, 64, 16, config=(("block_kv", 128), ("num_splits", 3))),
        DecodeCase(boundary_lengths(128), 4, 2, 64, 128, config=(("block_kv", 16), ("num_splits", 3))),
        # more splits than are merged at once
        DecodeCase(
            (2011, 40), 2, 1, 32, 16, config=(("block_kv", 16), ("num_splits", 128), ("min_split_tokens", 16))
        ),
    ]
    return cases


def feature_cases() -> list[DecodeCase]:
    """Every option of `paged_attention` alone, where it matters most, and in the combinations that meet in practice."""
    lengths, splits = boundary_lengths(16), (("num_splits", 4),)
    long = (0, 1, 63, 64, 700, 1029)
    tiles = (("block_kv", 32), *splits)
    return [
        # quantised caches
        DecodeCase(lengths, 8, 2, 64, 16, cache_dtype="float8_e4m3fn", config=splits),
        DecodeCase(lengths, 8, 2, 80, 16, cache_dtype="float8_e5m2", scale_per_head=True),
        DecodeCase(
            lengths, 8, 2, 64, 32, "float16", "HND", cache_dtype="int8", scale_per_head=True, config=splits
        ),
        DecodeCase(lengths, 4, 2, 64, 16, "float32", cache_dtype="float8_e4m3fn"),
        # PACKED
        DecodeCase(lengths, 8, 2, 128, 16, "bfloat16", "PACKED", config=splits),
        DecodeCase(lengths, 8, 2, 80, 8, "float32", "PACKED"),
        DecodeCase(lengths, 8, 2, 64, 16, "bfloat16", "PACKED", cache_dtype="float8_e4m3fn", config=splits),
        DecodeCase(lengths, 4, 4, 112, 32, "float16", "PACKED", cache_dtype="int8"),
        # several query tokens; lengths below q_len included
        DecodeCase(lengths, 8, 2, 64, 16, q_len=2, config=splits),
        DecodeCase(lengths, 6, 2, 64, 16, "float32", q_len=5),
        DecodeCase(lengths, 32, 1, 64, 16, q_len=4, config=splits),
        # windows
        DecodeCase(long, 4, 2, 64, 16, sliding_window=100, config=splits),
        DecodeCase(long, 4, 2, 64, 16, sliding_window=1),
        DecodeCase(long, 4, 2, 64, 32, "float32", q_len=3, sliding_window=130, config=splits),
        DecodeCase(long, 4, 2, 64, 16, sliding_window=5000),
        # soft cap, ALiBi, sinks
        DecodeCase(lengths, 4, 2, 64, 16, softcap=2.0, config=splits),
        DecodeCase(lengths, 12, 3, 64, 16, "float32", alibi=True, config=splits),
        DecodeCase(lengths, 4, 2, 64, 16, alibi=True, q_len=3),
        DecodeCase(lengths, 4, 2, 64, 16, sinks=True, config=splits),
        DecodeCase(lengths, 4, 2, 64, 16, "float32", sinks=True, q_len=2),
        # block-sparse: one pattern for all heads, one for each KV head, one for each query head; tensor parallel
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(64, 2, 4), config=tiles),
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(32, 1, 3, -1), config=tiles),
        DecodeCase(long, 8, 2, 64, 32, "float32", block_sparse=LocalStride(64, 1, 8, 1), config=tiles),
        DecodeCase(
            long, 8, 2, 64, 16, block_sparse=LocalStride(16, 3, 8, 2, tp_rank=1), config=(("block_kv", 16),)
        ),
        DecodeCase(
            long, 6, 1, 64, 16, block_sparse=LocalStride(64, 1, 5, 3), config=(("block_kv", 16), *splits)
        ),
        DecodeCase(long, 4, 2, 64, 16, block_sparse=LocalStride(64, 1, 1), config=tiles),
        DecodeCase(long, 4, 2, 64, 16, q_len=3, block_sparse=LocalStride(32, 2, 4, 1), config=tiles),
        DecodeCase(long, 4, 2, 64, 16, sliding_window=300, block_sparse=LocalStride(32, 1, 4), config=tiles),
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
        ),
    ]
