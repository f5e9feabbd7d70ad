"""Which blocks of a mask are empty, which are full and which are neither: what kernels skip, and where they look.

Blocks are told apart by interval arithmetic on the mask's own steps (intervals.py). Those that intervals leave open are
looked at, pair by pair, and no others are; so nothing of the size of the mask is ever made.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._tile import sharding
from pallas_attn._tile.triton import ceil_div
from pallas_attn.mods import intervals
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Number, Program
from pallas_attn.mods.simplify import within
from pallas_attn.mods.trace import trace

FUNCTION = "block_mask"
FULL, PARTIAL, EMPTY = range(3)
SMALLEST, LARGEST = 16, 1024  # tokens of a block
LONGEST = 2**30
TOGETHER = 2**20
"""Pairs that are looked at in one step."""


class Lists(NamedTuple):
    """Of each block of one side, the blocks of the other: the full ones, then the partial, then the rest."""

    order: Any
    """[batch or 1, heads or 1, own blocks, other blocks]"""
    runs: Any
    """Likewise: how many blocks from here on lie side by side, so that a kernel walks over them without looking."""
    ends: Any
    """[batch or 1, heads or 1, own blocks, 2]: of the full ones and of the partial."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask_mod with the blocks that it leaves; made by `block_mask`, inside jit too, and shared by any number of
    calls. A pytree.

    of_queries, of_keys: which keys' blocks each block of queries sees, and the other way round.
    arrays: what the mask_mod captures.
    batch, num_heads: that it was made for, None where its mask_mod does not tell them apart.
    program, q_len, kv_len, block_q, block_kv: static, as are these two.
    """

    of_queries: Lists
    of_keys: Lists
    arrays: tuple[Any, ...]
    program: Program
    batch: int | None
    num_heads: int | None
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[batch or 1, heads or 1, blocks of queries, blocks of keys]"""
        return self.of_queries.order.shape

    def kinds(self) -> jax.Array:
        """int8, of `shape`: 0 is a full block, 1 a partial one, 2 one that is empty."""
        place = jnp.arange(self.shape[-1])
        ends = self.of_queries.ends
        sorted_kinds = (place >= ends[..., :1]).astype(jnp.int8) + (place >= ends[..., 1:]).astype(jnp.int8)
        back = jnp.argsort(self.of_queries.order, axis=-1)
        return jnp.take_along_axis(sorted_kinds, back, axis=-1)


jax.tree_util.register_dataclass(
    BlockMask,
    data_fields=["of_queries", "of_keys", "arrays"],
    meta_fields=["program", "batch", "num_heads", "q_len", "kv_len", "block_q", "block_kv"],
)


def block_mask(
    mask_mod: Any,
    *,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    num_heads: int = 1,
    block_q: int = 128,
    block_kv: int = 128,
    exact: bool = True,
) -> BlockMask:
    """Which blocks of queries and keys a mask_mod leaves, for `flash_attention(block_mask=...)`.

    Works inside jit, where it is made of what the mask_mod captures, and shared by all layers that are given it. In
    memory it takes 16 bytes a block, or 256 KB for each 16k x 16k and head; nothing of size q_len x kv_len is made.

    Args:
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool of int32 scalars: whether the query sees the key. It
            is traced once, at scalars; its operations are elementwise, and of captured arrays it reads single elements.
        q_len, kv_len: of the calls that it is for.
        batch, num_heads: likewise. They matter where the mask_mod uses its `batch` or `head`.
        block_q, block_kv: tokens of a block, powers of two from 16 to 1024. A kernel's tiles lie within blocks.
        exact: whether blocks that intervals leave open are looked at. False is quicker, and as exact where masks depend
            on positions and on ascending ids; elsewhere blocks that are empty or full may be visited as partial ones.
            `flash_attention(mask_mod=...)` uses False.

    Raises:
        TypeError: a mask_mod that is no such function, or an argument of another type.
        ValueError: a mask_mod of other operations, or a wrong size.
    """
    check = ArgumentChecker(FUNCTION)
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("num_heads", num_heads)):
        check.count(name, value, LONGEST)
    for name, value in (("block_q", block_q), ("block_kv", block_kv)):
        check.int_within(name, value, SMALLEST, LARGEST)
        if value & (value - 1):
            check.fail(name, f"a power of two from {SMALLEST} to {LARGEST}", str(value))
    check.flag("exact", exact)
    traced = trace(FUNCTION, "mask_mod", mask_mod)
    sizes = Sizes(int(batch), int(num_heads), int(q_len), int(kv_len), int(block_q), int(block_kv))
    return of_program(traced.program, traced.arrays, sizes, bool(exact))


class Sizes(NamedTuple):
    batch: int
    num_heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip((BATCH, HEAD, QUERY, KEY), self[:4], strict=True))


def of_program(program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, exact: bool) -> BlockMask:
    # Of one sequence or head, what is left of a program no longer asks which it is.
    batch, heads = (size if which in program.used else None for which, size in sizes.lengths[:2])
    program = within(program, sizes.lengths)
    of_queries, of_keys = _lists(arrays, program=program, sizes=sizes, exact=exact)
    return BlockMask(
        of_queries,
        of_keys,
        arrays,
        program,
        batch,
        heads,
        sizes.q_len,
        sizes.kv_len,
        sizes.block_q,
        sizes.block_kv,
    )


