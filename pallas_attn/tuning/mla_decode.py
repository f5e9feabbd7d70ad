"""What is tuned of `mla_decode`: its Pallas kernel, with a schedule and without one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from pallas_attn._call.device import current_device
from pallas_attn.ops.mla_decode import mla_decode, mla_schedule
from pallas_attn.ops.mla_decode.api import OP
from pallas_attn.ops.mla_decode.operands import Operands
from pallas_attn.ops.mla_decode.schedule import METADATA_SIZE, MLASchedule
from pallas_attn.testing.cases import MLADecodeCase
from pallas_attn.tuning.paged import PagedPoint, random_pool, random_query
from pallas_attn.tuning.points import Fields, named


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLADecodePoint(PagedPoint):
    op: ClassVar = OP
    pools: ClassVar = 1
    sizes: ClassVar = dict(num_heads=128, num_kv_heads=1, page_size=64, dtype="bfloat16")

    case: MLADecodeCase
    scheduled: bool

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[MLADecodePoint]":
        case = MLADecodeCase((max_len,) * num_seqs, **sizes, lengths=f"s{max_len}", spare_pages=0)
        return [cls(case=case, scheduled=scheduled) for scheduled in (True, False)]

    @property
    def kind(self) -> str:
        return "with a schedule" if self.scheduled else "without"

    def abstract(self) -> Operands:
        case, struct = self.case, self.struct
        schedule = MLASchedule(struct((1, METADATA_SIZE)), struct((case.num_seqs + 1,)))
        return Operands(
            query=struct((case.num_seqs, case.q_len, case.num_heads, case.head_dim), case.dtype),
            latent_cache=struct((1, case.page_size, case.num_kv_heads, case.head_dim), case.dtype),
            block_tables=struct((case.num_seqs, case.max_pages)),
            seq_lens=struct((case.num_seqs,)),
            schedule=schedule if self.scheduled else None,
            scale=1.0,
            causal=False,
            batch_invariant=False,
        )

    def candidates(self) -> list[Fields]:
        """Tiles around the heuristic's; without a schedule also shorter and more splits."""
        if self.config().block_q >= 64:
            # Eight warps turn 64 rows over tiles of 64 tokens (transposed.py).
            shapes = [(64, 8, 2), (32, 8, 2), (32, 8, 3), (32, 8, 4), (16, 8, 4)]
            tiles = [*((64, *shape) for shape in shapes), (32, 32, 4, 3)]
        else:
            block_q = self.config().block_q
            # Four warps turn 32 rows (transposed.py), and then two buffers are all there is room for.
            deep = [(64, 4, 3)] if block_q == 16 else []
            shapes = [*deep, (64, 4, 2), (64, 8, 3), (32, 4, 3), (32, 4, 4), (32, 4, 5), (16, 4, 4)]
            tiles = [(block_q, *shape) for shape in shapes]
        cores = current_device().num_cores
        splits: list[Fields] = [{}]
        if not self.scheduled:
            splits += [dict(target_programs=2 * cores), dict(min_split_tokens=256)]
        names = ("block_q", "block_kv", "num_warps", "num_stages")
        return self.distinct(tile | more for tile in named(names, tiles) for more in splits)

    def operands(self, num_pages: int, seq_lens: jax.Array) -> tuple[Any, ...]:
        case = self.case
        query = random_query((case.num_seqs, 1, case.num_heads, case.head_dim), case.dtype)
        pool = random_pool((num_pages, case.page_size, case.num_kv_heads, case.head_dim), case.dtype, 1)
        sizes = dict(num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
        return query, pool, mla_schedule(seq_lens, **sizes) if self.scheduled else None

    def call(self, operands: tuple[Any, ...], table: jax.Array, seq_lens: jax.Array, **options: Any) -> Any:
        query, pool, schedule = operands
        return mla_decode(query, pool, table, seq_lens, schedule=schedule, return_lse=True, **options)
