"""What is tuned of `sparse_mla_decode`: its Pallas kernel over bf16 and over fp8 latents."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import fail
from pallas_attn._tile.latents import BYTES, QUERY_DIM, token_width
from pallas_attn.ops.latent_cache import quantize_latents
from pallas_attn.ops.sparse_mla import sparse_mla_decode
from pallas_attn.ops.sparse_mla.api import DECODE
from pallas_attn.ops.sparse_mla.operands import Ids, Operands
from pallas_attn.testing.cases import SparseMLACase
from pallas_attn.tuning import timing
from pallas_attn.tuning.paged import PagedPoint, random_pool, random_query
from pallas_attn.tuning.points import Fields, named

# A context is this many times as long as the ids that a query token names.
CONTEXT = 4
FP8_TOKENS = 6397  # tokens that a pool of fp8 latents repeats; a prime, so that no two pages are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseMLAPoint(PagedPoint):
    """`max_len` is the number of a query token's ids, and `streams` the number of query tokens: a walk is a list of
    ids."""

    op: ClassVar = DECODE
    sizes: ClassVar = dict(num_heads=128, num_kv_heads=1, page_size=64, dtype="bfloat16", cache_dtype=None)

    case: SparseMLACase

    @classmethod
    def variants(cls, num_seqs: int, max_len: int, **sizes: Any) -> "Sequence[SparseMLAPoint]":
        if (stored := sizes["cache_dtype"]) is not None:
            if stored != "float8_e4m3fn":
                fail("tune", "--cache-dtype", "float8_e4m3fn, of latents", stored)
            if sizes["dtype"] != "bfloat16":
                fail("tune", "--dtype", "bfloat16 with --cache-dtype", sizes["dtype"])
        lengths = (CONTEXT * max_len,) * num_seqs
        case = SparseMLACase(lengths, **sizes, topk=max_len, lengths=f"s{lengths[0]}", spare_pages=0)
        return [cls(case=case)]

    @property
    def max_len(self) -> int:
        return self.case.topk

    @property
    def stored(self) -> jnp.dtype:
        return jnp.dtype(BYTES if self.case.cache_dtype else self.case.dtype)

    @property
    def kind(self) -> str:
        return self.case.cache_dtype or self.case.dtype  # `stored` are bytes

    @property
    def read_bytes(self) -> int:
        return self.streams * self.max_len * token_width(self.stored) * self.stored.itemsize

    def abstract(self) -> Operands:
        case, struct = self.case, self.struct
        return Operands(
            query=struct((case.num_seqs, 1, case.num_heads, case.head_dim), case.dtype),
            latent_cache=struct((1, case.page_size, 1, token_width(self.stored)), self.stored),
            indices=struct((case.num_seqs, 1, case.topk)),
            ids=Ids(),
            scale=1.0,
            max_logits=False,
        )

    def candidates(self) -> list[Fields]:
        """Tiles on either side of the heuristic's."""
        if self.config().block_q >= 64:
            tiles = [(64, 32, 8, 3), (64, 32, 8, 5), (64, 64, 8, 2), (64, 64, 8, 3), (32, 64, 8, 3)]
        else:
            block_q = self.config().block_q
            shapes = [(64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 5), (32, 8, 3), (16, 4, 5)]
            tiles = [(block_q, *shape) for shape in shapes]
        names = ("block_q", "block_kv", "num_warps", "num_stages")
        return self.distinct(named(names, tiles))

    def operands(self, num_pages: int, seq_lens: jax.Array) -> tuple[jax.Array, ...]:
        case = self.case
        query = random_query((case.num_seqs, 1, case.num_heads, case.head_dim), case.dtype)
        pool = (num_pages, case.page_size, 1, token_width(self.stored))
        drawn = np.random.default_rng(4)
        ids = [drawn.choice(length, (1, case.topk), replace=False) for length in case.seq_lens]
        return query, self._pool(pool), jnp.asarray(np.stack(ids), jnp.int32)

    def _pool(self, shape: tuple[int, ...]) -> jax.Array:
        if self.stored != BYTES:
            return random_pool(shape, self.case.dtype, 1)
        tokens = np.random.default_rng(1).standard_normal((FP8_TOKENS, QUERY_DIM), np.float32)
        return timing.tiled(quantize_latents(jnp.asarray(tokens)).reshape(-1), shape)

    def call(
        self, operands: tuple[jax.Array, ...], table: jax.Array, seq_lens: jax.Array, **options: Any
    ) -> Any:
        query, pool, ids = operands
        options |= dict(addressing="positions", block_tables=table, return_lse=True)
        return sparse_mla_decode(query, pool, ids, topk_length=seq_lens // CONTEXT, **options)
