"""The indexer of DeepSeek's sparse attention: it chooses the tokens that a query token attends to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import PagedLatentCache
from pallas_attn._call import partition
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.operands import dims, operands
from pallas_attn._call.optional import needs_extra
from pallas_attn._call.options import DTYPES
from pallas_attn._call.sharding import placed_like
from pallas_attn._tile.masking import usable_pages
from pallas_attn._types import Array
from pallas_attn.ops.kv_cache.addressing import check_layer

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._new_tokens import NewTokens, is_ragged
from ._paged import check_positions, leading
from .layers import PRECISION, linear
from .mla import MLAConfig
from .rotary import apply_rotary, rotary_angles, rotary_frequencies

LAYER_NORM_EPS = 1e-6
# Bytes of single heads' logits that are held at once; the rest is computed in turn.
MOST_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Sizes of an indexer.

    Attributes:
        num_heads: heads that judge a token.
        head_dim: elements of an index query and of an index key, the rotary ones included.
        top_k: most tokens that a query token attends to.

    Raises:
        TypeError, ValueError: a size that is no int of at least 1.
    """

    num_heads: int = 64
    head_dim: int = 128
    top_k: int = 2048

    def __post_init__(self):
        check = ArgumentChecker("IndexerConfig")
        for field in dataclasses.fields(self):
            check.count(field.name, getattr(self, field.name))


