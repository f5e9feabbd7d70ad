"""`paged_attention` in plain jnp: works anywhere, in float32, with gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_attn._tile import chunks, logits, masking, quantization, rows, softmax, tree
from pallas_attn._tile.layout import PoolShape, table_tokens


@dataclasses.dataclass(frozen=True)
class Rule(chunks.Rule):
    rules: masking.Rules
    scale: float
    q_len: int
    num_heads: int

    def by_row(self, per_head: jax.Array) -> jax.Array:
        """[num_heads] -> [num_kv_heads, rows, 1]"""
        per_token = jnp.broadcast_to(per_head, (1, self.q_len, self.num_heads))
        return rows.pack(per_token, self.pool.num_kv_heads)[0, ..., None]

    def held(self, of: chunks.Sequences, position: jax.Array, held: jax.Array) -> jax.Array:
        if self.rules.block_sparse is None:
            return held
        # What no head keeps counts as absent: its pages may be anyone's.
        return held & self._visible(of, position, held).any(axis=(1, 2))

    def logits(self, floats, of: chunks.Sequences, keys, position, seen) -> jax.Array:
        rules = self._rules(of)
        scale = self.scale * floats.get("k_scale", jnp.ones(self.pool.num_kv_heads, jnp.float32))
        slope = self.by_row(floats["alibi_slopes"]) if "alibi_slopes" in floats else None
        products = jnp.einsum("bhrd,bhkd->bhrk", floats["rows"], keys, precision="highest")
        at = logits.positions(self._tree(of, position), position, of.others["query_at"])
        tile, scale = logits.shape(products, rules, scale[:, None, None], slope, *at)
        return masking.apply(tile * scale, self._visible(of, position, seen))

    def _rules(self, of: chunks.Sequences) -> masking.Rules:
        """A window that is known at run time only is one of the rules all the same."""
        window = of.others.get("sliding_window", self.rules.sliding_window)
        return self.rules._replace(sliding_window=window)

    def _tree(self, of: chunks.Sequences, position: jax.Array) -> tree.Tree | None:
        return tree.of_chunk(of.others, of.lengths, self.num_heads // self.pool.num_kv_heads, position)

    def _visible(self, of: chunks.Sequences, position: jax.Array, seen: jax.Array) -> jax.Array:
        offset = None
        if (pattern := self.rules.block_sparse) is not None:
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.pool.num_kv_heads}
            head = jnp.arange(self.num_heads)
            per_head = pattern.offset(head, head // (self.num_heads // self.pool.num_kv_heads), **heads)
            offset = self.by_row(jnp.broadcast_to(per_head, (self.num_heads,)))
        query_at = of.others["query_at"]
        masks = logits.visible(
            self._rules(of),
            position,
            query_at,
            among_themselves=True,
            offset=offset,
            tree=self._tree(of, position),
        )
        return functools.reduce(jnp.logical_and, masks, seen[:, None, None, :])


@functools.partial(jax.jit, static_argnames=("pool", "scale", "layout", "rules"))
def paged_attention_xla(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    extras: dict[str, jax.Array],
    *,
    pool: PoolShape,
    scale: float,
    layout: str,
    rules: masking.Rules,
) -> tuple[jax.Array, jax.Array]:
    """The same signature as the kernel's, without a config."""
    _, q_len, num_heads, _ = query.shape
    page_scales, extras = quantization.page_scales_apart(extras)
    rule = Rule("paged_attention", pool, layout, pool.head_dim, rules, scale, q_len, num_heads)
    lengths = jnp.clip(seq_lens, 0, table_tokens(block_tables.shape[1], pool.page_size))
    token = jnp.repeat(jnp.arange(q_len), num_heads // pool.num_kv_heads)
    # [num_seqs, 1, rows, 1]: the position of each row's query
    others = {"query_at": (lengths[:, None] - q_len + token)[:, None, :, None]}
    others |= {name: extras[name] for name in tree.NAMES if name in extras}
    window = rules.sliding_window
    if "sliding_window" in extras:
        window = others["sliding_window"] = extras["sliding_window"][0]
    seen_from = masking.window_start(jnp.maximum(lengths - q_len, 0), window)
    floats = {name: extras[name] for name in ("k_scale", "alibi_slopes") if name in extras}
    floats["rows"] = rows.pack(query.astype(jnp.float32), pool.num_kv_heads)
    pools: chunks.Pools = {"key": key_cache, "value": value_cache, **page_scales}
    of = chunks.Sequences(block_tables, lengths, seen_from, others)
    out, lse, bad = chunks.attend(rule, floats, pools, of)
    if "sinks" in extras:
        sinks = jnp.where(lengths[:, None, None] > 0, rule.by_row(extras["sinks"])[..., 0], -jnp.inf)
        out, lse = softmax.finish(softmax.join(softmax.resume(out, lse), sinks))
    if "v_scale" in extras:
        out *= extras["v_scale"][:, None, None]
    out, lse = (rows.unpack(x, q_len) for x in (out, lse.natural()))
    bad = (bad | (seq_lens != lengths))[:, None, None]
    return softmax.poison(out, bad[..., None]).astype(query.dtype), softmax.poison(lse, bad)
