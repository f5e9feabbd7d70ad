"""The loop over pages of the references in plain jnp: online softmax, tile by tile, forward and backward.

Beyond the output it takes memory for one tile of keys and values a sequence, whatever the table's width, and it runs
from the first token that any query sees to the end of the longest sequence. JAX cannot differentiate a loop of unknown
length, and would keep every tile's weights. So `attend` has its own rule: the backward loop recomputes each tile's
logits, and its weights from the log-sum-exp, as flash attention does (Dao et al., 2022).
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import derivative, sharding, symbolic
from pallas_attn._call.pools import PoolShape, Which, is_quantized
from pallas_attn._call.sizes import ceil_div
from pallas_attn._tile import masking, softmax, triton
from pallas_attn._tile.layout import to_nhd
from pallas_attn._tile.walk import Seen

TILE_TOKENS = 256


class Floats(NamedTuple):
    """The operands with gradients, apart from the caches."""

    rows: jax.Array
    """[num_seqs, num_kv_heads, rows, dim] of queries."""
    k_scale: jax.Array | None = None
    """[num_kv_heads]"""
    alibi_slopes: jax.Array | None = None
    captured: tuple[jax.Array, ...] | None = None
    """By a score_mod."""


class Pools(NamedTuple):
    """The caches; without a value cache, values are the first `value_dim` elements of keys. Scales [num_pages,
    num_kv_heads] where each page has its own."""

    key: jax.Array
    value: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


class Sequences(NamedTuple):
    """The operands without gradients."""

    tables: jax.Array
    lengths: jax.Array
    """Clamped to what the table holds."""
    seen_from: jax.Array
    """[num_seqs]: first token that any query sees."""
    others: Any
    """A pytree of an op's own."""
    left: Seen | None = None
    """[num_seqs]: what a mask_mod leaves of each; None: all."""


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """What an op adds; static. `position` is [tokens], `held` and `seen` [num_seqs, tokens]."""

    function: str
    pool: PoolShape
    layout: str
    value_dim: int
    q_len: int
    """Query tokens of a sequence."""

    def by_row(self, per_head: jax.Array) -> jax.Array:
        """[num_heads] -> [num_kv_heads, rows, 1]"""
        per_token = jnp.broadcast_to(per_head, (1, self.q_len, *per_head.shape))
        return pack(per_token, self.pool.num_kv_heads)[0, ..., None]

    def floats(self, tile: jax.Array) -> jax.Array:
        """Pages of a pool as float32, [..., dim]."""
        return tile.astype(jnp.float32)

    def held(self, of: Sequences, position: jax.Array, held: jax.Array) -> jax.Array:
        """Which of a sequence's `held` tokens any head looks at."""
        return held

    @abstractmethod
    def logits(
        self, floats: Floats, of: Sequences, keys: jax.Array, position: jax.Array, seen: jax.Array
    ) -> jax.Array:
        """Natural logits [num_seqs, num_kv_heads, rows, tokens], -inf where a query does not see a key."""


def attend(
    rule: Rule, floats: Floats, pools: Pools, of: Sequences
) -> tuple[jax.Array, softmax.Lse, jax.Array]:
    """(out [num_seqs, num_kv_heads, rows, value_dim], lse [num_seqs, num_kv_heads, rows], bad [num_seqs]): float32, and
    whether a page id in use was invalid. Gradients flow to `floats` and, unless they are quantised, to the pools."""
    axes = sharding.varying_axes(floats, pools, of)
    # Done here, so that gradients of replicated values are summed over the axes.
    floats, pools, of = sharding.vary((floats, pools, of), axes)

    @jax.custom_vjp
    def attended(floats: Floats, pools: Pools, of: Sequences):
        return _forwards(rule, floats, pools, of, axes)

    def forwards(floats: Any, pools: Any, of: Any):
        # With symbolic zeros every leaf says whether its gradient is asked for.
        for which, pool in zip(pools._fields, pools, strict=True):
            if pool is not None and pool.perturbed and is_quantized(pool.value.dtype):
                raise NotImplementedError(
                    f"{rule.function}: argument '{which}_cache': expected a cache that is not quantised to take "
                    f"gradients of, got {pool.value.dtype.name}"
                )
        floats, pools, of = derivative.primals((floats, pools, of))
        out, lse, bad = _forwards(rule, floats, pools, of, axes)
        return (out, lse, bad), (floats, pools, of, out, lse)

    def backwards(saved, cotangents):
        floats, pools, of, out, lse = saved
        d_out, d_lse, _ = cotangents
        # The maximum has no gradient of its own: the sum is relative to it.
        d_lse = derivative.array(d_lse.rest) * softmax.LOG2_E
        return *_backwards(rule, floats, pools, of, (out, lse), (derivative.array(d_out), d_lse), axes), None

    attended.defvjp(forwards, backwards, symbolic_zeros=True)
    return attended(floats, pools, of)


