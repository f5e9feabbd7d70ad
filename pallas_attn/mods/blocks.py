"""Which blocks of a mask are empty, which are full and which are neither: what kernels skip, and where they look.

Blocks are told apart by interval arithmetic on the mask's own steps (intervals.py). Those that intervals leave open are
looked at, pair by pair, and no others are; so nothing of the size of the mask is ever made.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import sharding
from pallas_attn._call.checks import ArgumentChecker, is_traced
from pallas_attn._call.sizes import ceil_div
from pallas_attn.mods import bits as pairs
from pallas_attn.mods import intervals, lists
from pallas_attn.mods.bits import Bits, Sizes
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.lists import EMPTY, FULL, PARTIAL, Lists
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, Number, Program
from pallas_attn.mods.simplify import within
from pallas_attn.mods.trace import trace

FUNCTION = "block_mask"
SMALLEST, LARGEST = 16, 1024  # tokens of a block
LEAST_OF_BITS = (128, 64)
"""Queries and keys of a block whose pairs have bits."""
LONGEST = 2**30
OPEN = EMPTY + 1
"""Not a kind: that of a block is not known so far."""
SPREAD = (0.0, 0.09, 0.27, 0.38, 0.59, 0.73, 0.87, 1.0)
"""Where in a block the tokens are that are looked at first: at its ends, and at distances of many remainders."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask_mod with the blocks that it leaves; made by `block_mask`, inside jit too, and shared by any number of
    calls. A pytree.

    of_queries, of_keys: which keys' blocks each block of queries sees, and the other way round.
    arrays: what the mask_mod captures.
    batch, num_heads: that it was made for, None where its mask_mod does not tell them apart.
    program, q_len, kv_len, block_q, block_kv: static, as are these two.
    bits: of `max_partial` blocks that are seen in part, which query sees which key; or None.
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
    bits: Bits | None = None

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
    data_fields=["of_queries", "of_keys", "arrays", "bits"],
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
    max_partial: int | None = None,
) -> BlockMask:
    """Which blocks of queries and keys a mask_mod leaves, for `flash_attention(block_mask=...)`.

    Works inside jit, where it is made of what the mask_mod captures, and shared by all layers that are given it. In
    memory it takes 16 bytes a block, or 256 KB for each 16k x 16k and head, and with `max_partial` an eighth of a byte
    for each pair of so many blocks, 2 KB of one of 128 x 128; nothing of size q_len x kv_len is made.

    Args:
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool of int32 scalars: whether the query sees the key. It
            is traced once, at scalars; its operations are elementwise, and of captured arrays it reads single elements.
        q_len, kv_len: of the calls that it is for.
        batch, num_heads: likewise. They matter where the mask_mod uses its `batch` or `head`.
        block_q, block_kv: tokens of a block, powers of two from 16 to 1024. A kernel's tiles lie within blocks.
        exact: whether blocks that intervals leave open are looked at. False is quicker, and as exact where masks depend
            on positions and on ascending ids; elsewhere blocks that are empty or full may be visited as partial ones.
            `flash_attention(mask_mod=...)` uses False.
        max_partial: for implementation "cuda", which cannot ask a mask_mod: of so many blocks that are seen in part, of
            all heads, it is noted which query sees which key. Blocks are then of at least 128 queries and 64 keys.
            With more such blocks than that, which outside jit is an error, queries of those beyond get NaN by "cuda".
            Other implementations pay no attention to it.

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
    if max_partial is not None:
        check.count("max_partial", max_partial, LONGEST)
        if block_q < LEAST_OF_BITS[0] or block_kv < LEAST_OF_BITS[1]:
            of_bits, got = (f"{q} queries and {kv} keys" for q, kv in (LEAST_OF_BITS, (block_q, block_kv)))
            check.fail("max_partial", f"None where blocks are smaller than {of_bits}", f"one of {got}")
    traced = trace(FUNCTION, "mask_mod", mask_mod)
    sizes = Sizes(int(batch), int(num_heads), int(q_len), int(kv_len), int(block_q), int(block_kv))
    made = of_program(traced.program, traced.arrays, sizes, bool(exact), max_partial)
    if max_partial is not None and not is_traced(made.of_queries.ends):
        full, partial = jnp.moveaxis(made.of_queries.ends, -1, 0)
        if (number := int(jnp.sum(partial - full))) > max_partial:
            check.fail(
                "max_partial", f"at least {number}, the blocks that are seen in part", str(max_partial)
            )
    return made


def of_program(
    program: Program,
    arrays: tuple[jax.Array, ...],
    sizes: Sizes,
    exact: bool,
    max_partial: int | None = None,
) -> BlockMask:
    # Of one sequence or head, what is left of a program no longer asks which it is.
    batch, heads = (size if which in program.used else None for which, size in sizes.lengths[:2])
    program = within(program, sizes.lengths)
    of_queries, of_keys, bits = _lists(
        arrays, program=program, sizes=sizes, exact=exact, max_partial=max_partial
    )
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
        bits,
    )


@functools.partial(jax.jit, static_argnames=("program", "sizes", "exact", "max_partial"))
def _lists(
    arrays: tuple[jax.Array, ...], *, program: Program, sizes: Sizes, exact: bool, max_partial: int | None
) -> tuple[Lists, Lists, Bits | None]:
    kinds = _kinds(program, arrays, sizes, exact)
    bits = None
    if max_partial is not None:
        bits = pairs.of_partial(program, arrays, sizes, kinds == PARTIAL, max_partial)
    return *lists.of_both_sides(kinds), bits


def _kinds(program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, exact: bool) -> jax.Array:
    """[batch or 1, heads or 1, blocks of queries, blocks of keys] int8."""
    batch, heads = (size if which in program.used else 1 for which, size in sizes.lengths[:2])
    rows, columns = ceil_div(sizes.q_len, sizes.block_q), ceil_div(sizes.kv_len, sizes.block_kv)
    known = {
        BATCH: intervals.exactly(jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1)),
        HEAD: intervals.exactly(jnp.arange(heads, dtype=jnp.int32).reshape(-1, 1, 1)),
        QUERY: _interval(np.arange(rows, dtype=np.int32)[:, None], sizes.block_q, sizes.q_len),
        KEY: _interval(np.arange(columns, dtype=np.int32)[None, :], sizes.block_kv, sizes.kv_len),
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
    kinds = jnp.where(~low & high & ~_seen_in_part(program, arrays, sizes, known, whole), OPEN, kinds)
    kinds = sharding.vary(kinds, sharding.varying_axes(kinds, arrays))
    return lax.cond(
        jnp.any(kinds == OPEN),
        lambda kinds: _looked_at(program, arrays, sizes, kinds),
        lambda kinds: kinds,
        kinds,
    )


def _interval(index: np.ndarray, block: int, length: int) -> intervals.Interval:
    """A constant: a kernel less before what needs it."""
    first = index * np.int32(block)
    return intervals.Interval(first, np.minimum(first + np.int32(block - 1), np.int32(length - 1)))


def _seen_in_part(
    program: Program,
    arrays: tuple[jax.Array, ...],
    sizes: Sizes,
    known: dict[int, intervals.Interval],
    whole: np.ndarray,
) -> jax.Array:
    """Of all blocks: whether a few of their pairs show it. It spares looking at every pair of most that intervals leave
    open."""
    count = len(SPREAD)
    at = {which: known[which].low[..., None] for which in (BATCH, HEAD)}
    for which, block, index in (
        (QUERY, sizes.block_q, np.repeat(range(count), count)),
        (KEY, sizes.block_kv, np.tile(range(count), count)),
    ):
        ahead = np.round((block - 1) * np.asarray(SPREAD)[index]).astype(np.int32)
        at[which] = np.minimum(known[which].low[..., None] + ahead, known[which].high[..., None])
    (seen,) = evaluate(program, arrays, at)
    number = jnp.sum(seen, axis=-1, dtype=jnp.int32)  # one sum, where any and all would be two
    return (number > 0) & ~((number == count * count) & whole)


def _looked_at(program: Program, arrays: tuple[jax.Array, ...], sizes: Sizes, kinds: jax.Array) -> jax.Array:
    """With those that are open looked at, some at a time."""
    count = min(sizes.together, kinds.size)
    places, counts = pairs.places_of(kinds == OPEN, ceil_div(kinds.size, count) * count)

    def step(i: jax.Array, kinds: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(places, i * count, count)
        seen, real = pairs.seen_in_blocks(program, arrays, sizes, kinds.shape, some)
        full, empty = jnp.all(seen & real, axis=(1, 2)), ~jnp.any(seen & real, axis=(1, 2))
        found = jnp.where(full, FULL, jnp.where(empty, EMPTY, PARTIAL)).astype(jnp.int8)
        return kinds.ravel().at[some].set(found).reshape(kinds.shape)

    return lax.fori_loop(0, ceil_div(counts[-1], count), step, kinds)
