"""Named shapes. One list feeds tests, benchmarks and tuning."""

import dataclasses

SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


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
    ]
    return cases
