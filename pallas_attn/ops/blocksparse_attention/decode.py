"""Block-sparse decode in Pallas: sequences with one query.

One program serves some heads of a group, over one split of one sequence, and reads each block that any of them sees
once. Each head's blocks ascend, so the program merges the heads' sorted lists: the next block is the least that any
head has next, and the heads that list it advance. A split is a range of blocks, the same for all heads; a sequence in
several splits leaves float32 partial results, which are merged.

How many different blocks the heads list is not known in advance, only bounded by the sum of their lists and by the
width of the range. The loop runs as often as that bound; after the last block it reads nothing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.configs import SplitKVConfig
from pallas_attn._call.sizes import ceil_div, next_power_of_2
from pallas_attn._split import merge, result
from pallas_attn._split.problem import SplitKVProblem
from pallas_attn._split.splits import Cut
from pallas_attn._tile import logits, masking, rows, softmax, triton
from pallas_attn.ops.blocksparse_attention.config import DECODE_ROWS
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import (
    Blocks,
    Keys,
    Problem,
    divided,
    first_query,
)

NONE = np.int32(2**31 - 1)  # no block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits(SplitKVProblem):
    """How results are stored: every sequence has the same number of splits, some of which may be empty."""

    def num_tiles(self, seq_len: jax.Array) -> jax.Array:
        return 0 * seq_len + self.config.num_splits

    @property
    def num_places(self) -> int:
        return self.num_seqs * self.config.num_splits if self.config.num_splits > 1 else 0


class OfOneQuery(NamedTuple):
    """The splits of sequences with one query; a cut's sequence is its token."""

    problem: Problem
    ends: Any
    """Ref to cu_q_lens, where the call is mixed."""

    def cut(self, which: jax.Array) -> Cut:
        token, one = _token(self.problem, self.ends, which)
        count = 0 * which + self.problem.config.num_splits
        return Cut(token, which * count, jnp.where(one, count, 0))


