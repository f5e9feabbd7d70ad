"""The forward pass of both the NNX and the Linen module: write the new keys and values, then attend."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import PagedKVCache, paged_attention, ragged_paged_attention
from pallas_attn._call import dispatch
from pallas_attn._call import options as tile_options
from pallas_attn._call.checks import ArgumentChecker, is_array, is_number, is_traced, shown
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import is_quantized, pool_shape
from pallas_attn._types import Implementation
from pallas_attn.ops.kv_cache.addressing import check_layer

from ._new_tokens import NewTokens, is_ragged


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a `PagedAttention`, checked. See there."""

    scale: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    implementation: Implementation | None = None

    @classmethod
    def checked(cls, scale, softcap, sliding_window, alibi_slopes, sinks, implementation) -> "Options":
        check = ArgumentChecker("PagedAttention")
        check.positive_float("scale", scale)
        softcap = tile_options.softcap(check, softcap)
        if sliding_window is not None:
            check.count("sliding_window", sliding_window)
        check.flag("sinks", sinks)
        dispatch.check_name(check.function, "paged_attention", implementation)
        slopes = None if alibi_slopes is None else _slopes(check, alibi_slopes)
        return cls(scale, softcap, sliding_window, slopes, implementation)


def _slopes(check: ArgumentChecker, slopes: Any) -> tuple[float, ...]:
    """Numbers rather than an array, as part of the module's definition like its other options."""
    expected = "finite numbers, one for each query head, or None"
    if is_array(slopes) and not is_traced(slopes) and len(slopes.shape) == 1:
        slopes = list(np.asarray(slopes))
    if not isinstance(slopes, list | tuple):
        check.fail("alibi_slopes", expected, shown(slopes), TypeError)
    for slope in slopes:
        if not is_number(slope):
            check.fail("alibi_slopes", expected, shown(slope), TypeError)
        if not math.isfinite(slope):
            check.fail("alibi_slopes", expected, repr(slope))
    return tuple(map(float, slopes))


def check_new_tokens(
    check: ArgumentChecker,
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    cu_q_lens: Any,
    *,
    query_dtypes: Sequence[Any],
    key_dtypes: Sequence[Any],
) -> None:
    """Checks the new tokens, batched or ragged; `check` has bound the cache's sizes."""
    tokens = leading(positions, cu_q_lens)
    check.array("query", query, (*tokens, "num_heads", "head_dim"), query_dtypes)
    shape = (*tokens, "num_kv_heads", "head_dim")
    check.array("key", key, shape, key_dtypes)
    check.array("value", value, shape, [key.dtype])
    check_positions(check, positions, cu_q_lens)
    for name, array in (("query", query), ("key", key)):
        check.non_empty(name, array)
    check.multiple("query", query.shape[-2], "num_kv_heads", check.dims["num_kv_heads"])


def leading(positions: Any, cu_q_lens: Any) -> tuple[str, ...]:
    """The tokens' leading dimensions."""
    return ("total_tokens",) if is_ragged(positions, cu_q_lens) else ("num_seqs", "n")


def check_positions(check: ArgumentChecker, positions: Any, cu_q_lens: Any) -> None:
    if isinstance(positions, NewTokens):  # checked already
        return
    check.array("positions", positions, leading(positions, cu_q_lens), [jnp.int32])
    if cu_q_lens is not None:
        check.array("cu_q_lens", cu_q_lens, (check.dims["num_seqs"] + 1,), [jnp.int32])


