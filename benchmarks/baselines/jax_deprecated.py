"""jax's own paged attention for GPUs, `jax.experimental.pallas.ops.gpu.paged_attention`, which is deprecated.

It wants its pools heads first, and gets the others' memory as such: other numbers, just as random. Each cell has two
variants of its tuning arguments, of the kinds that were best in a sweep over 16 cells.
"""

import math
import warnings
from typing import Any

import jax
import reference
from workloads.decode import Call

import baselines

TITLE = "jax's deprecated kernel"
OPS = ("paged_attention",)
PLAIN = False
ORDER = reference.HEADS_FIRST
ERROR_LIMIT = 2e-2  # its partial results are bf16
MULTIPROCESSORS = 132
LONG = 4096


def available() -> str | None:
    return baselines.importable("jax.experimental.pallas.ops.gpu.paged_attention")


def supports(case: Any) -> str | None:
    if case.q_len > 1:
        return "takes one query token a sequence"
    if not _splits(case):
        return "needs a table whose pages split evenly"
    return baselines.plain_only(case)


def _splits(case: Any) -> list[int]:
    """Counts that leave pieces of whole blocks of four pages."""
    return [count for count in (2**i for i in range(8)) if case.max_pages % (4 * count) == 0]


def variants(case: Any) -> dict[str, Call]:
    streams = case.num_seqs * case.num_kv_heads
    few, many = (
        min(_splits(case), key=lambda count: abs(math.log2(count * streams / (programs * MULTIPROCESSORS))))
        for programs in (2, 8)
    )
    second = (many, 4) if max(case.seq_lens) >= LONG and many != few else (few, 8)
    return {f"{splits} splits of {pages} pages": _call(splits, pages) for splits, pages in {(few, 4), second}}


def _call(splits: int, pages: int) -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as deprecated

    def call(query, caches, table, lengths, _):
        num_pages, page_size, heads, head_dim = caches[0].shape
        pools = [cache.reshape(heads, num_pages, page_size, head_dim) for cache in caches]
        out = deprecated.paged_attention(
            (query[:, 0] * head_dim**-0.5).astype(query.dtype),  # it does not scale the logits
            *pools,
            table,
            lengths,
            k_splits=splits,
            pages_per_compute_block=pages,
            num_warps=4,
            interpret=jax.default_backend() == "cpu",
        )
        return out, out

    return call