def decode(
    operands: Operands,
    *,
    problem: Problem,
    lowering: triton.Lowering,
    into: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """As `prefill`, (out, lse), of sequences with one query. In a mixed call `into` are its results, which are filled
    in, in place."""
    config = problem.config
    stored = Splits(
        num_seqs=problem.num_seqs,
        q_len=1,
        num_heads=problem.num_heads,
        max_pages=1,
        pool=problem.pool,
        scale=problem.scale,
        config=SplitKVConfig(DECODE_ROWS, config.decode_block_kv, config.num_splits),
    )
    query, before = operands.query, len(jax.tree.leaves(operands))
    outputs = triton.kernel_call(
        functools.partial(_decode_kernel, problem=problem),
        operands,
        into,
        name="pallas_attn_blocksparse_decode",
        grid=(problem.num_heads // problem.decode_heads, problem.num_seqs, config.num_splits),
        # Tokens are laid end to end, as in prefill.
        out_shape=result.shapes(
            stored, problem.pool.head_dim, query.dtype, final=query.shape[:2], parts=True
        ),
        input_output_aliases={before + i: i for i in range(len(into))},
        num_warps=config.decode_warps,
        num_stages=config.decode_stages,
        lowering=lowering,
    )
    return merge.merge(
        outputs,
        (operands.cu_q_lens if problem.kinds == "mixed" else None,),
        functools.partial(OfOneQuery, problem),
        name="pallas_attn_blocksparse_combine",
        problem=stored,
        num_cut=problem.num_seqs,
        most_splits=config.num_splits,
        rows_of=functools.partial(_rows_to_merge, stored),
        lowering=lowering,
        scale=logits.natural_scale(problem.rules, problem.scale, None),
    )


def _rows_to_merge(
    stored: Splits, _ends: Any, token: jax.Array, flat: jax.Array
) -> tuple[rows.Rows, tuple[jax.Array, ...]]:
    return stored.rows_across_heads(flat), (token + 0 * flat,)


class Listed(NamedTuple):
    """What a head sees of a split: entries [next, stop) of its row; `column` is that of `next`, or NONE."""

    blocks: Blocks
    next: jax.Array
    stop: jax.Array
    column: jax.Array

    def at(self, entry: jax.Array) -> "Listed":
        column = self.blocks.column(entry)
        return self._replace(next=entry, column=jnp.where(entry < self.stop, column, NONE))


def _decode_kernel(refs: Operands, _into, *out_refs, problem: Problem):
    some_heads, seq, split = (triton.program_id(axis) for axis in range(3))
    token, one = _token(problem, refs.cu_q_lens, seq)
    triton.when(one)(
        lambda: _serve(
            refs, *out_refs, some_heads=some_heads, seq=seq, split=split, token=token, problem=problem
        )
    )


def _token(problem: Problem, ends: Any, seq: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
    """(a sequence's token, whether it has that one alone)."""
    if problem.kinds == "decode":
        return seq, True
    token, end = (triton.load(ends.at[seq + i]) for i in (np.int32(0), np.int32(1)))
    token = first_query(seq, token)
    return token, (end == token + 1) & (token >= 0) & (token < problem.num_tokens)


def _serve(
    refs: Operands, *out_refs, some_heads, seq, split, token, problem: Problem
):  # fmt: skip
    """Attends from some heads' queries at `token` to a split of a sequence and writes the result."""
    config, heads = problem.config, problem.decode_heads
    first_head = some_heads * heads
    kv_head = first_head // problem.group
    k_start, k_len, bad_len = _sequence(problem, refs, seq)
    lane = jnp.arange(DECODE_ROWS)
    mine = rows.Rows(first_head % problem.group + lane, lane < heads, kv_head, 0 * lane, first_head + lane)
    dims = problem.dims
    q = rows.load(refs.query, mine, (token,), dims)

    listed, width, bad = _listed(refs.layout, first_head, k_len, split, problem)
    keys = Keys(problem, refs, seq, k_start, kv_head)
    block_kv = config.decode_block_kv
    tiles = refs.layout.block_size // block_kv

    def step(i, carry):
        state, listed = carry
        part = divided(i, tiles)[1]
        column = functools.reduce(jnp.minimum, [one.column for one in listed])
        has = [one.column == column for one in listed]
        first = jnp.where(column == NONE, 0, column * refs.layout.block_size + part * block_kv)
        position = first + jnp.arange(block_kv)
        held = (position < k_len) & (column != NONE)
        tile_keys, usable = keys.read("key", first, held, block_kv, q.dtype)
        values, _ = keys.read("value", first, held, block_kv, q.dtype)
        products = triton.dot(q, tile_keys, trans_b=True)
        if usable is not None:
            products = softmax.poison(products, (held & ~usable)[None, :])
        products, scale = logits.shape(products, problem.rules, problem.scale, None, position, position)
        products = masking.apply(products, _by_lane(has, lane)[:, None])
        products = masking.apply(products, held[None, :])
        exp2_below = functools.partial(triton.exp2_below, exp2=triton.exp2)
        state, weights = softmax.rescale(state, products, scale * softmax.LOG2_E, exp2_below=exp2_below)
        state = state._replace(acc=state.acc + triton.dot(weights.astype(values.dtype), values))
        moves = (part == tiles - 1).astype(jnp.int32)
        return state, [one.at(one.next + moves * h) for one, h in zip(listed, has, strict=True)]

    number = jnp.minimum(functools.reduce(jnp.add, [one.stop - one.next for one in listed]), width)
    start = softmax.start((DECODE_ROWS,), dims[1]), listed
    state, _ = lax.fori_loop(0, number * tiles, step, start)
    out, lse = softmax.finish(state)
    bad = bad_len | _by_lane(bad, lane)
    # For each row; `poisoned` would do so for the whole result.
    out, lse = softmax.poison(out, bad[:, None]), lse._replace(rest=softmax.poison(lse.rest, bad))
    done = result.Result(mine, (token + 0 * lane,), [dims], [out], lse)
    result.store(done, out_refs, seq * config.num_splits + split, split < 0)


def _by_lane(of_heads: list[jax.Array], lane: jax.Array) -> jax.Array:
    """[rows] bool from one for each head, or from one for all."""
    if len(of_heads) == 1:
        return of_heads[0] & (lane >= 0)
    return functools.reduce(jnp.logical_or, [(lane == i) & one for i, one in enumerate(of_heads)])


def _listed(
    layout: SparseLayout, first_head: jax.Array, k_len: jax.Array, split: jax.Array, problem: Problem
) -> tuple[list[Listed], jax.Array, list[jax.Array]]:
    """(what each head sees of the split, how many blocks that spans, whether a head's row is invalid)."""
    row = divided(k_len - 1, layout.q_block_size)[0]
    own = divided(k_len - 1, layout.block_size)[0]
    of_row = divided((row + 1) * layout.q_block_size - 1, layout.block_size)[0]
    heads = problem.decode_heads if layout.layout_heads > 1 else 1
    lists = [Blocks.of_row(layout, first_head + i, row) for i in range(heads)]
    columns = [_columns(blocks) for blocks in lists]
    bad = [blocks.bad | _wrong(blocks, these, of_row) for blocks, these in zip(lists, columns, strict=True)]
    # A list out of order would block the others; its result is NaN anyway.
    columns = [jnp.where(wrong, NONE, these) for wrong, these in zip(bad, columns, strict=True)]
    # From the first block that any head sees up to the query's own.
    first = functools.reduce(jnp.minimum, [jnp.min(these) for these in columns])
    first = jnp.clip(first, 0, own)
    width = ceil_div(own + 1 - first, problem.config.num_splits)
    begin = first + split * width

    def before(these: jax.Array, column: jax.Array) -> jax.Array:
        return jnp.sum((these < column).astype(jnp.int32))

    listed = []
    for blocks, these in zip(lists, columns, strict=True):
        entry, stop = (blocks.begin + before(these, column) for column in (begin, begin + width))
        listed.append(Listed(blocks, entry, stop, entry).at(entry))
    return listed, width, bad


def _columns(blocks: Blocks, skip: int = 0) -> jax.Array:
    """What a row lists from its entry `skip` on, NONE after the last. A valid row has no more entries than there are
    blocks; only so many are looked at."""
    layout = blocks.layout
    most = min(layout.columns.shape[1], layout.max_len // layout.block_size + 1)
    entry = blocks.begin + skip + jnp.arange(next_power_of_2(most))
    place = layout.columns.at[blocks.head + 0 * entry, entry]
    return triton.load(place, mask=entry < blocks.end, other=NONE)


def _wrong(blocks: Blocks, columns: jax.Array, last: jax.Array) -> jax.Array:
    """Whether a row points outside, or does not ascend."""
    following = _columns(blocks, 1)
    # By position, not by value: a listed column may be NONE, which is invalid.
    listed = jnp.arange(columns.shape[0]) < blocks.end - blocks.begin
    wrong = listed & ((columns < 0) | (columns > last) | (following <= columns))
    return jnp.sum(wrong.astype(jnp.int32)) > 0


def _sequence(problem: Problem, refs: Operands, seq: jax.Array):
    """(first row of keys, length, whether the length is invalid)."""
    if refs.seq_lens is None:
        assert refs.cu_k_lens is not None
        k_start, k_end = (triton.load(refs.cu_k_lens.at[seq + i]) for i in (np.int32(0), np.int32(1)))
        bad = (k_start < 0) | (k_end < k_start) | (k_end > problem.pool.num_pages)
    else:
        k_start, k_end = 0 * seq, triton.load(refs.seq_lens.at[seq])
        bad = (k_end < 0) | (k_end > problem.max_k_len)
    return k_start, jnp.where(bad, 0, k_end - k_start), bad
