"""Calls of `blocksparse_attention`, and their layouts."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np

from pallas_attn._tile.masking import LocalStride
from pallas_attn.ops.blocksparse_attention import builders
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout

PHI3_SMALL = LocalStride(block_size=64, local_blocks=16, vert_stride=8, head_sliding_step=1)
"""Phi-3-small's pattern: a band of 16 blocks of 64 and every eighth block, another eighth for each head."""


@dataclasses.dataclass(frozen=True)
class BlockSparseCase:
    """One call: sequences (q_len, k_len), a pattern, and where the keys lie.

    pattern: a `LocalStride`, "dense", "window" (of 3/2 blocks) or the live fraction of random blocks, by head.
    page_size: of keys in pages, or None for keys in rows.
    padding: tokens after the last sequence.
    config: fields of the kernel's config.
    """

    op: ClassVar[str] = "blocksparse_attention"

    lens: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: Any
    block_size: int = 32
    q_block_size: int = 32
    _: dataclasses.KW_ONLY
    dtype: str = "bfloat16"
    page_size: int | None = None
    cache_layout: str = "NHD"
    padding: int = 0
    softcap: float | None = None
    config: tuple[tuple[str, int], ...] = ()

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def max_len(self) -> int:
        return max(1, *(k_len for _, k_len in self.lens))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(k_len for _, k_len in self.lens)

    @property
    def rows(self) -> int:
        """Query rows of a KV head, on average."""
        return sum(q_len for q_len, _ in self.lens) * self.group // self.num_seqs

    @property
    def num_seqs(self) -> int:
        return len(self.lens)

    @property
    def q_len(self) -> int:
        """Queries of the sequence that has most."""
        return max((q_len for q_len, _ in self.lens), default=0)

    @property
    def id(self) -> str:
        pattern = self.pattern
        if isinstance(pattern, LocalStride):
            pattern = f"local{pattern.local_blocks}stride{pattern.vert_stride}step{pattern.head_sliding_step}"
        lens = ["_".join(f"{q}of{k}" for q, k in self.lens)]
        if len(self.lens) > 7 and len(set(self.lens)) == 1:
            lens = [f"{len(self.lens)}x{self.lens[0][0]}of{self.lens[0][1]}"]
        parts = [*lens, f"q{self.num_heads}kv{self.num_kv_heads}"]
        parts += [
            f"d{self.head_dim}",
            f"{pattern:.4g}" if isinstance(pattern, float) else str(pattern),
            f"b{self.q_block_size}x{self.block_size}",
            self.dtype,
        ]
        parts += [f"p{self.page_size}{self.cache_layout}"] if self.page_size else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        return "-".join([*parts, *(f"{name}{value}" for name, value in self.config)])


@functools.cache
def random_blocks(case: BlockSparseCase) -> np.ndarray:
    """[heads, rows, blocks] of a random pattern; the first row sees nothing in the first head."""
    rows, blocks = (math.ceil(case.max_len / size) for size in (case.q_block_size, case.block_size))
    mask = np.random.default_rng(7).random((case.num_heads, rows, blocks)) < case.pattern
    mask[0, 0] = False
    return mask


def layout_of(case: BlockSparseCase) -> SparseLayout:
    sizes = {"block_size": case.block_size, "q_block_size": case.q_block_size}
    if case.pattern == "dense":
        layout = builders.dense_causal(case.max_len, **sizes)
    elif case.pattern == "window":
        layout = builders.sliding_window(case.block_size * 3 // 2, case.max_len, **sizes)
    elif isinstance(case.pattern, LocalStride):
        heads = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
        layout = builders.local_stride(case.pattern, case.max_len, **heads, q_block_size=case.q_block_size)
    else:
        layout = builders.from_block_mask(random_blocks(case), **sizes)
    return layout
