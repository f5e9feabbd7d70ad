"""What is tuned of `blocksparse_attention`: its kernels, for layouts of random blocks that differ by head."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import triton
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.blocksparse_attention import SparseLayout, blocksparse_attention
from pallas_attn.ops.blocksparse_attention.api import OP
from pallas_attn.ops.blocksparse_attention.config import TILES
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.testing.blocksparse import BlockSparseCase, layout_of
from pallas_attn.tuning.dense import DensePoint
from pallas_attn.tuning.points import Fields, Inputs, named

# Tokens of a sequence, `max_len` of which a row sees on average.
CONTEXT = 8
# Queries, keys, warps, stages, registers.
PREFILL = ((64, 64, 4, 3, 0), (64, 64, 4, 2, 0), (64, 32, 4, 3, 0), (128, 64, 4, 2, 0), (128, 128, 8, 3, 0))
PREFILL += ((128, 64, 8, 3, 0), (128, 64, 8, 2, 128))
DECODE = ((64, 4, 3), (64, 4, 4), (32, 4, 4), (64, 8, 3))
DQ = ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3))
DKV = ((32, 64, 4, 3), (64, 128, 8, 3), (32, 64, 4, 2), (64, 64, 4, 2))
CHOICES = {"prefill": PREFILL, "decode": DECODE, "dq": DQ, "dkv": DKV}


class Tiles(NamedTuple):
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSparsePoint(DensePoint):
    """`max_len` is the number of tokens that a row of the layout sees, which, not the sequence's length, is a program's
    work."""

    op: ClassVar = OP
    sizes: ClassVar = dict(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")

    case: BlockSparseCase
    kernel: str

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[BlockSparsePoint]":
        dtype = sizes.pop("dtype")

        def point(kernel: str, block: int) -> "BlockSparsePoint":
            tokens = CONTEXT * max_len
            decodes = kernel == "decode"
            # A random half of a prompt's blocks lies in the future.
            pattern = 1 / CONTEXT if decodes else 2 / CONTEXT
            lens = ((1 if decodes else tokens, tokens),) * num_seqs
            heads = (sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"])
            return cls(case=BlockSparseCase(lens, *heads, pattern, block, block, dtype=dtype), kernel=kernel)

        return [point(kernel, block) for block in (64, 128) for kernel in TILES]

    @property
    def max_len(self) -> int:
        return max(self.case.seq_lens) // CONTEXT

    @property
    def kind(self) -> str:
        return f"{self.kernel}, blocks of {self.case.block_size}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        case = self.case
        queries, keys = (sum(lens) for lens in zip(*case.lens, strict=True))
        row = (keys, case.num_kv_heads, case.head_dim)
        return (queries, case.num_heads, case.head_dim), row, row

    @property
    def pairs(self) -> int:
        return sum(q_len for q_len, _ in self.case.lens) * self.case.num_heads * self.max_len

    def abstract(self) -> Operands:
        case, struct = self.case, self.struct
        query, key, value = (struct(shape, case.dtype) for shape in self.shapes)
        rows = max(case.seq_lens) // case.q_block_size
        columns = struct((1, rows * self.max_len // case.block_size))
        return Operands(
            query=query,
            key=key,
            value=value,
            layout=SparseLayout(struct((1, rows + 1)), columns, case.block_size, case.q_block_size),
            cu_k_lens=struct((case.num_seqs + 1,)),
            cache_layout=None,
            kinds="mixed",
            scale=1.0,
            rules=Rules(),
            limits_registers=triton.limits_registers("pallas"),
        )

    def chosen(self, fields: Fields) -> Fields:
        config = dataclasses.asdict(self.config(**fields))
        return {name: config[name] for name in TILES[self.kernel]}

    def tiles(self, fields: Fields) -> Tiles:
        sizes = [size for name, size in self.chosen(fields).items() if name != "max_registers"]
        *queries, block_kv, num_warps, num_stages = sizes
        # A program of decode has one query.
        return Tiles(queries[0] if queries else 1, block_kv, num_warps, num_stages)

    def candidates(self) -> list[Fields]:
        most = self.case.block_size
        found = named(TILES[self.kernel], CHOICES[self.kernel])
        return self.distinct(
            tiles for tiles in found if all(tiles[name] <= most for name in tiles if "block" in name)
        )

    def inputs(self) -> Inputs:
        ends = jnp.array([0, *itertools.accumulate(self.case.seq_lens)], jnp.int32)
        return super().inputs()._replace(operands=(jax.tree.map(jnp.asarray, layout_of(self.case)), ends))

    def attend(self, operands: Any, *floats: jax.Array, **options: Any) -> Any:
        layout, ends = operands
        return blocksparse_attention(*floats, layout=layout, cu_k_lens=ends, return_lse=True, **options)
