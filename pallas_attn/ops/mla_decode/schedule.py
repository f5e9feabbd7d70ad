"""The tile scheduler: which parts of the GPU process which KV blocks of which sequences.

One part is a streaming multiprocessor's share (per KV head and block of 64 query rows). All parts get the same
payload, counted in blocks of 64 tokens, where starting on a sequence costs an overhead of some blocks more; sequences
are dealt out in order, so a part ends anywhere inside a sequence and the next one goes on there.

How that is computed, without a loop over the parts, is `_split/schedule.py`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from pallas_attn._call import partition, symbolic
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.device import current_device
from pallas_attn._call.operands import dims, operands
from pallas_attn._split import schedule
from pallas_attn._types import Array, SeqLens
from pallas_attn.ops.mla_decode import schedule_cuda
from pallas_attn.ops.mla_decode.schedule_cuda import METADATA_SIZE

BLOCK_TOKENS = 64
BLOCK_ROWS = 64
FIXED_OVERHEAD_BLOCKS = 5
MOST_BLOCKS = 2**30  # of a batch
MOST_PARTS, MOST_OVERHEAD_BLOCKS = 4096, 1024


class MLASchedule(NamedTuple):
    """A schedule for one set of lengths: compute it once per step, use it in every layer.

    tile_scheduler_metadata: [num_sm_parts, 8] int32; a part's columns are begin_idx, begin_seqlen, end_idx,
        end_seqlen, begin_n_split_idx and three zeros. It serves sequences begin_idx to end_idx, both included, the
        first from token begin_seqlen on and the last up to token end_seqlen. begin_n_split_idx is the number of
        its first split among the splits of begin_idx. A part without work has begin_idx = num_seqs.
    num_splits: [num_seqs + 1] int32; num_splits[i] splits belong to the sequences before i.
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
    """The schedule of `mla_decode` for these lengths, on the device and inside jit: on an sm_90 GPU with the CUDA
    library by one small kernel (for up to 256 sequences), elsewhere by operations of jnp, with the same result.

    Args:
        seq_lens: [num_seqs] int32; negative lengths count as 0.
        num_heads, num_kv_heads: query heads and KV heads.
        q_len: query tokens per sequence.
        num_parts: parts of equal work to cut the batch into, 1 to 4096; None takes what fills the device.
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
    # More would cost memory or overflow int32, for nothing.
    for name, value, most in (
        ("num_parts", num_parts, MOST_PARTS),
        ("overhead_blocks", overhead_blocks, MOST_OVERHEAD_BLOCKS),
    ):
        if value is not None:
            check.count(name, value, most)
    by_kernel = schedule_cuda.serves(seq_lens.shape[0])
    return MLASchedule(
        *partition.run(
            "mla_schedule",
            _schedule,
            _Operands(seq_lens=seq_lens),
            ("parts columns", "sums"),
            static={
                "num_parts": num_parts,
                "overhead": overhead_blocks,
                "rows": rows,
                "by_kernel": by_kernel,
            },
            implementation="cuda" if by_kernel else "xla",
        )
    )


@operands
class _Operands:
    seq_lens: Array = dims("lengths")  # replicated on every device


def _schedule(
    operands: _Operands, *, num_parts: int, overhead: int | None, rows: int, by_kernel: bool
) -> MLASchedule:
    seq_lens = operands.seq_lens
    if by_kernel:
        return MLASchedule(*schedule_cuda.mla_schedule_cuda(seq_lens, num_parts, overhead, rows))
    if overhead is None:
        return tile_schedule(seq_lens, num_parts, default_overhead(seq_lens, num_parts, rows))
    return tile_schedule(seq_lens, num_parts, overhead)


def default_overhead(seq_lens: jax.Array, num_parts: int, rows: int) -> int | jax.Array:
    """The overhead that suits an H100, a number or, where it depends on the lengths, a scalar; `rows` of a KV head.

    With more sequences than parts, a high overhead keeps most sequences whole; with fewer, they must be cut to fill the
    device. If dealing whole sequences leaves hardly any part idle, the overhead is chosen to do that, provided that
    lengths are similar and cutting would not save more: partial results, and every part's second start, cost about
    `dear` blocks.
    """
    num_seqs = seq_lens.shape[0]
    if symbolic.is_open(num_seqs):
        return FIXED_OVERHEAD_BLOCKS
    low = FIXED_OVERHEAD_BLOCKS if num_seqs > num_parts else 2 if 16 * num_seqs > num_parts else 1
    share = -(-num_seqs // num_parts)
    places = share * num_parts  # of whole sequences
    # Without a spare part, parts with short sequences always have room for a split of the next.
    if places == num_seqs or 8 * (places - num_seqs) > num_parts:
        return low
    blocks = num_blocks(seq_lens)
    total = jnp.sum(blocks)
    # The payload is (total + num_seqs * overhead) / num_parts + overhead. A part takes `share` of the longest if
    # share * (longest + overhead) <= payload,
    missing = jnp.maximum(places * jnp.max(blocks) - total, 0)
    needed = -(-missing // (num_parts + num_seqs - places))
    # and begins no other sequence after `share` of the shortest if payload <= share * (shortest + overhead) + overhead.
    spare = jnp.maximum(total - places * jnp.min(blocks), 0)
    needed_to_stop = jnp.minimum(-(-spare // (places - num_seqs)), MOST_OVERHEAD_BLOCKS)
    dear = 8 if rows <= 32 else 20 if rows <= 128 else FIXED_OVERHEAD_BLOCKS
    # Lengths are similar if `needed`, about the longest minus the mean, is at most a quarter of a part's work.
    alike = needed <= jnp.minimum(dear, total // (4 * num_parts))
    return jnp.where(alike, jnp.maximum(jnp.maximum(needed, needed_to_stop), low), low)


def num_blocks(seq_lens: jax.Array) -> jax.Array:
    """Blocks of each length, clipped so that an impossibly large one cannot overflow the sum, on which all parts
    depend."""
    lengths = jnp.maximum(seq_lens, 0)
    blocks = lengths // BLOCK_TOKENS + (lengths % BLOCK_TOKENS > 0)
    return jnp.minimum(blocks, MOST_BLOCKS // seq_lens.shape[0])


def tile_schedule(
    seq_lens: jax.Array, num_parts: int, overhead: int | jax.Array = FIXED_OVERHEAD_BLOCKS
) -> MLASchedule:
    """Schedule of [num_seqs] int32 lengths over `num_parts` parts."""
    dealt = schedule.deal(num_blocks(seq_lens), num_parts, overhead)
    begin_seq, begin_block = dealt.seq[:-1], dealt.block[:-1]
    next_seq, next_block = dealt.seq[1:], dealt.block[1:]
    cut = next_block > 0
    end_idx = jnp.where(cut, next_seq, next_seq - 1)
    end_seqlen = jnp.where(cut, next_block * BLOCK_TOKENS, seq_lens[jnp.maximum(next_seq - 1, 0)])
    columns = [begin_seq, begin_block * BLOCK_TOKENS, end_idx, end_seqlen, dealt.first_split]
    columns += [jnp.zeros(num_parts, jnp.int32)] * (METADATA_SIZE - len(columns))
    return MLASchedule(jnp.stack(columns, axis=1).astype(jnp.int32), dealt.num_splits)
