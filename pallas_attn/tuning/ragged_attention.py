"""What is tuned of `ragged_paged_attention`: chunks of prompts behind contexts, and decoding."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_attn._call.device import current_device
from pallas_attn._tile.masking import Rules
from pallas_attn.ops.ragged_attention import ragged_paged_attention
from pallas_attn.ops.ragged_attention.api import OP
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.testing.cases import RaggedCase
from pallas_attn.tuning.paged import PagedPoint, random_pool, random_query
from pallas_attn.tuning.points import Fields, named

CHUNK = 512  # new tokens of a sequence, and 1, the most common number


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedAttentionPoint(PagedPoint):
    """Sequences that all have as many new tokens; of a batch that mixes them, the average counts."""

    op: ClassVar = OP
    sizes: ClassVar = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")

    case: RaggedCase

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[RaggedAttentionPoint]":
        def point(q_len: int) -> "RaggedAttentionPoint":
            case = RaggedCase(
                (max_len,) * num_seqs, **sizes, q_len=q_len, q_lens=(q_len,) * num_seqs,
                lengths=f"s{max_len}", padding=0, spare_seqs=0, spare_pages=0,
            )  # fmt: skip
            return cls(case=case)

        return [point(q_len) for q_len in dict.fromkeys((min(CHUNK, max_len), 1))]

    @property
    def kind(self) -> str:
        return f"{self.case.q_len} new"

    def abstract(self) -> Operands:
        case, struct = self.case, self.struct
        pool = struct((1, case.page_size, case.num_kv_heads, case.head_dim), case.dtype)
        return Operands(
            query=struct((case.num_tokens, case.num_heads, case.head_dim), case.dtype),
            key_cache=pool,
            value_cache=pool,
            block_tables=struct((case.num_seqs, case.max_pages)),
            seq_lens=struct((case.num_seqs,)),
            cu_q_lens=struct((case.num_seqs + 1,)),
            num_seqs=struct((1,)),
            layout=case.layout,
            scale=1.0,
            rules=Rules(),
            out_dtype=jnp.dtype(case.dtype),
        )

    @property
    def part(self) -> str:
        """The launch that serves these sequences; the other is not measured. A few decoded sequences share one launch
        with all."""
        return "short" if self.case.q_len == 1 and self.config().short else "long"

    def candidates(self) -> list[Fields]:
        cores = current_device().num_cores
        names = ("block_kv", "num_warps", "num_stages")
        if self.case.q_len == 1:
            tiles = named(names, [(128, 4, 3), (64, 4, 3), (64, 4, 4), (32, 4, 5), (32, 4, 3)])
            programs: list[Fields] = [{}, dict(target_programs=2 * cores)]
            return self.distinct(tile | more for tile in tiles for more in programs)
        shapes = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 128, 8, 3)]
        return self.distinct(named(("block_q", *names), shapes))

    def operands(self, num_pages: int, seq_lens: jax.Array) -> tuple[jax.Array, ...]:
        case = self.case
        pool = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
        bounds = jnp.arange(case.num_seqs + 1, dtype=jnp.int32) * case.q_len
        query = random_query((case.num_tokens, case.num_heads, case.head_dim), case.dtype)
        return query, random_pool(pool, case.dtype, 1), random_pool(pool, case.dtype, 2), bounds

    def call(
        self, operands: tuple[jax.Array, ...], table: jax.Array, seq_lens: jax.Array, **options: Any
    ) -> Any:
        query, keys, values, bounds = operands
        return ragged_paged_attention(
            query, keys, values, table, seq_lens, bounds, return_lse=True, **options
        )
