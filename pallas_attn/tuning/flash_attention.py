"""What is tuned of `flash_attention`: each of its kernels, for causal attention of a batch of prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from pallas_attn._tile.band import Band
from pallas_attn.ops.flash_attention import flash_attention
from pallas_attn.ops.flash_attention.api import OP
from pallas_attn.ops.flash_attention.config import KERNELS
from pallas_attn.ops.flash_attention.operands import Operands, Rules
from pallas_attn.testing.flash_attention import FlashCase
from pallas_attn.tuning.dense import DensePoint
from pallas_attn.tuning.points import Fields, named

LAYOUT = "BTNH"
# (block_q, block_kv, warps, stages); dk and dv walk over queries, and have them the other way round.
TILES = ((128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 4, 2))
TILES += ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 8, 2))
TILES += ((128, 32, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4))  # three and four buffers fit beside heads of 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionPoint(DensePoint):
    op: ClassVar = OP
    sizes: ClassVar = dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")

    case: FlashCase
    kernel: str

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[FlashAttentionPoint]":
        case = FlashCase(max_len, max_len, **sizes, batch=num_seqs, causal=True)
        return [cls(case=case, kernel=kernel) for kernel in KERNELS]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        case = self.case
        keys = (case.batch, case.kv_len, case.num_kv_heads, case.head_dim)
        return (case.batch, case.q_len, case.num_heads, case.head_dim), keys, keys

    @property
    def pairs(self) -> int:
        return self.case.batch * self.case.num_heads * self.case.q_len * (self.case.q_len + 1) // 2

    def abstract(self) -> Operands:
        query, key, value = (self.struct(shape, self.case.dtype) for shape in self.shapes)
        return Operands(
            query=self.struct(
                (*query.shape[:2], key.shape[2], self.case.group, query.shape[-1]), query.dtype
            ),
            key=key,
            value=value,
            rules=Rules(LAYOUT, 1.0, None, Band(None, 0, 0)),
        )

    @property
    def part(self) -> str:
        return self.kernel

    def candidates(self) -> list[Fields]:
        sides = ("block_kv", "block_q") if self.kernel == "key_value" else ("block_q", "block_kv")
        names = (*sides, "num_warps", "num_stages")
        return self.distinct(named(names, TILES))

    def attend(self, operands: Any, *floats: jax.Array, **options: Any) -> Any:
        return flash_attention(*floats, causal=True, return_lse=True, **options)
