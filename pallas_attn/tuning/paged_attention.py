"""What is tuned of `paged_attention`."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_attn._call.device import current_device
from pallas_attn._tile.quantization import is_quantized
from pallas_attn.ops.paged_attention import PagedAttentionConfig, paged_attention
from pallas_attn.ops.paged_attention.config import heuristic
from pallas_attn.tuning.points import Fields, Point, random_pool, random_query


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionPoint(Point):
    op = "paged_attention"
    sizes: ClassVar = dict(
        num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", cache_dtype=None
    )

    head_dim: int
    cache_dtype: str

    @classmethod
    def variants(cls, **sizes: Any) -> "Sequence[PagedAttentionPoint]":
        return [cls(**sizes | {"cache_dtype": sizes["cache_dtype"] or sizes["dtype"]})]

    @property
    def kind(self) -> str:
        return self.cache_dtype

    @property
    def read_bytes(self) -> int:
        slots = self.num_seqs * self.max_pages * self.page_size
        return 2 * slots * self.num_kv_heads * self.head_dim * jnp.dtype(self.cache_dtype).itemsize

    def key(self) -> dict[str, Any]:
        return dict(head_dim=self.head_dim, page_size=self.page_size, dtype=self.cache_dtype)

    def config(self, **fields: int) -> PagedAttentionConfig:
        return heuristic(
            num_seqs=self.num_seqs,
            num_kv_heads=self.num_kv_heads,
            rows=self.rows,
            head_dim=self.head_dim,
            itemsize=jnp.dtype(self.cache_dtype).itemsize,
            query_itemsize=jnp.dtype(self.dtype).itemsize,
            max_len=self.max_pages * self.page_size,
            device=current_device(),
            **fields,
        )

    def candidates(self) -> list[Fields]:
        """What came out best somewhere in wider sweeps."""
        cores = current_device().num_cores
        if self.streams < 2 * cores:
            # (block_kv, num_warps, num_stages) and programs a multiprocessor. What does not fit there at once makes a
            # second wave, and a second wave of some costs up to 15%: so numbers on either side of what may fit.
            tiles = {(128, 4, 3): (1, 2), (128, 8, 3): (2,), (128, 8, 5): (1, 2)}
            tiles |= {(64, 4, 3): (2, 3), (64, 4, 4): (3,), (32, 4, 5): (2, 4, 5)}
        else:
            tiles = dict.fromkeys([(128, 4, 3), (128, 8, 5), (64, 4, 3), (32, 4, 5), (64, 4, 7)], (4,))
        least = [256]
        if self.max_len < 4096:
            least = [64]
        elif self.streams * self.max_len < 128 * cores:
            least = [64, 128]  # pieces of 256 tokens would leave half the device without work
        elif self.streams * self.max_len < 256 * cores:
            least = [128, 256]
        found: list[Fields] = [{}]
        for (block_kv, num_warps, num_stages), programs in tiles.items():
            for count, tokens in itertools.product(programs, least):
                fields = dict(block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)
                found.append(fields | dict(target_programs=count * cores, min_split_tokens=tokens))
        return self.distinct(found)

    def operands(self, num_pages: int, seq_lens: jax.Array) -> tuple[jax.Array, ...]:
        pool = (num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        query = random_query((self.num_seqs, self.num_heads, self.head_dim), self.dtype)
        return query, random_pool(pool, self.cache_dtype, 1), random_pool(pool, self.cache_dtype, 2)

    def call(
        self, operands: tuple[jax.Array, ...], table: jax.Array, seq_lens: jax.Array, **options: Any
    ) -> Any:
        if is_quantized(jnp.dtype(self.cache_dtype)):
            scale = 1 / 40 if self.cache_dtype == "int8" else 1.0
            options |= dict(k_scale=scale, v_scale=scale)
        query, keys, values = operands
        return paged_attention(query, keys, values, table, seq_lens, return_lse=True, **options)
