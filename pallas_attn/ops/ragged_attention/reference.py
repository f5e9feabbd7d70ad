"""`ragged_paged_attention` in plain jnp: works anywhere, in float32, with gradients.

Query tokens are dealt to blocks of a few tokens of one sequence each, as in the kernel, and a block is a "sequence" of
the loop over pages that all references share: its table is its sequence's, its length ends at the last key it sees.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_attn._tile import chunks, logits, masking, rows, softmax
from pallas_attn._tile.layout import PoolShape
from pallas_attn.ops.ragged_attention.blocks import Ragged

MOST_TOKENS = 64  # of a block


@dataclasses.dataclass(frozen=True)
class Rule(chunks.Rule):
    rules: masking.Rules
    scale: float
    tokens: int
    """Of a block."""
    num_heads: int
    causal: bool

    def by_row(self, per_head: jax.Array) -> jax.Array:
        """[num_heads] -> [num_kv_heads, rows, 1]"""
        per_token = jnp.broadcast_to(per_head, (1, self.tokens, self.num_heads))
        return rows.pack(per_token, self.pool.num_kv_heads)[0, ..., None]

    def logits2(self, floats, of: chunks.Sequences, keys, position, seen) -> jax.Array:
        rules = self.rules._replace(sliding_window=of.others.get("sliding_window", self.rules.sliding_window))
        k_scale = floats.get("k_scale", jnp.ones(self.pool.num_kv_heads, jnp.float32))
        slope = self.by_row(floats["alibi_slopes"]) if "alibi_slopes" in floats else None
        products = jnp.einsum("bhrd,bhkd->bhrk", floats["rows"], keys, precision="highest")
        scaled = products * logits.factor(rules, self.scale * k_scale[:, None, None], slope)
        query_at = of.others["query_at"]
        logits2 = logits.shape(scaled, rules, slope, position, query_at)
        visible = jnp.broadcast_to(seen[:, None, None, :], logits2.shape)
        if self.causal:
            visible &= masking.causal(position, query_at)
        if rules.sliding_window is not None:
            visible &= masking.in_window(position, query_at, rules.sliding_window)
        return masking.apply(logits2, visible)


@functools.partial(jax.jit, static_argnames=("pool", "value_dim", "scale", "layout", "rules", "causal"))
def ragged_attention_xla(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    cu_q_lens,
    num_seqs,
    extras: dict[str, jax.Array],
    *,
    pool: PoolShape,
    value_dim: int,
    scale: float,
    layout: str,
    rules: masking.Rules,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """The same signature as the kernel's, without a config."""
    num_tokens, num_heads, _ = query.shape
    max_seqs = seq_lens.shape[0]
    per_block = min(MOST_TOKENS, 1 << (max(num_tokens // max_seqs, 1) - 1).bit_length())
    ragged = Ragged(num_tokens, max_seqs, 1)
    blocks = _Blocks(ragged, cu_q_lens, jnp.clip(num_seqs[0], 0, max_seqs), per_block)

    stored = jnp.where(blocks.is_padding, 0, seq_lens[jnp.minimum(blocks.seq, max_seqs - 1)])
    lengths = jnp.clip(stored, 0, block_tables.shape[1] * pool.page_size)
    # [blocks, tokens]: the position of each query
    query_at = (lengths - blocks.q_len + blocks.first)[:, None] + jnp.arange(per_block)
    last = query_at[:, 0] + jnp.clip(blocks.q_len - blocks.first, 0, per_block) - 1
    ends = jnp.clip(last + 1, 0, lengths) if causal else lengths
    ends = jnp.where(blocks.first < blocks.q_len, ends, 0)
    group = num_heads // pool.num_kv_heads
    others = {"query_at": jnp.repeat(query_at, group, axis=1)[:, None, :, None]}
    window = rules.sliding_window
    if "sliding_window" in extras:
        window = others["sliding_window"] = extras["sliding_window"][0]
    seen_from = masking.window_start(jnp.maximum(query_at[:, 0], 0), window)

    rule = Rule(
        "ragged_paged_attention", pool, layout, value_dim, rules, scale, per_block, num_heads, causal
    )
    floats = {name: extras[name] for name in ("k_scale", "alibi_slopes") if name in extras}
    floats["rows"] = rows.pack(blocks.take(query.astype(jnp.float32)), pool.num_kv_heads)
    pools: chunks.Pools = {"key": key_cache, "value": value_cache}
    tables = block_tables[jnp.minimum(blocks.seq, max_seqs - 1)]
    out, lse2, bad = chunks.attend(rule, floats, pools, chunks.Sequences(tables, ends, seen_from, others))
    if "sinks" in extras:
        sinks = jnp.where(lengths[:, None, None] > 0, rule.by_row(extras["sinks"])[..., 0], -jnp.inf)
        out, lse2 = softmax.finish(softmax.join(softmax.resume(out, lse2), sinks * softmax.LOG2_E))
    if "v_scale" in extras:
        out *= extras["v_scale"][:, None, None]
    bad = (bad | (stored != lengths))[:, None, None]
    out, lse = (rows.unpack(x, per_block) for x in (out, softmax.natural_lse(lse2)))
    out, lse = softmax.poison(out, bad[..., None]), softmax.poison(lse, bad)
    return blocks.put(out).astype(query.dtype), blocks.put(lse)


class _Blocks:
    """All blocks of the call: arrays [blocks]."""

    def __init__(self, ragged: Ragged, cu_q_lens: jax.Array, num_seqs: jax.Array, per_block: int):
        self._per_block = per_block
        index = jnp.arange(ragged.num_seqs + 2)
        bounds = ragged.bound(index, cu_q_lens[jnp.minimum(index, ragged.num_seqs)], num_seqs)
        first_block = ragged.first_block(index, bounds, per_block)[:-1]
        first_block = jnp.where(index[:-1] <= num_seqs, first_block, jnp.iinfo(jnp.int32).max)
        block = jnp.arange(ragged.blocks(per_block))
        self.seq = jnp.searchsorted(first_block, block, side="right") - 1
        self.is_padding = self.seq >= num_seqs
        self._begins = bounds[self.seq]
        self.q_len = bounds[self.seq + 1] - self._begins
        self.first = (block - first_block[self.seq]) * per_block
        """Of the block's query tokens, among the sequence's."""
        token = jnp.arange(ragged.num_tokens)
        of_token = jnp.minimum(jnp.searchsorted(bounds[1:], token, side="right"), num_seqs)
        within = token - bounds[of_token]
        self._place = (first_block[of_token] + within // per_block, within % per_block)

    def take(self, by_token: jax.Array) -> jax.Array:
        """[tokens, ...] -> [blocks, tokens of a block, ...]; 0 where a block has none."""
        within = self.first[:, None] + jnp.arange(self._per_block)
        taken = by_token.at[self._begins[:, None] + within].get(mode="fill", fill_value=0)
        real = (within < self.q_len[:, None]) & ~self.is_padding[:, None]
        return jnp.where(real[..., None, None], taken, 0)

    def put(self, by_block: jax.Array) -> jax.Array:
        """[blocks, tokens of a block, ...] -> [tokens, ...]"""
        return by_block.at[self._place].get(mode="clip")
