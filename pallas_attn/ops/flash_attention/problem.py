"""What a flash attention kernel is compiled for."""

import dataclasses
import math

from pallas_attn._call import sizes
from pallas_attn.ops.flash_attention.operands import Operands, Rules


@dataclasses.dataclass(frozen=True)
class Problem:
    """All static. Query heads are two dimensions, KV head and place in its group."""

    rules: Rules
    batch: int
    q_len: int
    kv_len: int
    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, operands: Operands) -> "Problem":
        query, key, value = (array.shape for array in (operands.query, operands.key, operands.value))
        tokens, heads = (1, 2) if operands.rules.layout == "BTNH" else (-2, 1)
        sizes = query[0], query[tokens], key[tokens], key[heads], query[heads + 1], query[-1], value[-1]
        return cls(operands.rules, *sizes)

    @property
    def query_chunks(self) -> tuple[sizes.Chunk, ...]:
        return sizes.chunks(self.head_dim)

    @property
    def value_chunks(self) -> tuple[sizes.Chunk, ...]:
        return sizes.chunks(self.value_dim)

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    def blocks(self, side: str, size: int) -> int:
        return math.ceil((self.q_len if side == "query" else self.kv_len) / size)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_kv_heads, self.group, self.q_len)
