"""Calls of `flash_attention`."""

import dataclasses
from typing import Any, ClassVar

from pallas_attn.testing.cases import SHORT_DTYPE


@dataclasses.dataclass(frozen=True)
class FlashCase:
    """One call, with gradients of all it has. Options are the function's own.

    bias: which dimensions of the bias are not 1, of "b" batch, "h" heads, "t" queries and "s" keys; None for no bias.
    mask: likewise.
    segments: "packed" is ascending contiguous ids, of lengths that fit no tile; "any" is any order.
    documents: lengths of documents that fill a row, of as many queries as keys; benchmarks call it with their ids.
    """

    op: ClassVar[str] = "flash_attention"

    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    _: dataclasses.KW_ONLY
    value_dim: int | None = None
    batch: int = 2
    layout: str = "BTNH"
    causal: bool = False
    sliding_window: Any = None
    q_offset: int = 0
    softcap: float | None = None
    sinks: bool = False
    bias: str | None = None
    mask: str | None = None
    segments: str | None = None
    documents: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        parts = [
            *([f"b{self.batch}"] if self.batch != 2 else []),
            f"t{self.q_len}s{self.kv_len}",
            f"q{self.num_heads}kv{self.num_kv_heads}",
            f"d{self.head_dim}",
        ]
        if self.value_dim:
            parts.append(f"v{self.value_dim}")
        parts += [SHORT_DTYPE[self.dtype], *([self.layout.lower()] if self.layout != "BTNH" else [])]
        options = ("causal", "sliding_window", "q_offset", "softcap", "sinks", "bias", "mask", "segments")
        for name in options:
            value = getattr(self, name)
            if value:
                parts.append(name if value is True else f"{name}{value}".replace(" ", ""))
        if self.documents:
            parts.append(f"documents{len(self.documents)}")
        return "-".join(parts)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of each entry of the batch."""
        return (self.kv_len,) * self.batch

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_len * self.group

    @property
    def num_seqs(self) -> int:
        return self.batch

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that are not arrays."""
        names = ("layout", "causal", "sliding_window", "q_offset", "softcap")
        return {name: getattr(self, name) for name in names}

    def without(self, option: str) -> "FlashCase":
        return dataclasses.replace(self, **{option: FlashCase.__dataclass_fields__[option].default})
