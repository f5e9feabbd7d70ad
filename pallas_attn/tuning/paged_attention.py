"""What is tuned of `paged_attention`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from pallas_attn._call.device import current_device
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.paged_attention import paged_attention
from pallas_attn.ops.paged_attention.api import OP
from pallas_attn.ops.paged_attention.operands import Operands
from pallas_attn.testing.cases import DecodeCase, served
from pallas_attn.tuning.paged import PagedPoint, random_pool, random_query
from pallas_attn.tuning.points import Fields, named


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionPoint(PagedPoint):
    op: ClassVar = OP
    sizes: ClassVar = dict(
        num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", cache_dtype=None
    )

    case: DecodeCase

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[PagedAttentionPoint]":
        return [cls(case=served(num_seqs, max_len, **sizes))]

    @property
    def stored(self) -> str:
        return self.case.cache_dtype or self.case.dtype

    def abstract(self) -> Operands:
        case = self.case
        pool = self.struct((1, case.page_size, case.num_kv_heads, case.head_dim), self.stored)
        return Operands(
            query=self.struct((case.num_seqs, 1, case.num_heads, case.head_dim), case.dtype),
            key_cache=pool,
            value_cache=pool,
            block_tables=self.struct((case.num_seqs, case.max_pages)),
            seq_lens=self.struct((case.num_seqs,)),
            layout=case.layout,
            scale=1.0,
            rules=Rules(),
            batch_invariant=False,
            num_heads=case.num_heads,
        )

    def chosen(self, fields: Fields) -> Fields:
        """Programs and rows are left to the heuristic: an entry also serves numbers of streams that fill other waves,
        and of rows that fill other tiles."""
        follows = ("target_programs", "block_q")
        return {name: value for name, value in super().chosen(fields).items() if name not in follows}

    def candidates(self) -> list[Fields]:
        """Candidates that won somewhere in wider sweeps."""
        cores = current_device().num_cores
        # (block_kv, num_warps, num_stages)
        tiles = [(32, 4, 5), (32, 4, 7), (64, 4, 3), (64, 8, 5), (128, 4, 3), (128, 8, 3), (128, 8, 5)]
        least = [256]
        if self.max_len < 4096:
            least = [64]
        elif self.streams * self.max_len < 128 * cores:
            least = [64, 128]  # splits of 256 tokens would leave half the device without work
        elif self.streams * self.max_len < 256 * cores:
            least = [128, 256]
        sizes = named(("block_kv", "num_warps", "num_stages"), tiles)
        return self.distinct(dict(size, min_split_tokens=tokens) for size in sizes for tokens in least)

    def operands(self, num_pages: int, seq_lens: jax.Array) -> tuple[jax.Array, ...]:
        case = self.case
        pool = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
        query = random_query((case.num_seqs, case.num_heads, case.head_dim), case.dtype)
        return query, random_pool(pool, self.stored, 1), random_pool(pool, self.stored, 2)

    def call(
        self, operands: tuple[jax.Array, ...], table: jax.Array, seq_lens: jax.Array, **options: Any
    ) -> Any:
        if self.case.cache_dtype:
            scale = 1 / 40 if self.stored == "int8" else 1.0
            options |= dict(k_scale=scale, v_scale=scale)
        query, keys, values = operands
        return paged_attention(query, keys, values, table, seq_lens, return_lse=True, **options)
