"""The tile scheduler: which parts of the GPU work on which KV blocks of which sequences.

One part is a streaming multiprocessor's share (per KV head and block of 64 query rows). All parts get the same
payload, counted in blocks of 64 tokens, where starting on a sequence costs an overhead of some blocks more; sequences
are dealt out in order, so a part ends anywhere inside a sequence and the next one goes on there.

Dealt part by part this is a loop over a hundred or more parts. Here it is a handful of vector operations instead.
Put every sequence's blocks and its overhead on one line: sequence i begins at start[i]. A part that begins at p has
spent its payload at p + payload; if that falls inside a sequence, the next part begins one overhead before it
(which is paid once more), but never before that sequence's own start:

    next(p) = max(p + payload - overhead, last start <= p + payload)

So parts advance by a constant stride, except where one "snaps" to a sequence's start. Which start the walk from
each start snaps to next, and after how many parts, is found by comparing all pairs of starts; where the k-th part
begins then follows by binary lifting over those snaps.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from pallas_attn._call import partition
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.device import current_device
from pallas_attn._types import SeqLens

BLOCK_TOKENS = 64
BLOCK_ROWS = 64
FIXED_OVERHEAD_BLOCKS = 5
MOST_BLOCKS = 2**30  # of a batch
MOST_PARTS, MOST_OVERHEAD_BLOCKS = 4096, 1024
METADATA_SIZE = 8


class MLASchedule(NamedTuple):
    """A schedule for one set of lengths: compute it once per step, use it in every layer.

    tile_scheduler_metadata: [num_sm_parts, 8] int32; a part's columns are begin_idx, begin_seqlen, end_idx,
        end_seqlen, begin_n_split_idx and three zeros. It serves sequences begin_idx to end_idx, both included, the
        first from token begin_seqlen on and the last up to token end_seqlen. begin_n_split_idx is the number of
        its first piece among the pieces of begin_idx. A part without work has begin_idx = num_seqs.
    num_splits: [num_seqs + 1] int32; num_splits[i] pieces belong to the sequences before i.
    """

    tile_scheduler_metadata: jax.Array
    num_splits: jax.Array


export.register_namedtuple_serialization(MLASchedule, serialized_name="pallas_attn.MLASchedule")


def num_sm_parts(rows_per_kv_head: int, num_kv_heads: int, num_cores: int) -> int:
    """Parts that fill `num_cores` multiprocessors when every part has a program per KV head and 64 query rows."""
    return max(1, num_cores // num_kv_heads // math.ceil(rows_per_kv_head / BLOCK_ROWS))


def mla_schedule(
    seq_lens: SeqLens,
    *,
    num_heads: int,
    num_kv_heads: int = 1,
    q_len: int = 1,
    num_parts: int | None = None,
    overhead_blocks: int | None = None,
) -> MLASchedule:
    """The schedule of `mla_decode` for these lengths, on the device and inside jit.

    Args:
        seq_lens: [num_seqs] int32; negative lengths count as 0.
        num_heads, num_kv_heads: query heads and KV heads.
        q_len: query tokens per sequence.
        num_parts: pieces of equal work to cut the batch into, 1 to 4096; None takes what fills the device.
        overhead_blocks: what starting on a sequence costs, in blocks of 64 tokens, 1 to 1024. FlashMLA takes 5, which
            keeps most sequences of a big batch whole. None takes 5 too if there are more sequences than parts, else 2,
            or 1 below a sixteenth of the parts; and as many as it takes to leave sequences of like length whole if
            they are nearly as many as the parts, or as a multiple of them, but fewer.

    Raises:
        TypeError, ValueError: seq_lens that are not an int32 vector with at least one entry; counts out of range.

    Source: the tile scheduler of FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("mla_schedule")
    check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
    check.non_empty("seq_lens", seq_lens)
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("q_len", q_len)):
        check.count(name, value)
    check.multiple("num_heads", num_heads, "num_kv_heads", num_kv_heads)
    rows = q_len * num_heads // num_kv_heads
    if num_parts is None:
        num_parts = num_sm_parts(rows, num_kv_heads, current_device().num_cores)
    # More would cost memory, or overflow int32, and serve nothing.
    for name, value, most in (
        ("num_parts", num_parts, MOST_PARTS),
        ("overhead_blocks", overhead_blocks, MOST_OVERHEAD_BLOCKS),
    ):
        if value is not None:
            check.count(name, value, most)
    return MLASchedule(
        *partition.run(
            "mla_schedule",
            _schedule,
            {"seq_lens": seq_lens},
            {"seq_lens": "lengths"},  # all of them on every device
            ("parts columns", "sums"),
            static={"num_parts": num_parts, "overhead": overhead_blocks, "rows": rows},
            implementation="xla",
        )
    )


def _schedule(
    operands: dict[str, jax.Array], *, num_parts: int, overhead: int | None, rows: int
) -> MLASchedule:
    seq_lens = operands["seq_lens"]
    if overhead is None:
        return tile_schedule(seq_lens, num_parts, default_overhead(seq_lens, num_parts, rows))
    return tile_schedule(seq_lens, num_parts, overhead)


