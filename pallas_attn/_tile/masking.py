"""Which keys a query sees, and what is added to its logits: small pure functions of token positions.

Kernels and references compose them at trace time, so kernels contain no rule themselves. The order is fixed: scale,
soft cap, ALiBi, then masks. Positions are absolute in the sequence; arrays broadcast.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import check_int, fail

MOST_STRIDE_TOKENS = 2**30  # positions are int32
MOST_STEPS = 2**29  # and so are sums of blocks and offsets


@dataclasses.dataclass(frozen=True)
class LocalStride:
    """Block-sparse rule of vLLM's PagedAttention: a local band of blocks plus every `vert_stride`-th block.

    Block j of `block_size` tokens is kept when (j + offset) % vert_stride == 0, or when
    j > (seq_len - 1) // block_size - local_blocks. The offset depends on the head:
    (tp_rank * num_heads + head) * head_sliding_step + 1 if head_sliding_step >= 0, else
    (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1.

    block_size: tokens of a block, a power of two >= 16.
    local_blocks: newest blocks kept, >= 1.
    vert_stride: >= 1 (1 keeps every block), at most 2**30 tokens.
    head_sliding_step: how the pattern moves from head to head.
    tp_rank: this shard's place in tensor parallelism; head counts are the shard's.
    """

    block_size: int
    local_blocks: int
    vert_stride: int
    head_sliding_step: int = 0
    tp_rank: int = 0

    def __post_init__(self):
        for name in ("block_size", "local_blocks", "vert_stride", "head_sliding_step", "tp_rank"):
            check_int("LocalStride", name, getattr(self, name))
            # Products of numpy's narrow integers would overflow.
            object.__setattr__(self, name, int(getattr(self, name)))
        size = self.block_size
        if size < 16 or size & (size - 1):
            fail("LocalStride", "block_size", "a power of two >= 16", str(size))
        for name, least in (("local_blocks", 1), ("vert_stride", 1), ("tp_rank", 0)):
            check_int("LocalStride", name, getattr(self, name), least)
        for name in ("local_blocks", "head_sliding_step", "tp_rank"):
            if abs(getattr(self, name)) > MOST_STRIDE_TOKENS:
                fail("LocalStride", name, "within 2**30", str(getattr(self, name)))
        if self.vert_stride * size > MOST_STRIDE_TOKENS:
            most = MOST_STRIDE_TOKENS // size
            fail("LocalStride", "vert_stride", f"at most {most} (2**30 tokens)", str(self.vert_stride))

    def offset(self, head, kv_head, *, num_heads: int, num_kv_heads: int):
        """The pattern's offset for a head (traced or not), up to whole strides."""
        mine, heads = (head, num_heads) if self.head_sliding_step >= 0 else (kv_head, num_kv_heads)
        first = (self.tp_rank * heads * abs(self.head_sliding_step) + 1) % self.vert_stride
        return self.steps(mine, heads) + first

    def steps(self, number, end: int):
        """How far the pattern shifts over `number` heads, less than `end` (traced or not), up to whole strides."""
        step = abs(self.head_sliding_step) % self.vert_stride
        if end * step <= MOST_STEPS:
            return number * step
        # A sum over the number's bits, each term less than a stride.
        bits = range((end - 1).bit_length())
        return sum((number >> bit & 1) * ((step << bit) % self.vert_stride) for bit in bits)

    def kept(self, position, seq_len, offset):
        """Whether the block of `position` is kept."""
        block = position // self.block_size
        remote = (block + offset) % self.vert_stride == 0
        return remote | (block >= self.first_local(seq_len))

    def first_local(self, seq_len):
        """First block of the local band (below 0 when the band covers everything)."""
        return (seq_len - 1) // self.block_size - self.local_blocks + 1

    def distinct_offsets(self, heads: int) -> int:
        """Number of different remote patterns among `heads` neighbouring query heads of one KV head."""
        step = max(self.head_sliding_step, 0)
        return min(heads, self.vert_stride // math.gcd(step, self.vert_stride))


class Rules(NamedTuple):
    """The static part of a call's rules. Slopes, sinks and a window that is known at run time only are operands; a
    kernel puts such a window in here."""

    sliding_window: int | jax.Array | None = None
    softcap: float | None = None
    block_sparse: LocalStride | None = None

    def with_window(self, sliding_window: jax.Array | None) -> "Rules":
        """With the operand, if there is one."""
        return self if sliding_window is None else self._replace(sliding_window=sliding_window)


def cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """softcap * tanh(logits / softcap): keeps logits within (-softcap, softcap)."""
    return logits if softcap is None else softcap * jnp.tanh(logits * (1.0 / softcap))


def alibi(slope: jax.Array, key_position: jax.Array, query_position: jax.Array) -> jax.Array:
    """Bias that falls with distance; 0 at the query's own position."""
    return slope * (key_position - query_position).astype(jnp.float32)


def causal(key_position: jax.Array, query_position: jax.Array) -> jax.Array:
    return key_position <= query_position


def in_window(key_position: jax.Array, query_position: jax.Array, window: int | jax.Array) -> jax.Array:
    """The newest `window` tokens, the query's own included."""
    return query_position - key_position < window


def window_start(query_position, window: int | jax.Array | None):
    """First position that a query sees."""
    return 0 * query_position if window is None else jnp.maximum(query_position - (window - 1), 0)


def within(positions: jax.Array, end: jax.Array) -> jax.Array:
    """Which positions are before `end`: filled cache slots."""
    return positions < end


def usable_pages(pages: jax.Array, num_pages: int) -> jax.Array:
    """Page ids that may be dereferenced."""
    return (pages >= 0) & (pages < num_pages)


def ascending(bounds: jax.Array) -> jax.Array:
    """Sequence bounds [num_seqs + 1], unchanged if they ascend; otherwise all 0 (no sequence has tokens), since it is
    undefined whose a token is."""
    return jnp.where(jnp.all(bounds[1:] >= bounds[:-1]), bounds, 0)


def apply(logits: jax.Array, visible: jax.Array) -> jax.Array:
    return jnp.where(visible, logits, -jnp.inf)
