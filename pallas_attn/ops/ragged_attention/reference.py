"""Ragged attention in plain jnp: works anywhere, in float32, with gradients.

Query tokens are dealt to blocks of a few tokens of one sequence, as in the kernel. A block is a "sequence" of the loop
over pages that all references share, with its sequence's table and a length up to the last key it sees. New tokens
outside the cache form a second cache, with pages of one token.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import symbolic
from pallas_attn._call.pools import table_tokens
from pallas_attn._split import page_loop
from pallas_attn._tile import logits, masking, quantization, softmax, tree
from pallas_attn._tile.layout import moved
from pallas_attn.mods.operands import Mods, has_mask, over_arrays
from pallas_attn.mods.seen import seen as keys_left
from pallas_attn.ops.ragged_attention.blocks import Ragged
from pallas_attn.ops.ragged_attention.operands import Operands

MOST_TOKENS = 64  # of a block


class Drafts(NamedTuple):
    """Trees of blocks, some of which have none; positions count as their tokens' do."""

    tree_mask: jax.Array
    """[blocks, tokens, max_tree]"""
    is_tree: jax.Array
    first_at: jax.Array
    """[blocks]: position of the sequence's oldest query token."""
    rule_at: jax.Array
    """[blocks, 1, rows, 1]: a row's position for windows and ALiBi."""
    draft_at: jax.Array | None
    """[blocks, max_tree]: each draft's, where that is not its slot."""


class Others(NamedTuple):
    query_at: jax.Array
    """[blocks, 1, rows, 1]: the position of each row's query."""
    sliding_window: jax.Array | None
    drafts: Drafts | None
    mods: Mods | None
    seq: jax.Array
    """[blocks]"""


