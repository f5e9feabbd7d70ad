"""Logits of a block of query rows: scale, soft cap, score_mod, ALiBi, and which keys each row sees."""

import jax
import jax.numpy as jnp

from pallas_attn._tile import logits, masking, rows, tree, triton
from pallas_attn.mods.operands import NOTHING, over_rows
from pallas_attn.mods.program import KEY
from pallas_attn.ops.ragged_attention.blocks import Block
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.problem import Problem


class Scores:
    """Logits of the rows `mine` of a block, whose sequence has `seq_len` tokens."""

    def __init__(self, problem: Problem, block: Block, seq_len, mine: rows.Rows, refs: Operands):
        self._problem, self._mine, self._refs = problem, mine, refs
        self._is_tree = problem.is_tree(block)
        first = seq_len - block.q_len
        self._query_at = first + mine.token
        self._drafts = tree.Drafts(seq_len, first, jnp.where(self._is_tree, block.q_len, 0))
        self._first_token = block.first_token
        self._mods = NOTHING
        if refs.mods is not None:
            seq = jnp.minimum(block.seq, problem.num_seqs - 1)
            self._mods = over_rows(refs.mods, refs.captured, seq, mine, self._query_at, problem.max_len)

    def __call__(self, queries, keys, key_scale, position, held, scale) -> logits.Shaped:
        """Logits [block_q, block_kv] with every rule applied; without `held` every row sees every key. `key_scale`: one
        for each key, if pages have scales."""
        rules, slope, key_at = self._problem.rules, None, position[None, :]
        if (slopes := self._refs.alibi_slopes) is not None:
            slope = triton.load(slopes.at[self._mine.head], mask=self._mine.real, other=0.0)[:, None]
        tile = logits.products(queries, keys, None)
        if key_scale is not None:
            tile = triton.rounded(tile * key_scale[None, :])
        drafts, mods = None, self._mods.at(KEY, position, self._problem.max_len)
        if held is not None:
            drafts = tree.of_tile(self._refs, self._drafts, self._among_tokens, self._mine, position)
        if rules.softcap is not None or slope is not None or mods.score is not None:
            # Keys that all rows see come before all drafts: their slots are their positions.
            query_at = tree.queries_at(self._refs, self._drafts, self._among_tokens, self._mine)[:, None]
            key_at = drafts.key_at if drafts else key_at
            score = None if mods.score is None else mods.score_of
            tile, scale = logits.shape(tile, rules, scale, slope, key_at, query_at, score)
        tile = tile if held is None else self._masked(tile, position, held, drafts)
        return logits.Shaped(mods.masked(tile), scale)

    def _masked(self, tile: jax.Array, position, held, drafts: tree.Tree | None) -> jax.Array:
        key_at, query_at = position[None, :], self._query_at[:, None]
        tile = masking.apply(tile, held[None, :])
        if self._problem.causal:
            seen = masking.causal(key_at, query_at)
            tile = masking.apply(tile, seen if drafts is None else drafts.seen & (self._is_tree | seen))
        if (window := self._problem.rules.sliding_window) is not None:
            at = logits.positions(drafts, key_at, query_at)
            tile = masking.apply(tile, masking.in_window(*at, window))
        return tile

    def _among_tokens(self, token: jax.Array) -> tuple[jax.Array, ...]:
        return (self._first_token + token,)
