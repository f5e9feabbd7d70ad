"""What a call has to do at least: floating-point operations, and bytes between the chip and its memory.

One function an op, from the case alone. Bytes: what is attended to of the cache, the query and the output, each once.
Operations: both products, for all pairs of a query token and a key that the options (window, block sparsity) let it
see; the causal order among the newest tokens is not subtracted. For MLA that is how FlashMLA counts, so that figures
compare with published ones.
"""

from typing import Any, NamedTuple

import numpy as np

LATENT_DIM, ROPE_DIM = 512, 64
MLA_DIM = LATENT_DIM + ROPE_DIM
FP8_LATENT_BYTES = LATENT_DIM + 4 * 4 + 2 * ROPE_DIM
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


class Cost(NamedTuple):
    """Of one call."""

    flops: int
    num_bytes: int

    def seconds(self, flops_a_second: float, bytes_a_second: float) -> float:
        """The least time that these rates allow."""
        return max(self.flops / flops_a_second, self.num_bytes / bytes_a_second)


def mla_decode(case: Any) -> Cost:
    rows, tokens = case.num_seqs * case.q_len * case.num_heads, sum(case.seq_lens)
    width = MLA_DIM + LATENT_DIM
    num_bytes = tokens * case.num_kv_heads * latent_bytes(case) + rows * width * _ITEM_BYTES[case.dtype]
    return Cost(2 * case.q_len * case.num_heads * tokens * width, num_bytes)


def sparse_mla(case: Any, pairs: int, tokens_read: int) -> Cost:
    """For `pairs` of a query token and one that it names, of `tokens_read` tokens: what several query tokens of a
    sequence name is read once. The ids are not counted, again as FlashMLA has it."""
    rows, width = case.num_seqs * case.q_len * case.num_heads, MLA_DIM + LATENT_DIM
    num_bytes = tokens_read * latent_bytes(case) + rows * width * _ITEM_BYTES[case.dtype]
    return Cost(2 * case.num_heads * pairs * width, num_bytes)


def latent_bytes(case: Any) -> int:
    """Of a token."""
    if getattr(case, "cache_dtype", None):
        return FP8_LATENT_BYTES
    return MLA_DIM * _ITEM_BYTES[case.dtype]


def paged_attention(case: Any) -> Cost:
    pairs = tokens_read = 0
    group = case.num_heads // case.num_kv_heads
    for length in case.seq_lens:
        kept, sizes = _blocks(case, length)
        pairs += int((kept * sizes.sum(0)).sum())
        # A KV head's block is read once for all the heads and queries that see some of it; the first query sees most.
        tokens_read += int((kept.reshape(case.num_kv_heads, group, -1).any(1) * sizes[0]).sum())
    cache_bytes = _ITEM_BYTES[case.cache_dtype or case.dtype]
    rows = case.num_seqs * case.q_len * case.num_heads
    num_bytes = 2 * case.head_dim * (tokens_read * cache_bytes + rows * _ITEM_BYTES[case.dtype])
    return Cost(4 * case.head_dim * pairs, num_bytes)


def ragged_paged_attention(case: Any) -> Cost:
    """Operations: what the mask leaves, the causal one included, since prompts are mostly that."""
    pairs = tokens_read = 0
    for length, q_len in zip(case.seq_lens, case.q_lens, strict=True):
        position = length - q_len + np.arange(q_len)
        seen = position + 1 if case.causal else np.full(q_len, length)
        if case.sliding_window:
            seen = np.minimum(seen, case.sliding_window)
        pairs += int(seen.sum())
        tokens_read += int(min(length, seen[0] + q_len - 1)) if q_len else 0
    dims = case.head_dim + (case.value_dim or case.head_dim)
    cache_bytes = _ITEM_BYTES[case.cache_dtype or case.dtype]
    rows = sum(case.q_lens) * case.num_heads
    num_bytes = dims * (tokens_read * case.num_kv_heads * cache_bytes + rows * _ITEM_BYTES[case.dtype])
    return Cost(2 * dims * case.num_heads * pairs, num_bytes)


