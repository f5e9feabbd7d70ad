"""The one forward pass behind the NNX and the Linen module: write the new keys and values, then attend."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedKVCache, paged_attention
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn.ops.kv_cache.api import DTYPES


def write_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedKVCache,
    layer: jax.Array | int,
    positions: jax.Array,
    *,
    scale: float | None,
    implementation: str | None,
) -> tuple[jax.Array, PagedKVCache]:
    """See `pallas_attn.nn.PagedAttention.__call__`."""
    check = ArgumentChecker("PagedAttention")
    check.array("query", query, ("num_seqs", "n", "num_heads", "head_dim"), DTYPES)
    # Prefill multiplies queries with the new keys themselves.
    dtypes = DTYPES if query.shape[1] == 1 else [query.dtype]
    check.array("key", key, ("num_seqs", "n", "num_kv_heads", "head_dim"), dtypes)
    check.array("value", value, ("num_seqs", "n", "num_kv_heads", "head_dim"), [key.dtype])
    check.array("positions", positions, ("num_seqs", "n"), [jnp.int32])
    check.array("cache.block_tables", cache.block_tables, ("num_seqs", "max_pages"), [jnp.int32])
    check.multiple("query", query.shape[2], "num_kv_heads", check.dims["num_kv_heads"])
    check.positive_float("scale", scale)
    if query.shape[1] > 1:
        # Fresh prompts: the first keys and values that this layer's quantised cache holds set its scales. Prompts
        # that join others find them set.
        cache = cache.calibrate(layer, key, value, positions)
    cache = cache.write(layer, key, value, positions, implementation=implementation)
    if query.shape[1] == 1:
        # A row whose position is negative has length 0: it reads no page and gets zeros.
        output: Any = paged_attention(
            query[:, 0],
            cache.key_cache,
            cache.value_cache,
            cache.layer_tables(layer),
            positions[:, 0] + 1,
            scale=scale,
            layout=cache.layout,
            implementation=implementation,
            **cache.scales(layer),
        )
        return output[:, None], cache
    return _prefill(query, key, value, positions, scale), cache


def _prefill(
    query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array, scale: float | None
) -> jax.Array:
    """Causal attention of right-padded prompts over themselves; the pages are only written.

    Padding sits after the real tokens, so the causal mask alone keeps it out of every real row.
    """
    lengths = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    # float32 inputs mean float32 products: on a GPU the default would be TF32.
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=True, key_value_seq_lengths=lengths
        )