class PageTile(NamedTuple):
    pages: jax.Array
    """[num_seqs, pages of a tile], clipped to the pool."""
    position: jax.Array
    seen: jax.Array
    bad: jax.Array
    """[num_seqs]: a page id in use is outside the pool."""


def _forwards(rule: Rule, floats: Floats, pools: Pools, of: Sequences, axes: tuple[str, ...]):
    num_seqs, heads, rows, _ = floats.rows.shape

    def step(i, carry):
        state, bad = carry
        tile = _page_tile(rule, of, i)
        stored = jax.tree.map(lambda pool: pool[tile.pages], pools)
        logits, values = _logits_and_values(rule, floats, stored, of, tile)
        state, weights = softmax.rescale(state, logits, exp2_below=triton.exp2_below)
        acc = state.acc + jnp.einsum("bhrk,bhkd->bhrd", weights, values, precision="highest")
        return state._replace(acc=acc), bad | tile.bad

    start = softmax.start((num_seqs, heads, rows), rule.value_dim), jnp.zeros(num_seqs, bool)
    state, bad = lax.fori_loop(*_bounds(rule, of), step, sharding.vary(start, axes))
    return *softmax.finish(state), bad


def _backwards(rule: Rule, floats: Floats, pools: Pools, of: Sequences, result, cotangents, axes):
    (out, lse), (d_out, d_lse) = result, cotangents
    empty = jnp.isneginf(lse.rest)[..., None]
    # A query that sees no key may hold anything, and would add 0 * NaN to its keys' gradients.
    floats = floats._replace(rows=jnp.where(empty, 0.0, floats.rows))
    # Delta of flash attention: what normalisation subtracts from every weight's gradient.
    shared = jnp.sum(d_out * out, axis=-1, keepdims=True)

    def step(i, sums):
        tile = _page_tile(rule, of, i)
        stored = jax.tree.map(lambda pool: pool[tile.pages], pools)
        (logits, values), pull = jax.vjp(
            lambda floats, stored: _logits_and_values(rule, floats, stored, of, tile), floats, stored
        )
        weights = softmax.weights_again(logits, softmax.LOG2_E, lse)
        d_weights = jnp.einsum("bhrd,bhkd->bhrk", d_out, values, precision="highest")
        d_logits = weights * (d_weights - shared + d_lse[..., None])
        d_values = jnp.einsum("bhrk,bhrd->bhkd", weights, d_out, precision="highest")
        d_floats, d_tiles = pull((d_logits, d_values))
        sum_floats, sum_pools = sums
        sum_pools = tuple(map(functools.partial(_added, tile.pages), sum_pools, d_tiles))
        return jax.tree.map(jnp.add, sum_floats, d_floats), sum_pools

    zeros = jax.tree.map(jnp.zeros_like, floats), tuple(map(_zeros, pools))
    d_floats, d_pools = lax.fori_loop(*_bounds(rule, of), step, sharding.vary(zeros, axes))
    of_pools = [
        None if d is None or x is None else d.astype(x.dtype) for d, x in zip(d_pools, pools, strict=True)
    ]
    return d_floats, Pools._make(of_pools)


def _zeros(pool: jax.Array | None) -> jax.Array | None:
    """float32, of a pool that has gradients."""
    if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating) or is_quantized(pool.dtype):
        return None
    return jnp.zeros(pool.shape, jnp.float32)