def write_and_attend(
    options: Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedKVCache,
    layer: jax.Array | int,
    positions: jax.Array | NewTokens,
    *,
    cu_q_lens: jax.Array | None,
    sliding_window: int | jax.Array | None,
    sinks: jax.Array | None,
    batch_invariant: bool,
) -> tuple[jax.Array, PagedKVCache]:
    """See `pallas_attn.nn.PagedAttention.__call__`."""
    check = ArgumentChecker("PagedAttention")
    check.instance("cache", cache, PagedKVCache)
    layer = check_layer(check, layer, cache.num_layers)
    pool = pool_shape(cache.value_cache, cache.layout)
    num_seqs = cache.shared_tables.shape[0]
    check.bind("cache", num_seqs=num_seqs, num_kv_heads=pool.num_kv_heads, head_dim=pool.head_dim)
    stored = cache.key_cache.dtype
    check_new_tokens(
        check,
        *(query, key, value, positions, cu_q_lens),
        query_dtypes=DTYPES if is_quantized(stored) else [stored],
        key_dtypes=DTYPES,
    )
    if batch_invariant and cache.scale_per_page:
        # A page's scales would depend on which of its tokens came together.
        check.fail(
            "cache", "one without scale_per_page, with batch_invariant", "one with scales of each page"
        )
    rules = _rules(check, options, query.shape[-2], sliding_window, sinks)
    query, key, value = map(jnp.asarray, (query, key, value))

    def one_token_each(query: jax.Array, cache: PagedKVCache, positions: jax.Array) -> jax.Array:
        """One token of each of the cache's sequences. With a negative position its length is 0: it reads no page and
        gets zeros."""
        out: Any = paged_attention(
            query,
            cache.key_cache,
            cache.value_cache,
            cache.layer_tables(layer),
            positions + 1,
            layout=cache.layout,
            batch_invariant=batch_invariant,
            **rules,
            **cache.scales(layer),
        )
        return out

    if not is_ragged(positions, cu_q_lens) and query.shape[1] == 1:
        positions = jnp.asarray(positions)
        cache = cache.write(layer, key, value, positions, implementation=options.implementation)
        return one_token_each(query[:, 0], cache, positions[:, 0])[:, None], cache
    new = positions if isinstance(positions, NewTokens) else NewTokens.of(check, positions, cu_q_lens)
    paged, within = new.pages(cache)
    keys, values = new.pack(key), new.pack(value)
    written = (keys[:, None], values[:, None], within)
    # The first keys and values of this layer's quantised cache set its scales. Prompts that join later find them set.
    paged = paged if batch_invariant else paged.calibrate(layer, *written)
    paged = paged.write(layer, *written, implementation=options.implementation)
    cache = paged.replace(block_tables=cache.shared_tables)
    if batch_invariant:
        # Each token's splits depend on its own length alone, whatever it came with.
        out = one_token_each(new.pack(query), new.by_token(cache), new.positions)
        return new.unpack(out, layer, query), cache
    # With a quantised cache, new tokens see each other as stored, too: so results depend neither on chunking nor on
    # whether a prefix was found in the cache.
    out: Any = ragged_paged_attention(
        new.pack(query),
        cache.key_cache,
        cache.value_cache,
        cache.layer_tables(layer),
        new.seq_lens,
        new.cu_q_lens,
        layout=cache.layout,
        **rules,
        **cache.scales(layer),
    )
    return new.unpack(out, layer, query), cache


def _rules(
    check: ArgumentChecker,
    options: Options,
    num_heads: int,
    sliding_window: Any,
    sinks: jax.Array | None,
) -> dict[str, Any]:
    """Arguments of both ops besides the tokens."""
    window = options.sliding_window
    if isinstance(sliding_window, jax.Array):
        check.array("sliding_window", sliding_window, (), [jnp.int32])
        window = jnp.maximum(sliding_window, 1)
    elif sliding_window is not None:
        check.count("sliding_window", sliding_window)
        window = sliding_window
    rules: dict[str, Any] = dict(
        scale=options.scale,
        softcap=options.softcap,
        sliding_window=window,
        sinks=sinks,
        implementation=options.implementation,
    )
    if options.alibi_slopes is not None:
        if len(options.alibi_slopes) != num_heads:
            expected = f"num_heads={num_heads} (as query) numbers"
            check.fail("alibi_slopes", expected, str(len(options.alibi_slopes)))
        rules["alibi_slopes"] = jnp.asarray(options.alibi_slopes, jnp.float32)
    if sinks is not None:
        check.array("sinks", sinks, ("num_heads",), DTYPES)
    return rules