def flash_attention(case: Any, *, gradients: bool = False) -> Cost:
    """Pairs that see each other are counted; with gradients, backward's five products as well as
    forward's two."""
    query, key = np.arange(case.q_len), case.q_offset
    first, last = np.zeros_like(query), np.full_like(query, case.kv_len)
    if case.sliding_window:
        first, last = query + key - case.sliding_window + 1, query + key + case.sliding_window
    if case.causal:
        last = query + key + 1
    if getattr(case, "documents", ()):
        ends = np.cumsum(case.documents)
        document = np.searchsorted(ends, query, side="right")
        first, last = np.maximum(first, (ends - case.documents)[document]), np.minimum(last, ends[document])
    pairs = int((last.clip(0, case.kv_len) - first.clip(0, case.kv_len)).clip(0).sum())
    dims = case.head_dim + (case.value_dim or case.head_dim)
    rows = case.q_len * case.num_heads + case.kv_len * case.num_kv_heads
    num_bytes = case.batch * rows * dims * _ITEM_BYTES[case.dtype]
    flops = 2 * case.batch * case.num_heads * pairs * dims
    # What is read forward is read again, with out and its gradient, and as much is written.
    return Cost(flops * 7 // 2, 4 * num_bytes) if gradients else Cost(flops, num_bytes)


def blocksparse_attention(case: Any, mask: np.ndarray) -> Cost:
    """`mask`: [layout_heads, rows, blocks of keys]. A KV head's block is read once by a decoding sequence for all the
    heads that see it; of a prompt the keys are read once, whoever sees them."""
    pairs = tokens_read = 0
    heads = np.broadcast_to(mask, (case.num_heads, *mask.shape[1:]))
    starts = np.arange(mask.shape[2]) * case.block_size
    for q_len, k_len in case.lens:
        position = np.arange(k_len - q_len, k_len)
        seen = (position[:, None] + 1 - starts).clip(0, case.block_size)
        rows = position // case.q_block_size
        for row in np.unique(rows):
            pairs += int((heads[:, row] * seen[rows == row].sum(0)).sum())
        if q_len == 1:
            by_group = heads[:, rows[0]].reshape(case.num_kv_heads, case.group, -1).any(1)
            tokens_read += int((by_group * (k_len - starts).clip(0, case.block_size)).sum())
        else:
            tokens_read += k_len * case.num_kv_heads
    queries = sum(q_len for q_len, _ in case.lens) * case.num_heads
    num_bytes = 2 * case.head_dim * (tokens_read + queries) * _ITEM_BYTES[case.dtype]
    return Cost(4 * case.head_dim * pairs, num_bytes)


def _blocks(case: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(whether a head sees a block: [num_heads, blocks], its tokens that a query sees: [q_len, blocks]).

    Without a sparse pattern the sequence is one block.
    """
    pattern = case.block_sparse
    size = pattern.block_size if pattern else max(length, 1)
    starts = np.arange(0, length, size)
    positions = length - case.q_len + np.arange(case.q_len)
    first_seen = positions - case.sliding_window + 1 if case.sliding_window else np.zeros_like(positions)
    sizes = np.minimum(starts + size, length) - np.maximum(starts, first_seen[:, None])
    if pattern is None:
        return np.ones((case.num_heads, len(starts)), bool), sizes.clip(0)
    heads = np.arange(case.num_heads)
    offsets = [
        pattern.offset(head, head * case.num_kv_heads // case.num_heads, **_head_counts(case))
        for head in heads
    ]
    blocks = np.arange(len(starts))
    remote = (blocks + np.array(offsets)[:, None]) % pattern.vert_stride == 0
    local = blocks > (length - 1) // size - pattern.local_blocks
    return local | remote, sizes.clip(0)


def _head_counts(case: Any) -> dict[str, int]:
    return dict(num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