@functools.partial(jax.jit, static_argnames=("program", "sizes", "exact"))
def _lists(
    arrays: tuple[jax.Array, ...], *, program: Program, sizes: Sizes, exact: bool
) -> tuple[Lists, Lists]:
    kinds = _kinds(program, arrays, sizes, exact)
    return _ordered(kinds), _ordered(jnp.swapaxes(kinds, 2, 3))


def _ordered(kinds: jax.Array) -> Lists:
    count = kinds.shape[-1]
    keys = jnp.sort(kinds * jnp.int32(count) + jnp.arange(count, dtype=jnp.int32), axis=-1)
    ends = [jnp.sum(kinds <= kind, axis=-1, dtype=jnp.int32) for kind in (FULL, PARTIAL)]
    # Kinds lie further apart than blocks, but for the last of one and the first of the next.
    order = keys % count
    last = (jnp.diff(keys, axis=-1, append=-1) != 1) | (order == count - 1)
    place = jnp.arange(count, dtype=jnp.int32)
    runs = lax.cummin(jnp.where(last, place + 1, count), axis=kinds.ndim - 1, reverse=True) - place
    return Lists(order, runs, jnp.stack(ends, axis=-1))


def _kinds(program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, exact: bool) -> jax.Array:
    """[batch or 1, heads or 1, blocks of queries, blocks of keys] int8."""
    batch, heads = (size if which in program.used else 1 for which, size in sizes.lengths[:2])
    rows, columns = ceil_div(sizes.q_len, sizes.block_q), ceil_div(sizes.kv_len, sizes.block_kv)
    known = {
        BATCH: intervals.exactly(jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1)),
        HEAD: intervals.exactly(jnp.arange(heads, dtype=jnp.int32).reshape(-1, 1, 1)),
        QUERY: _interval(jnp.arange(rows, dtype=jnp.int32)[:, None], sizes.block_q, sizes.q_len),
        KEY: _interval(jnp.arange(columns, dtype=jnp.int32)[None, :], sizes.block_kv, sizes.kv_len),
    }
    (result,) = program.results
    if isinstance(result, Number):
        low = high = jnp.asarray(result.value)
    else:
        of_blocks = {QUERY: sizes.block_q, KEY: sizes.block_kv}
        low, high = intervals.evaluate(program, arrays, known, of_blocks)[result]
    # What is full but for tokens that do not exist is a tile that has to be looked at.
    whole = (known[QUERY].high - known[QUERY].low == sizes.block_q - 1) & (
        known[KEY].high - known[KEY].low == sizes.block_kv - 1
    )
    kinds = jnp.where(low & whole, FULL, jnp.where(high, PARTIAL, EMPTY)).astype(jnp.int8)
    kinds = jnp.broadcast_to(kinds, (batch, heads, rows, columns))
    if isinstance(result, Number) or not exact:
        return kinds
    return _decided(program, arrays, sizes, kinds, jnp.broadcast_to(~low & high, kinds.shape))


def _interval(index: jax.Array, block: int, length: int) -> intervals.Interval:
    first = index * block
    return intervals.Interval(first, jnp.minimum(first + (block - 1), length - 1))


def _decided(
    program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, kinds: jax.Array, open_ones: jax.Array
) -> jax.Array:
    """With the blocks that are open looked at, some at a time."""
    count = min(max(TOGETHER // (sizes.block_q * sizes.block_kv), 1), kinds.size)
    number = jnp.sum(open_ones, dtype=jnp.int32)
    (places,) = jnp.nonzero(
        open_ones.ravel(), size=ceil_div(kinds.size, count) * count, fill_value=kinds.size
    )
    query = jnp.arange(sizes.block_q, dtype=jnp.int32)[:, None]
    key = jnp.arange(sizes.block_kv, dtype=jnp.int32)[None, :]

    def step(i: jax.Array, kinds: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(places, i * count, count)
        batch, head, row, column = (
            x.astype(jnp.int32)[:, None, None]
            for x in jnp.unravel_index(jnp.minimum(some, kinds.size - 1), kinds.shape)
        )
        query_at, key_at = row * sizes.block_q + query, column * sizes.block_kv + key
        real = (query_at < sizes.q_len) & (key_at < sizes.kv_len)
        known = {
            BATCH: batch,
            HEAD: head,
            QUERY: jnp.minimum(query_at, sizes.q_len - 1),
            KEY: jnp.minimum(key_at, sizes.kv_len - 1),
        }
        (seen,) = evaluate(program, arrays, known)
        seen = jnp.broadcast_to(seen, (count, sizes.block_q, sizes.block_kv))
        full, empty = jnp.all(seen & real, axis=(1, 2)), ~jnp.any(seen & real, axis=(1, 2))
        found = jnp.where(full, FULL, jnp.where(empty, EMPTY, PARTIAL)).astype(jnp.int8)
        return kinds.ravel().at[some].set(found, mode="drop").reshape(kinds.shape)

    carry = sharding.vary(kinds, sharding.varying_axes(kinds, arrays))
    return lax.fori_loop(0, ceil_div(number, count), step, carry)
