"""`paged_attention` in plain jnp: works anywhere, in float32, with gradients."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.pools import table_tokens
from pallas_attn._split import page_loop
from pallas_attn._tile import logits, masking, quantization, softmax, tree
from pallas_attn._tile.walk import Seen
from pallas_attn.mods.operands import Mods, has_mask, over_arrays
from pallas_attn.mods.seen import of_sequences
from pallas_attn.ops.paged_attention.operands import Operands


class Others(NamedTuple):
    query_at: jax.Array
    """[num_seqs, 1, rows, 1]: the position of each row's query."""
    sliding_window: jax.Array | None
    tree_mask: jax.Array | None
    query_positions: jax.Array | None
    mods: Mods | None


@dataclasses.dataclass(frozen=True)
class Rule(page_loop.Rule):
    rules: masking.Rules
    scale: float
    num_heads: int
    max_len: int

    def held(self, of: page_loop.Sequences, position: jax.Array, held: jax.Array) -> jax.Array:
        if self.rules.block_sparse is None:
            return held
        # What no head keeps is skipped: its pages may belong to others.
        return held & self._visible(of, position, held).any(axis=(1, 2))

    def logits(self, floats, of: page_loop.Sequences, keys, position, seen) -> jax.Array:
        rules = self._rules(of)
        k_scale = jnp.ones(self.pool.num_kv_heads, jnp.float32) if floats.k_scale is None else floats.k_scale
        scale = self.scale * k_scale
        slope = None if floats.alibi_slopes is None else self.by_row(floats.alibi_slopes)
        products = jnp.einsum("bhrd,bhkd->bhrk", floats.rows, keys, precision="highest")
        at = logits.positions(self._tree(of, position), position, of.others.query_at)
        of_mods = of.others.mods, floats.captured, of.others.query_at
        mods = over_arrays(*of_mods, self.by_row, position, self.max_len)
        score = None if mods.score is None else mods.score_of
        tile, scale = logits.shape(products, rules, scale[:, None, None], slope, *at, score)
        return mods.masked(masking.apply(tile * scale, self._visible(of, position, seen)))

    def _rules(self, of: page_loop.Sequences) -> masking.Rules:
        return self.rules.with_window(of.others.sliding_window)

    def _tree(self, of: page_loop.Sequences, position: jax.Array) -> tree.Tree | None:
        return tree.of_chunk(of.others, of.lengths, self.num_heads // self.pool.num_kv_heads, position)

    def _visible(self, of: page_loop.Sequences, position: jax.Array, seen: jax.Array) -> jax.Array:
        offset = None
        if (pattern := self.rules.block_sparse) is not None:
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.pool.num_kv_heads}
            head = jnp.arange(self.num_heads)
            per_head = pattern.offset(head, head // (self.num_heads // self.pool.num_kv_heads), **heads)
            offset = self.by_row(jnp.broadcast_to(per_head, (self.num_heads,)))
        query_at = of.others.query_at
        masks = logits.visible(
            self._rules(of),
            position,
            query_at,
            among_themselves=True,
            offset=offset,
            tree=self._tree(of, position),
        )
        return functools.reduce(jnp.logical_and, masks, seen[:, None, None, :])


def _left(operands: Operands, max_len: int) -> Seen | None:
    if operands.mods is None or not has_mask(operands.mods) or operands.rules.block_sparse is not None:
        return None
    return of_sequences(operands.mods, operands.seq_lens, operands.query.shape[1], max_len)


@jax.jit
def paged_attention_xla(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """As the kernel, without a config."""
    query, seq_lens, pool, rules = operands.query, operands.seq_lens, operands.pool, operands.rules
    _, q_len, num_heads, _ = query.shape
    max_len = table_tokens(operands.block_tables.shape[1], pool.page_size)
    static = operands.layout, pool.head_dim, q_len, rules, operands.scale, num_heads, max_len
    rule = Rule("paged_attention", pool, *static)
    lengths = jnp.clip(seq_lens, 0, max_len)
    token = jnp.repeat(jnp.arange(q_len), num_heads // pool.num_kv_heads)
    window = None if operands.sliding_window is None else operands.sliding_window[0]
    others = Others(
        query_at=(lengths[:, None] - q_len + token)[:, None, :, None],
        sliding_window=window,
        tree_mask=operands.tree_mask,
        query_positions=operands.query_positions,
        mods=operands.mods,
    )
    earliest = jnp.maximum(lengths - q_len, 0)
    seen_from = masking.window_start(earliest, rules.with_window(window).sliding_window)
    k_scale, key_scale = quantization.apart(operands.k_scale)
    v_scale, value_scale = quantization.apart(operands.v_scale)
    floats = page_loop.Floats(
        page_loop.pack(query.astype(jnp.float32), pool.num_kv_heads),
        k_scale,
        operands.alibi_slopes,
        operands.captured,
    )
    pools = page_loop.Pools(operands.key_cache, operands.value_cache, key_scale, value_scale)
    of = page_loop.Sequences(operands.block_tables, lengths, seen_from, others, _left(operands, max_len))
    out, lse, bad = page_loop.attend(rule, floats, pools, of)
    if operands.sinks is not None:
        sinks = jnp.where(lengths[:, None, None] > 0, rule.by_row(operands.sinks)[..., 0], -jnp.inf)
        out, lse = softmax.finish(softmax.join(softmax.resume(out, lse), sinks))
    if v_scale is not None:
        out *= v_scale[:, None, None]
    out, lse = (page_loop.unpack(x, q_len) for x in (out, lse.natural()))
    bad = (bad | (seq_lens != lengths))[:, None, None]
    return softmax.poison(out, bad[..., None]).astype(query.dtype), softmax.poison(lse, bad)
