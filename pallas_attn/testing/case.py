"""Descriptions of calls, one type for each op, shared by tests, tuning and benchmarks; cases.py has the lists."""

import dataclasses
import math
from typing import ClassVar

from pallas_attn._tile.latents import QUERY_DIM
from pallas_attn._tile.masking import LocalStride

SHORT_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of any paged op: the `q_len` newest tokens of sequences of the given lengths.

    config: fields of the kernel's config, e.g. (("num_splits", 4), ("block_kv", 32)); () is the op's own choice.
    spare_pages: columns of the block table, and pages of the pool, beyond what the lengths need.
    lengths: name of the lengths in the case's id, if any.
    fast: of the cases of tests, one of a few that together touch every part of the kernel.
    """

    op: ClassVar[str]

    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    _: dataclasses.KW_ONLY
    layout: str = "NHD"
    q_len: int = 1
    config: tuple[tuple[str, int], ...] = ()
    spare_pages: int = 3
    lengths: str = ""
    fast: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.q_len * self.group

    @property
    def max_pages(self) -> int:
        """Columns of the block table."""
        return max(math.ceil(max(self.seq_lens) / self.page_size), 1) + self.spare_pages

    @property
    def id(self) -> str:
        parts = [f"b{self.num_seqs}", self.lengths, f"q{self.num_heads}kv{self.num_kv_heads}"]
        parts += [f"d{self.head_dim}", f"p{self.page_size}", SHORT_DTYPE[self.dtype], *self._options()]
        parts += [f"{name.removeprefix('num_')}{value}" for name, value in self.config]
        return "-".join(part for part in parts if part)

    def _options(self) -> list[str]:
        return [f"qlen{self.q_len}"] if self.q_len > 1 else []


@dataclasses.dataclass(frozen=True)
class DecodeCase(Case):
    """One call of `paged_attention`. A `cache_dtype` other than None is quantised, with one scale, one for each head,
    or one for each page and head. The newest tokens form a `tree` whose rules use "slots" or "positions", or ("") no
    tree."""

    op: ClassVar[str] = "paged_attention"

    layout: str = "NHD"
    _: dataclasses.KW_ONLY
    cache_dtype: str | None = None
    scale_per_head: bool = False
    scale_per_page: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    block_sparse: LocalStride | None = None
    tree: str = ""

    def _options(self) -> list[str]:
        parts = [self.layout.lower()] if self.layout != "NHD" else []
        if self.cache_dtype:
            parts.append(
                f"kv{SHORT_DTYPE[self.cache_dtype]}"
                + ("pp" if self.scale_per_page else "ph" if self.scale_per_head else "")
            )
        parts += super()._options()
        if self.sliding_window:
            parts.append(f"w{self.sliding_window}")
        if self.softcap:
            parts.append(f"cap{self.softcap:g}")
        if p := self.block_sparse:
            parts.append(
                f"bs{p.block_size}l{p.local_blocks}v{p.vert_stride}s{p.head_sliding_step}t{p.tp_rank}"
            )
        parts += [f"tree{self.tree}"] if self.tree else []
        return parts + [name for name in ("alibi", "sinks") if getattr(self, name)]


@dataclasses.dataclass(frozen=True)
class MLADecodeCase(Case):
    """One call of `mla_decode`, with a schedule of `num_parts` parts, or without one. A `cache_dtype` of float8_e4m3fn
    means latents of 656 bytes."""

    op: ClassVar[str] = "mla_decode"

    num_kv_heads: int = 1
    head_dim: int = dataclasses.field(default=QUERY_DIM, init=False)
    page_size: int = 64
    _: dataclasses.KW_ONLY
    causal: bool = False
    num_parts: int | None = None
    cache_dtype: str | None = None

    def _options(self) -> list[str]:
        parts = [f"kv{SHORT_DTYPE[self.cache_dtype]}"] if self.cache_dtype else []
        parts += [*super()._options(), *(["causal"] if self.causal else [])]
        return parts + ([f"parts{self.num_parts}"] if self.num_parts else [])


@dataclasses.dataclass(frozen=True)
class SparseMLACase(Case):
    """One call of `sparse_mla_decode`: each query token names `topk` tokens of its sequence."""

    op: ClassVar[str] = "sparse_mla_decode"

    num_kv_heads: int = 1
    head_dim: int = dataclasses.field(default=QUERY_DIM, init=False)
    page_size: int = 64
    _: dataclasses.KW_ONLY
    topk: int = 2048
    cache_dtype: str | None = None

    @property
    def rows(self) -> int:
        """A program's query rows, which are of one token."""
        return self.num_heads

    def _options(self) -> list[str]:
        parts = [f"kv{SHORT_DTYPE[self.cache_dtype]}"] if self.cache_dtype else []
        return [*parts, *super()._options(), f"top{self.topk}"]


@dataclasses.dataclass(frozen=True)
class SparsePrefillCase(SparseMLACase):
    """One call of `sparse_mla_prefill`: `q_len` query tokens over the latents of one sequence."""

    op: ClassVar[str] = "sparse_mla_prefill"


@dataclasses.dataclass(frozen=True)
class RaggedCase(DecodeCase):
    """One call of `ragged_paged_attention`: sequence i has q_lens[i] query tokens.

    padding: query tokens behind the last sequence; spare_seqs: room for sequences behind it.
    max_tree: with a `tree`, most query tokens of a sequence that is one.
    short: whether sequences of few rows have a launch of their own; `config` applies to both.
    """

    op: ClassVar[str] = "ragged_paged_attention"

    _: dataclasses.KW_ONLY
    q_lens: tuple[int, ...]
    value_dim: int | None = None
    causal: bool = True
    padding: int = 5
    max_tree: int = 0
    spare_seqs: int = 2
    short: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.padding

    def of(self, seq: int) -> DecodeCase:
        """A sequence as a batch of its own."""
        return dataclasses.replace(self, seq_lens=self.seq_lens[seq : seq + 1], q_len=self.q_lens[seq])

    def _options(self) -> list[str]:
        parts = [f"t{self.num_tokens}", *super()._options()]
        parts += [f"v{self.value_dim}"] if self.value_dim else []
        parts += [f"most{self.max_tree}"] if self.max_tree else []
        return parts + [name for name, has in (("full", not self.causal), ("one", not self.short)) if has]
