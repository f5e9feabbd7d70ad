"""Operands of `flash_attention` and of its gradients. Query heads are two dimensions, KV head and place in its group;
KV heads may be sharded."""

import dataclasses
from typing import Any

from pallas_attn._call.operands import dims, operands
from pallas_attn._tile.band import Band
from pallas_attn._types import Array
from pallas_attn.mods.operands import WithMods
from pallas_attn.ops.flash_attention.segments import Documents

LSE = "seqs heads group q"


@dataclasses.dataclass(frozen=True)
class Rules:
    """The static part of a call's rules; sinks, bias, mask and documents are arrays."""

    layout: str
    scale: float
    softcap: float | None
    band: Band


def _tokens(tokens: str, heads: str) -> Any:
    """Dimensions of an array of tokens, by the layout."""
    orders = {"BTNH": f"seqs {tokens} {heads} dim", "BNTH": f"seqs {heads} {tokens} dim"}
    return lambda self: orders[self.rules.layout]


QUERIES, KEYS = _tokens("q", "heads group"), _tokens("kv", "heads")


def of_pairs(array: Array) -> str:
    """Dimensions of bias and mask [batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len]."""
    kinds = ("seqs", "heads", "group", "q", "kv")
    return " ".join("one" if size == 1 else kind for kind, size in zip(kinds, array.shape, strict=True))


def _documents(tokens: str) -> Any:
    return dims((f"seqs {tokens}", "seqs ranks span"), default=None)


@operands
class Operands(WithMods):
    query: Array = dims(QUERIES)
    key: Array = dims(KEYS)
    value: Array = dims(KEYS)
    sinks: Array | None = dims("heads group", default=None)
    bias: Array | None = dims(lambda self: of_pairs(self.bias), default=None)
    mask: Array | None = dims(lambda self: of_pairs(self.mask), default=None)
    """int8"""
    q_documents: Documents | None = _documents("q")
    kv_documents: Documents | None = _documents("kv")
    padding: Array | None = dims("seqs q", default=None)
    """Queries whose lse is -inf, even where there are sinks."""
    rules: Rules
    checkpoint_name: str | None = None

    @property
    def pair_bytes(self) -> int:
        """Bytes read for each pair of a query and a key."""
        own = sum(array.dtype.itemsize for array in (self.bias, self.mask) if array is not None)
        return own if self.mods is None else own + self.mods.pair_bytes


@operands
class BackwardOperands(Operands):
    d_out: Array = dims(QUERIES)
    maximum: Array = dims(LSE)
    """And `rest`: the parts of the lse, both finite."""
    rest: Array = dims(LSE)
    delta: Array = dims(LSE)
    """As `weights.OfQueries` has it, and total."""
    total: Array = dims(LSE)
