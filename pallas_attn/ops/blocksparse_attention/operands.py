"""What `blocksparse_attention` works on, and what its gradients do."""

from typing import Any

from pallas_attn._call.operands import dims, operands
from pallas_attn._tile.layout import DIMS, Which
from pallas_attn._types import Array
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout

KEYS = "key_tokens kv_heads dim"


def _keys(which: Which) -> Any:
    return dims(lambda self: DIMS[self.cache_layout][which] if self.cache_layout else KEYS)


def _by_head() -> Any:
    return dims(lambda self: f"{self.heads} tokens")


def _entries(self: Any) -> tuple[str, str]:
    """Of row pointers and columns."""
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
    """Of keys in rows, as `block_tables` and `seq_lens` are of keys in pages."""
    block_tables: Array | None = dims("tables columns", default=None)
    seq_lens: Array | None = dims("tables", default=None)
    cache_layout: str | None
    heads: str = "heads"
    """The word for the query's heads, which says whether they may be sharded."""


@operands
class BackwardOperands(Operands):
    """Numbers of each query stand side by side, as kernels read them."""

    d_out: Array = dims(lambda self: f"tokens {self.heads} dim")
    maximum: Array = _by_head()
    """Finite."""
    rest: Array = _by_head()
    delta: Array = _by_head()
    """As `weights.OfQueries` has it, and total."""
    total: Array = _by_head()