class Indexer(nnx.Module):
    """Scores every token of a sequence for each new one and names the best, for `MultiHeadLatentAttention`.

    A token keeps one index key, normalised, with rotary embedding on its first elements. A query token's index queries
    come from its compressed query, and a weight for each head from its hidden state; the score of token s is

        sum over heads h of  w_h * relu(q_h . k_s) / sqrt(num_heads * head_dim)

    and the `top_k` best of the tokens up to the query's own are chosen, exactly, in plain jnp: scores take 4 bytes for
    each pair of a query token and a slot of its block table. Published implementations multiply queries and keys by a
    Hadamard matrix before they round them to 8 bits. That matrix is orthogonal and leaves every product as it is, so
    here, where keys are kept in the cache's 16 or 32 bits, it is left out.

    Args:
        config: sizes; head_dim is at least the attention's qk_rope_head_dim.
        attention: of the layer that the indexer chooses for: its hidden_size, q_lora_rank (not None) and rotary
            embedding.
        dtype: of weights and activations, bfloat16, float16 or float32; heads' weights and scores are float32.
        rngs: random weights are drawn from it.

    Raises:
        TypeError, ValueError: an argument of the wrong type, sizes that do not fit, or a dtype that there is not.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), the lightning indexer of DeepSeek Sparse Attention.
    """

    def __init__(self, config: IndexerConfig, attention: MLAConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        check = ArgumentChecker("Indexer")
        check.instance("config", config, IndexerConfig)
        check.instance("attention", attention, MLAConfig)
        check.dtype("dtype", dtype, DTYPES)
        check.instance("rngs", rngs, nnx.Rngs)
        if attention.q_lora_rank is None:
            check.fail("attention", "one with compressed queries (q_lora_rank)", "one without")
        if config.head_dim < attention.qk_rope_head_dim:
            expected = f"head_dim of at least {attention.qk_rope_head_dim}, the rotary elements"
            check.fail("config", expected, str(config.head_dim))
        self.config, self.attention = config, attention
        hidden, heads, dim = attention.hidden_size, config.num_heads, config.head_dim
        self.q_proj = linear(attention.q_lora_rank, heads * dim, dtype, rngs)
        self.k_proj = linear(hidden, dim, dtype, rngs)
        self.k_norm = nnx.LayerNorm(
            dim, epsilon=LAYER_NORM_EPS, use_fast_variance=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.weights_proj = linear(hidden, heads, jnp.float32, rngs)

    def __call__(
        self,
        x: jax.Array,
        compressed_query: jax.Array,
        cache: PagedLatentCache,
        layer: jax.Array | int,
        positions: jax.Array | NewTokens,
        *,
        cu_q_lens: jax.Array | None = None,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Writes the index keys of the new tokens of every sequence, then chooses for each of them.

        Args:
            x: [num_seqs, n, hidden_size], or ragged [total_tokens, hidden_size], what the attention gets.
            compressed_query: [..., q_lora_rank], of `MultiHeadLatentAttention.compressed_query(x)`.
            cache: with index keys (`PagedLatentCache.create(index_dim=head_dim)`); donate it to the surrounding jit.
            layer: index of this layer in the cache; an int or an integer scalar that may be traced.
            positions: [num_seqs, n] or [total_tokens] int32 position of each token in its sequence; negative ones write
                nothing.
            cu_q_lens: [num_seqs + 1] int32, for the ragged form, as in `MultiHeadLatentAttention`.

        Returns:
            Positions [..., min(top_k, slots of a block table)] int32, the best first, -1 behind the last where
            there are fewer; and the cache with the new keys. A page in use that lies outside the pool is chosen before
            any other: attention to it gives NaN.

        Raises:
            TypeError, ValueError: another cache or one without index keys, wrong shapes or dtypes, a layer out of
            range.
        """
        config = self.config
        check = ArgumentChecker("Indexer")
        check.instance("cache", cache, PagedLatentCache)
        layer = check_layer(check, layer, cache.num_layers)
        check.bind("cache", num_seqs=cache.shared_tables.shape[0])
        lead = leading(positions, cu_q_lens)
        check.array("x", x, (*lead, self.attention.hidden_size), DTYPES)
        check.array("compressed_query", compressed_query, (*lead, self.q_proj.in_features), DTYPES)
        check_positions(check, positions, cu_q_lens)
        check.non_empty("x", x)
        x, compressed_query = jnp.asarray(x), jnp.asarray(compressed_query)
        new = positions if isinstance(positions, NewTokens) else None
        if is_ragged(positions, cu_q_lens):  # each token as its own sequence
            new = new or NewTokens.of(check, positions, cu_q_lens)
            by_token = new.by_token(cache)
            tokens = new.pack(x)[:, None], new.pack(compressed_query)[:, None]
            chosen, written = self(*tokens, by_token, layer, new.positions[:, None])
            return placed_like(chosen[:, 0], x), written.replace(block_tables=cache.shared_tables)
        positions = jnp.asarray(new.came if new else positions)

        queries = self.q_proj(compressed_query).reshape(*positions.shape, config.num_heads, config.head_dim)
        queries = self._rotated(queries, positions)
        keys = self._rotated(self.k_norm(self.k_proj(x))[:, :, None], positions)[:, :, 0]
        weights = self.weights_proj(x.astype(jnp.float32)) * (config.num_heads * config.head_dim) ** -0.5
        cache = cache.write_index_keys(layer, keys, positions)

        tables = cache.layer_tables(layer)
        return best_tokens(queries, weights, cache.index_keys, tables, positions, config.top_k), cache

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotary embedding of the first elements of [num_seqs, n, heads, head_dim], pairing halves, as its weights are
        laid out, whatever the attention's pairing is."""
        attention = self.attention
        frequencies = rotary_frequencies(attention.qk_rope_head_dim, attention.rope_theta, attention.yarn)
        scale = attention.yarn.rotary_scale if attention.yarn else 1.0
        rope, plain = jnp.split(x, [attention.qk_rope_head_dim], axis=-1)
        rope = apply_rotary(rope, *rotary_angles(positions, frequencies, scale))
        return jnp.concatenate([rope, plain], axis=-1)


def best_tokens(
    queries: jax.Array,
    weights: jax.Array,
    index_keys: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    top_k: int,
) -> jax.Array:
    """[num_seqs, n, min(top_k, slots)] int32: what `Indexer` returns, with slots = max_pages * page_size.

    Args:
        queries: [num_seqs, n, num_heads, head_dim]. weights: [num_seqs, n, num_heads] float32.
        index_keys: [num_pages, page_size, 1, head_dim]; slots behind a query's position may hold anything.
        tables: [num_seqs, max_pages] int32. positions: [num_seqs, n] int32.
    """
    given = _Scored(
        queries=queries, weights=weights, index_keys=index_keys, tables=tables, positions=positions
    )
    (chosen,) = partition.divide("Indexer", _best_tokens, given, ("seqs n top",), static={"top_k": top_k})
    return chosen


@operands
class _Scored:
    """Scores sum over all heads of an indexer."""

    queries: Array = dims("seqs n all_heads dim")
    weights: Array = dims("seqs n all_heads")
    index_keys: Array = dims("pages slot one dim")
    tables: Array = dims("seqs columns")
    positions: Array = dims("seqs n")


def _best_tokens(given: _Scored, *, top_k: int) -> tuple[jax.Array]:
    queries, weights, index_keys, tables, positions = (
        given.queries, given.weights, given.index_keys, given.tables, given.positions
    )  # fmt: skip
    num_seqs, n, num_heads, head_dim = queries.shape
    num_pages, page_size = index_keys.shape[:2]
    slots = tables.shape[1] * page_size

    def of_token(keys: jax.Array, usable: jax.Array, token: tuple[jax.Array, ...]) -> jax.Array:
        query, weight, position = token
        by_head = jnp.einsum(
            "hd,td->ht", query, keys, precision=PRECISION, preferred_element_type=jnp.float32
        )
        scores = jnp.einsum("h,ht->t", weight, jax.nn.relu(by_head), precision=PRECISION)
        scores = jnp.where(usable, scores, jnp.inf)
        scores = jnp.where(jnp.arange(slots) <= position, scores, -jnp.inf)
        best, chosen = jax.lax.top_k(scores, min(top_k, slots))
        return jnp.where(best > -jnp.inf, chosen, -1)

    tokens_at_once = min(n, max(1, MOST_BYTES // (4 * num_heads * slots)))
    seqs_at_once = min(num_seqs, max(1, MOST_BYTES // (4 * num_heads * slots * tokens_at_once)))

    def of_sequence(one: tuple[jax.Array, ...]) -> jax.Array:
        queries, weights, positions, table = one
        keys = index_keys[table].reshape(slots, head_dim)
        usable = jnp.repeat(usable_pages(table, num_pages), page_size)
        choose = functools.partial(of_token, keys, usable)
        return jax.lax.map(choose, (queries, weights, positions), batch_size=tokens_at_once)

    return (jax.lax.map(of_sequence, (queries, weights, positions, tables), batch_size=seqs_at_once),)
