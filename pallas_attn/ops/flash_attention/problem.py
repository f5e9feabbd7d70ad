"""What a flash attention kernel is compiled for."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._tile import dense
from pallas_attn._tile.band import Band


@dataclasses.dataclass(frozen=True)
class Rules:
    """The static part of a call's rules; sinks, bias, mask and segments are arrays."""

    layout: str
    scale: float
    softcap: float | None
    band: Band


class Case(NamedTuple):
    """The static facts that decide which implementation can serve."""

    dtype: jnp.dtype
    batch: int
    q_len: int
    kv_len: int
    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    mask_elements: int
    has_bias: bool
    has_documents: bool
    has_config: bool


@dataclasses.dataclass(frozen=True)
class Problem:
    """All of it static. Query heads are two dimensions, KV head and place in its group."""

    rules: Rules
    batch: int
    q_len: int
    kv_len: int
    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, operands: dict[str, jax.Array], rules: Rules) -> "Problem":
        query, key, value = (operands[name].shape for name in ("query", "key", "value"))
        tokens, heads = (1, 2) if rules.layout == "BTNH" else (-2, 1)
        return cls(
            rules, query[0], query[tokens], key[tokens], key[heads], query[heads + 1], query[-1], value[-1]
        )

    @property
    def query_chunks(self) -> tuple[dense.Chunk, ...]:
        return dense.chunks_of(self.head_dim)

    @property
    def value_chunks(self) -> tuple[dense.Chunk, ...]:
        return dense.chunks_of(self.value_dim)

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    def blocks(self, side: str, size: int) -> int:
        return math.ceil((self.q_len if side == "query" else self.kv_len) / size)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_kv_heads, self.group, self.q_len)