@dataclasses.dataclass(frozen=True)
class Rule(page_loop.Rule):
    rules: masking.Rules
    scale: float
    num_heads: int
    causal: bool
    max_len: int

    def drafts(self, of: page_loop.Sequences, position: jax.Array) -> tree.Tree | None:
        """The tree between all rows and the keys at `position`; rows of other blocks are causal."""
        if (drafts := of.others.drafts) is None:
            return None
        mask, query_at = drafts.tree_mask, of.others.query_at
        index = position - drafts.first_at[:, None]
        new = drafts.is_tree[:, None] & (index >= 0) & (index < mask.shape[2])
        index = jnp.clip(index, 0, mask.shape[2] - 1)
        by_token = jnp.take_along_axis(mask, index[:, None], axis=2) | ~new[:, None]
        seen = jnp.repeat(by_token, self.num_heads // self.pool.num_kv_heads, axis=1)[:, None]
        seen &= (query_at >= 0) & (drafts.is_tree[:, None, None, None] | masking.causal(position, query_at))
        key_at = jnp.broadcast_to(position, index.shape)
        if drafts.draft_at is not None:
            key_at = jnp.where(new, jnp.take_along_axis(drafts.draft_at, index, axis=1), position)
        return tree.Tree(seen, key_at[:, None, None], drafts.rule_at)

    def logits(self, floats, of: page_loop.Sequences, keys, position, seen) -> jax.Array:
        rules = self.rules.with_window(of.others.sliding_window)
        k_scale = jnp.ones(self.pool.num_kv_heads, jnp.float32) if floats.k_scale is None else floats.k_scale
        slope = None if floats.alibi_slopes is None else self.by_row(floats.alibi_slopes)
        products = jnp.einsum("bhrd,bhkd->bhrk", floats.rows, keys, precision="highest")
        query_at, drafts = of.others.query_at, self.drafts(of, position)
        at = logits.positions(drafts, position, query_at)
        of_mods = of.others.mods, floats.captured, query_at
        mods = over_arrays(*of_mods, self.by_row, position, self.max_len, sequences=of.others.seq)
        score = None if mods.score is None else mods.score_of
        tile, scale = logits.shape(products, rules, self.scale * k_scale[:, None, None], slope, *at, score)
        visible = jnp.broadcast_to(seen[:, None, None, :], tile.shape)
        if drafts is not None:
            visible &= drafts.seen
        elif self.causal:
            visible &= masking.causal(position, query_at)
        if rules.sliding_window is not None:
            visible &= masking.in_window(*at, rules.sliding_window)
        return mods.masked(masking.apply(tile * scale, visible))


@functools.partial(jax.jit, static_argnames="function")
def ragged_attention_xla(operands: Operands, *, function: str) -> tuple[jax.Array, jax.Array]:
    """As the kernel, without a config."""
    query, tables, pool, rules = operands.query, operands.block_tables, operands.pool, operands.rules
    num_tokens, num_heads, _ = query.shape
    k_scale, key_scale = quantization.apart(operands.k_scale)
    v_scale, value_scale = quantization.apart(operands.v_scale)
    room = tables.shape[0]
    per_block = MOST_TOKENS // 4
    if not symbolic.is_open(num_tokens, room):
        per_block = min(MOST_TOKENS, 1 << (max(num_tokens // room, 1) - 1).bit_length())
    blocks = _Blocks(Ragged(num_tokens, room, 1), operands.cu_q_lens, operands.num_seqs, per_block)
    seq = jnp.minimum(blocks.seq, room - 1)
    stored = jnp.where(blocks.is_padding, 0, operands.seq_lens[seq])
    new_apart = operands.key is not None
    in_pages = jnp.where(blocks.is_padding, 0, stored - blocks.q_len) if new_apart else stored
    max_len = table_tokens(tables.shape[1], pool.page_size)
    held = jnp.clip(in_pages, 0, max_len)
    bad = held != in_pages
    seq_lens = held + jnp.where(blocks.is_padding, 0, blocks.q_len) if new_apart else held

    skipped = (blocks.q_len == 1) & ~blocks.is_padding & operands.skip_decode
    within = blocks.first[:, None] + jnp.arange(per_block)
    """[blocks, tokens]: which of the sequence's query tokens"""
    last = jnp.minimum(within[:, -1], blocks.q_len - 1)
    group = num_heads // pool.num_kv_heads
    traced_window = None if operands.sliding_window is None else operands.sliding_window[0]
    sliding_window = rules.with_window(traced_window).sliding_window
    packed = page_loop.pack(blocks.take(query.astype(jnp.float32)), pool.num_kv_heads)
    floats = page_loop.Floats(packed, k_scale, operands.alibi_slopes, operands.captured)

    def by_row(by_token: jax.Array) -> jax.Array:
        """[blocks, tokens] -> [blocks, 1, rows, 1]"""
        return jnp.repeat(by_token, group, axis=1)[:, None, :, None]

    max_tree = operands.max_tree
    is_tree = (blocks.q_len <= max_tree) & ~blocks.is_padding
    oldest = seq_lens - blocks.q_len

    def drafts(before: jax.Array, query_at: jax.Array) -> Drafts | None:
        """The rows' tree; positions count from `oldest` - `before`."""
        if operands.tree_mask is None:
            return None
        mask = blocks.take(operands.tree_mask[..., None])[..., 0] != 0
        found = Drafts(mask, is_tree, before, by_row(query_at), None)
        if operands.query_positions is not None:
            # All drafts of a tree, some of which a block may hold.
            each = blocks.begins[:, None] + jnp.arange(max_tree)
            given = operands.query_positions.at[each].get(mode="clip")
            at = (
                jnp.clip(given, jnp.maximum(oldest, 0)[:, None], seq_lens[:, None] - 1)
                - (oldest - before)[:, None]
            )
            own = jnp.take_along_axis(at, jnp.minimum(within, max_tree - 1), axis=1)
            found = found._replace(draft_at=at, rule_at=by_row(jnp.where(is_tree[:, None], own, query_at)))
        return found

    def attend(rule: Rule, floats, pools: page_loop.Pools, tables, length, before):
        """Attention over `length` tokens of each block's sequence, `before` of which precede its first query token."""
        query_at = before[:, None] + within
        ends = (
            jnp.where(is_tree, length, jnp.clip(before + last + 1, 0, length)) if operands.causal else length
        )
        ends = jnp.where((blocks.first < blocks.q_len) & ~blocks.is_padding & ~skipped, ends, 0)
        earliest = jnp.where(is_tree, before, query_at[:, 0])
        seen_from = masking.window_start(jnp.maximum(earliest, 0), sliding_window)
        left = None
        if has_mask(operands.mods) and operands.mods is not None:
            newest = jnp.maximum(before + last, query_at[:, 0])
            left = keys_left(operands.mods, seq, (query_at[:, 0], newest), length, max_len)
            seen_from, ends = jnp.maximum(seen_from, left.first), jnp.minimum(ends, left.end)
        others = Others(by_row(query_at), traced_window, drafts(before, query_at), operands.mods, seq)
        return page_loop.attend(
            rule, floats, pools, page_loop.Sequences(tables, ends, seen_from, others, left)
        )

    static = function, pool, operands.layout, operands.value_dim, per_block, rules, operands.scale, num_heads
    rule = Rule(*static, operands.causal, max_len)
    pools = page_loop.Pools(operands.key_cache, operands.value_cache, key_scale, value_scale)
    out, lse, lost = attend(rule, floats, pools, tables[seq], held, seq_lens - blocks.q_len)
    bad |= lost
    if v_scale is not None:
        out *= v_scale[:, None, None]
    if operands.key is not None and operands.value is not None:
        one_token = pool._replace(num_pages=num_tokens, page_size=1)
        beside = dataclasses.replace(rule, pool=one_token, layout="NHD")
        pools = page_loop.Pools(operands.key[:, None], operands.value[:, None])
        floats = floats._replace(k_scale=None)
        tokens = blocks.begins[:, None] + jnp.arange(num_tokens)
        more, more_lse, _ = attend(beside, floats, pools, tokens, blocks.q_len, 0 * blocks.q_len)
        out, lse = _both((out, lse), (more, more_lse))
    if operands.sinks is not None:
        sinks = jnp.where(seq_lens[:, None, None] > 0, rule.by_row(operands.sinks)[..., 0], -jnp.inf)
        out, lse = softmax.finish(softmax.join(softmax.resume(out, lse), sinks))
    if operands.out_scale is not None:
        out /= operands.out_scale
    out, lse = (page_loop.unpack(x, per_block) for x in (out, lse.natural()))
    out, lse = softmax.poison(out, bad[:, None, None, None]), softmax.poison(lse, bad[:, None, None])
    out, lse = quantization.saturated(blocks.put(out), operands.out_dtype), blocks.put(lse)
    if operands.out is None or operands.lse is None:
        return out, lse
    skipped = blocks.put(skipped, by_token=False)[:, None]
    out = moved(lambda kept, out: jnp.where(skipped[..., None], kept, out), operands.out, out)
    return out, jnp.where(skipped, operands.lse, lse)


def _both(
    a: tuple[jax.Array, softmax.Lse], b: tuple[jax.Array, softmax.Lse]
) -> tuple[jax.Array, softmax.Lse]:
    """(out, lse) over the keys of both parts."""
    state = softmax.resume(*a)
    more, lse = b
    state, weights = softmax.rescale(state, lse.maximum[..., None], rest=lse.rest[..., None])
    return softmax.finish(state._replace(acc=state.acc + weights * more))


class _Blocks:
    """All blocks of the call: arrays [blocks]."""

    def __init__(self, ragged: Ragged, cu_q_lens: jax.Array, num_seqs: jax.Array, per_block: int):
        self._per_block = per_block
        num_seqs = ragged.num_of(cu_q_lens, num_seqs)
        index = jnp.arange(ragged.num_seqs + 2)
        bounds = ragged.bound(index, cu_q_lens[jnp.minimum(index, ragged.num_seqs)], num_seqs)
        first_place = ragged.first_place(index, bounds, per_block)[:-1]
        first_place = jnp.where(index[:-1] <= num_seqs, first_place, jnp.iinfo(jnp.int32).max)
        block = jnp.arange(ragged.places(per_block))
        self.seq = symbolic.searchsorted(first_place, block, side="right") - 1
        self.is_padding = self.seq >= num_seqs
        self.begins = bounds[self.seq]
        self.q_len = jnp.maximum(bounds[self.seq + 1] - self.begins, 0)
        self.first = (block - first_place[self.seq]) * per_block
        """Index of the block's first query token, in its sequence."""
        token = jnp.arange(ragged.num_tokens)
        of_token = jnp.minimum(symbolic.searchsorted(bounds[1:], token, side="right"), num_seqs)
        within = token - bounds[of_token]
        self._place = (first_place[of_token] + within // per_block, within % per_block)

    def take(self, by_token: jax.Array) -> jax.Array:
        """[tokens, ...] -> [blocks, tokens of a block, ...]; 0 where a block has none."""
        within = self.first[:, None] + jnp.arange(self._per_block)
        taken = by_token.at[self.begins[:, None] + within].get(mode="fill", fill_value=0)
        real = (within < self.q_len[:, None]) & ~self.is_padding[:, None]
        return jnp.where(real[..., None, None], taken, 0)

    def put(self, by_block: jax.Array, *, by_token: bool = True) -> jax.Array:
        """[blocks, tokens of a block, ...], or without tokens [blocks, ...], -> [tokens, ...]"""
        place = self._place if by_token else self._place[:1]
        return by_block.at[place].get(mode="clip")