def default_overhead(seq_lens: jax.Array, num_parts: int, rows: int) -> int | jax.Array:
    """The overhead that suits an H100, a number or, where it depends on the lengths, a scalar; `rows` of a KV head.

    With more sequences than parts a high overhead keeps most sequences whole; fewer must be cut to fill the device. If
    a share of whole sequences for every part leaves hardly any part idle, the overhead is what it takes for that,
    provided that lengths are alike and cutting would not save more: partial results, and every part's second start,
    cost as much as `dear` blocks.
    """
    num_seqs = seq_lens.shape[0]
    low = FIXED_OVERHEAD_BLOCKS if num_seqs > num_parts else 2 if 16 * num_seqs > num_parts else 1
    share = -(-num_seqs // num_parts)
    slots = share * num_parts
    # Without a part to spare, those with short sequences always have room for a piece of the next.
    if slots == num_seqs or 8 * (slots - num_seqs) > num_parts:
        return low
    blocks = num_blocks(seq_lens)
    total = jnp.sum(blocks)
    # The payload is (total + num_seqs * overhead) / num_parts + overhead. A part takes `share` of the longest if
    # share * (longest + overhead) <= payload,
    missing = jnp.maximum(slots * jnp.max(blocks) - total, 0)
    needed = -(-missing // (num_parts + num_seqs - slots))
    # and begins no other sequence behind `share` of the shortest if
    # payload <= share * (shortest + overhead) + overhead.
    spare = jnp.maximum(total - slots * jnp.min(blocks), 0)
    needed_to_stop = jnp.minimum(-(-spare // (slots - num_seqs)), MOST_OVERHEAD_BLOCKS)
    dear = 8 if rows <= 32 else 20 if rows <= 128 else FIXED_OVERHEAD_BLOCKS
    # Lengths are alike if `needed`, about what the longest has above the mean, is at most a quarter of a part's work.
    alike = needed <= jnp.minimum(dear, total // (4 * num_parts))
    return jnp.where(alike, jnp.maximum(jnp.maximum(needed, needed_to_stop), low), low)


def num_blocks(seq_lens: jax.Array) -> jax.Array:
    """Of each length. One that no memory holds must not make the sum overflow: other sequences' parts hang on it."""
    lengths = jnp.maximum(seq_lens, 0)
    blocks = lengths // BLOCK_TOKENS + (lengths % BLOCK_TOKENS > 0)
    return jnp.minimum(blocks, MOST_BLOCKS // seq_lens.shape[0])


def tile_schedule(
    seq_lens: jax.Array, num_parts: int, overhead: int | jax.Array = FIXED_OVERHEAD_BLOCKS
) -> MLASchedule:
    """Schedule of [num_seqs] int32 lengths over `num_parts` parts."""
    num_seqs = seq_lens.shape[0]
    cost = num_blocks(seq_lens) + overhead
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(cost, dtype=jnp.int32)])
    total = start[-1]
    payload = jnp.maximum((total + (num_parts - 1)) // num_parts + overhead, 2 * overhead)

    # Where part k begins: on the line, then as a sequence and a block in it. The last row is where all work ends.
    begin = _part_begins(start, payload, num_parts, overhead)
    seq = jnp.sum(begin[:, None] >= start[None, 1:], axis=1, dtype=jnp.int32)
    block = begin - start[seq]

    # A sequence has one piece more than parts that begin inside it; a part's number among them counts from the
    # first part that does.
    inside = (block > 0)[:, None] & (begin[:, None] < start[None, :])
    num_splits = jnp.arange(num_seqs + 1, dtype=jnp.int32) + jnp.sum(inside[:-1], axis=0, dtype=jnp.int32)
    first_inside = jnp.sum(begin[None, :-1] <= start[seq[:-1], None], axis=1, dtype=jnp.int32)
    split = jnp.where(block[:-1] > 0, jnp.arange(num_parts) - first_inside + 1, 0)

    next_seq, next_block = seq[1:], block[1:]
    cut = next_block > 0
    end_idx = jnp.where(cut, next_seq, next_seq - 1)
    end_seqlen = jnp.where(cut, next_block * BLOCK_TOKENS, seq_lens[jnp.maximum(next_seq - 1, 0)])
    columns = [seq[:-1], block[:-1] * BLOCK_TOKENS, end_idx, end_seqlen, split]
    columns += [jnp.zeros(num_parts, jnp.int32)] * (METADATA_SIZE - len(columns))
    return MLASchedule(jnp.stack(columns, axis=1).astype(jnp.int32), num_splits)


def _part_begins(
    start: jax.Array, payload: jax.Array, num_parts: int, overhead: int | jax.Array
) -> jax.Array:
    """[num_parts + 1] positions at which the parts begin; `start` [num_seqs + 1] ends with the total."""
    num_seqs = start.shape[0] - 1
    stride = payload - overhead
    # From start j, the m-th part reaches up to start[j] + m * stride + overhead and hands over at
    # start[j] + m * stride at the earliest: it snaps to start i if that lies in between. The total is always reached.
    node = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    distance = start[None, :] - start[:, None]
    parts = jnp.maximum((distance - overhead + stride - 1) // stride, 1)
    snaps = (parts * stride <= distance) | (node == num_seqs)[None, :]
    # The fewest parts, then the last start: one minimum over a combined key.
    key = parts * (num_seqs + 1) + (num_seqs - node)[None, :]
    key = jnp.min(jnp.where(snaps & (node[None, :] > node[:, None]), key, jnp.iinfo(jnp.int32).max), axis=1)
    at_end = node == num_seqs
    hop_parts = jnp.where(at_end, 1, key // (num_seqs + 1))
    hop_node = jnp.where(at_end, num_seqs, num_seqs - key % (num_seqs + 1))

    hops = [(hop_node, hop_parts)]
    for _ in range(min(num_seqs, num_parts).bit_length() - 1):
        to, count = hops[-1]
        hops.append((to[to], count + count[to]))
    at = jnp.zeros(num_parts + 1, jnp.int32)
    left = jnp.arange(num_parts + 1, dtype=jnp.int32)
    for to, count in reversed(hops):
        go = count[at] <= left
        left = jnp.where(go, left - count[at], left)
        at = jnp.where(go, to[at], at)
    return jnp.minimum(start[at] + left * stride, start[-1])