def _added(pages: jax.Array, total: jax.Array | None, tiles: jax.Array | None) -> jax.Array | None:
    return None if total is None or tiles is None else total.at[pages].add(tiles.astype(jnp.float32))


def _pages_per_tile(rule: Rule, of: Sequences) -> int:
    most, columns = max(1, TILE_TOKENS // rule.pool.page_size), of.tables.shape[1]
    return most if symbolic.is_open(columns) else min(columns, most)


def _bounds(rule: Rule, of: Sequences) -> tuple[jax.Array, jax.Array]:
    """(first, end) of the tiles in which any sequence has a visible token."""
    tokens = _pages_per_tile(rule, of) * rule.pool.page_size
    first = jnp.min(jnp.where(of.lengths > 0, of.seen_from, jnp.iinfo(jnp.int32).max))
    return first // tokens, ceil_div(jnp.max(of.lengths, initial=0), tokens)


def _page_tile(rule: Rule, of: Sequences, i: jax.Array) -> PageTile:
    pages_per_tile = _pages_per_tile(rule, of)
    tokens = pages_per_tile * rule.pool.page_size
    columns = i * pages_per_tile + jnp.arange(pages_per_tile)
    pages = of.tables.at[:, columns].get(mode="fill", fill_value=-1)
    position = i * tokens + jnp.arange(tokens)
    held = masking.within(position, of.lengths[:, None]) & (position >= of.seen_from[:, None])
    if of.left is not None:
        held &= Seen(*(x[:, None] for x in of.left)).among(position)
    held = rule.held(of, position, held)
    usable = jnp.repeat(masking.usable_pages(pages, rule.pool.num_pages), rule.pool.page_size, axis=1)
    pages = jnp.clip(pages, 0, rule.pool.num_pages - 1)
    return PageTile(pages, position, held & usable, jnp.any(held & ~usable, axis=1))


def _logits_and_values(rule: Rule, floats: Floats, stored: Pools, of: Sequences, tile: PageTile):
    """Logits [num_seqs, num_kv_heads, rows, tokens] and values [.., tokens, dim] of a tile's stored pages."""

    def tokens(which: Which, pages: jax.Array, scale: jax.Array | None) -> jax.Array:
        floats = rule.floats(to_nhd(pages, rule.layout, which))
        num_seqs, number, page_size, heads, dim = floats.shape
        floats = jnp.moveaxis(floats.reshape(num_seqs, number * page_size, heads, dim), 2, 1)
        # Empty slots count as 0, whatever is stored there.
        seen = tile.seen[:, None, :, None]
        floats = jnp.where(seen, floats, 0.0)
        if scale is not None:
            by_token = jnp.repeat(jnp.swapaxes(scale, 1, 2), page_size, axis=2)
            floats *= jnp.where(seen, by_token[..., None], 0.0)
        return floats

    keys = tokens("key", stored.key, stored.key_scale)
    if stored.value is None:
        return rule.logits(floats, of, keys, tile.position, tile.seen), keys[..., : rule.value_dim]
    values = tokens("value", stored.value, stored.value_scale)
    return rule.logits(floats, of, keys, tile.position, tile.seen), values


def pack(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[num_seqs, q_len, num_heads, *dims] -> [num_seqs, num_kv_heads, q_len * group, *dims]."""
    num_seqs, q_len, num_heads, *dims = query.shape
    group = num_heads // num_kv_heads
    by_head = jnp.moveaxis(query.reshape(num_seqs, q_len, num_kv_heads, group, *dims), 1, 2)
    return by_head.reshape(num_seqs, num_kv_heads, q_len * group, *dims)


def unpack(rows: jax.Array, q_len: int) -> jax.Array:
    """The inverse of `pack`."""
    num_seqs, num_kv_heads, num_rows, *dims = rows.shape
    group = num_rows // q_len
    by_token = jnp.moveaxis(rows.reshape(num_seqs, num_kv_heads, q_len, group, *dims), 2, 1)
    return by_token.reshape(num_seqs, q_len, num_kv_heads * group, *dims)
