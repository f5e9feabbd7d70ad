"""What `blocksparse_attention` works on, and what its gradients do."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_attn._call.operands import dims, operands
from pallas_attn._call.pools import DIMS, PoolShape, Which, pool_shape, table_tokens
from pallas_attn._tile.masking import Rules
from pallas_attn._types import Array
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout

KEYS = "key_tokens kv_heads dim"


def _keys(which: Which) -> Any:
    return dims(lambda self: DIMS[self.cache_layout][which] if self.cache_layout else KEYS)


def _by_head() -> Any:
    return dims(lambda self: f"{self.heads} tokens")


def _entries(self: Any) -> tuple[str, str]:
    """Dimensions of row pointers and columns."""
    entries = f"{self.heads if self.layout.layout_heads > 1 else 'all'} entries"
    return entries, entries


@operands
class Operands:
    query: Array = dims(lambda self: f"tokens {self.heads} dim")
    key: Array = _keys("key")
    value: Array = _keys("value")
    layout: SparseLayout = dims(_entries)
    cu_q_lens: Array | None = dims("ends", default=None)
    """None where all sequences decode."""
    cu_k_lens: Array | None = dims("ends", default=None)
    """For keys in rows, as `block_tables` and `seq_lens` are for keys in pages."""
    block_tables: Array | None = dims("tables columns", default=None)
    seq_lens: Array | None = dims("tables", default=None)
    cache_layout: str | None
    """None for keys in rows."""
    kinds: str
    """"prefill", "decode" or "mixed": which kinds of sequences there may be."""
    scale: float
    rules: Rules
    heads: str = "heads"
    """The query's heads in words: whether they may be sharded."""
    limits_registers: bool = True
    """Whether the implementation can (`triton.limits_registers`)."""
    checkpoint_name: str | None = None

    @property
    def pool(self) -> PoolShape:
        """The pool's shape; keys in rows count as pages of one token."""
        if self.cache_layout is not None:
            return pool_shape(self.value, self.cache_layout)
        tokens, num_kv_heads, head_dim = self.key.shape
        return PoolShape(tokens, 1, num_kv_heads, head_dim)

    @property
    def max_k_len(self) -> int:
        if self.block_tables is None:
            return self.key.shape[0]
        return table_tokens(self.block_tables.shape[1], self.pool.page_size)

    @property
    def num_seqs(self) -> int:
        if self.block_tables is not None:
            return self.block_tables.shape[0]
        assert self.cu_k_lens is not None
        return self.cu_k_lens.shape[0] - 1

    @property
    def row_blocks(self) -> float:
        """Blocks that a row of the layout lists, on average."""
        return self.layout.columns.shape[1] / self.layout.num_row_blocks


@operands
class BackwardOperands(Operands):
    """Numbers of each query are adjacent, as kernels read them."""

    d_out: Array = dims(lambda self: f"tokens {self.heads} dim")
    maximum: Array = _by_head()
    """Finite."""
    rest: Array = _by_head()
    delta: Array = _by_head()
    """As `weights.OfQueries` has it, and total."""
    total: Array = _by_head()


def as_prefill[O: Operands](operands: O) -> O:
    """The same call, without separate treatment of sequences of one query."""
    if operands.kinds != "decode":
        return dataclasses.replace(operands, kinds="prefill")
    ends = jnp.arange(operands.num_seqs + 1, dtype=jnp.int32)
    return dataclasses.replace(operands, kinds="prefill", cu_q_lens=ends)
