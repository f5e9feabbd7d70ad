"""From a call's arguments to what kernels take: checks and normal forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.checks import ArgumentChecker, check_int, shown
from pallas_attn._call.options import DTYPES
from pallas_attn._tile.band import Band
from pallas_attn.ops.flash_attention import segments

LONGEST = 2**30  # tokens; positions are int32


def check_arrays(
    check: ArgumentChecker, query, key, value, layout: str, without_tokens: bool
) -> dict[str, int]:
    """Checks and returns the sizes; with `without_tokens` batch, queries and keys may be empty."""

    def shape(tokens: str, heads: str, dim: str) -> tuple[str, ...]:
        return ("batch", tokens, heads, dim) if layout == "BTNH" else ("batch", heads, tokens, dim)

    check.array("query", query, shape("q_len", "num_heads", "head_dim"), DTYPES)
    check.array("key", key, shape("kv_len", "num_kv_heads", "head_dim"), [query.dtype])
    check.array("value", value, shape("kv_len", "num_kv_heads", "value_dim"), [query.dtype])
    kinds = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
    if not without_tokens or any(check.dims[kind] == 0 for kind in kinds):
        for name, array in (("query", query), ("key", key), ("value", value)):
            check.non_empty(name, array)
    check.multiple("query", check.dims["num_heads"], "num_kv_heads", check.dims["num_kv_heads"])
    return check.dims


def split_heads(query: jax.Array, layout: str, group: int) -> jax.Array:
    at = 2 if layout == "BTNH" else 1
    return query.reshape(*query.shape[:at], query.shape[at] // group, group, *query.shape[at + 1 :])


def pairwise(check: ArgumentChecker, name: str, array: Any, dtypes: Any, group: int) -> jax.Array:
    """[batch or 1, num_kv_heads or 1, group or 1, q_len or 1, kv_len]."""
    check.dtype_among(name, array, dtypes)
    full = [check.dims[dim] for dim in ("batch", "num_heads", "q_len", "kv_len")]
    if len(array.shape) != 4 or any(n not in (1, most) for n, most in zip(array.shape, full, strict=True)):
        expected = "[batch={} or 1, num_heads={} or 1, q_len={} or 1, kv_len={} or 1]".format(*full)
        check.fail(name, f"shape {expected}", str(list(array.shape)))
    batch, heads, queries, keys = array.shape
    if keys < full[-1] and array.dtype != jnp.bool_:
        array = array.astype(jnp.float32)  # so that its gradient, a sum over keys, is rounded once
    array = jnp.broadcast_to(array, (batch, heads, queries, full[-1]))
    return array.reshape(batch, *((1, 1) if heads == 1 else (heads // group, group)), queries, full[-1])


def band(check: ArgumentChecker, causal: bool, window: Any, offset: int) -> Band:
    left = right = None
    if isinstance(window, tuple):
        if len(window) != 2:
            check.fail("sliding_window", "an int or (left, right)", f"a tuple of {len(window)}")
        for side in window:
            if side is not None:
                check_int(check.function, check.spell("sliding_window"), side, least=0)
        left, right = (None if side is None else int(side) for side in window)
    elif window is not None:
        if not isinstance(window, int | np.integer):
            check.fail("sliding_window", "an int or a tuple (left, right)", shown(window), TypeError)
        check.count("sliding_window", window)
        left = right = int(window) - 1
    # Bounds beyond all tokens are clipped: positions and bounds are added in int32.
    left = None if left is None else min(left, LONGEST + offset)
    right = None if right is None else min(right, LONGEST - offset)
    return Band(left, 0 if causal else right, offset)


def documents(
    check: ArgumentChecker,
    segment_ids: Any,
    cu_q_lens: Any,
    lengths: dict[str, Any],
    implementation: str | None,
) -> tuple[segments.Documents, segments.Documents] | None:
    """The documents of queries and of keys, or None if there are none. `lengths`: of queries and of keys where padding
    follows them."""
    if lengths:
        batch, *tokens = (check.dims[dim] for dim in ("batch", "q_len", "kv_len"))
        if 0 in (batch, *tokens):
            return None  # there are no pairs
        return segments.sides_of_sizes(lengths, dict(zip(segments.SIZES, tokens, strict=True)))
    if segment_ids is None and cu_q_lens is None:
        return None
    if cu_q_lens is not None:
        if segment_ids is not None:
            check.fail("cu_q_lens", "None where there are segment_ids", "both")
        return _sequences(check, cu_q_lens)
    pair: tuple[Any, ...] = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        check.fail("segment_ids", "an array or a pair of arrays", f"a tuple of {len(pair)}")
    for ids, tokens in zip(pair, ("q_len", "kv_len"), strict=True):
        check.array("segment_ids", ids, ("batch", tokens), [jnp.int32])
    of_queries = jnp.asarray(pair[0])
    of_keys = of_queries if pair[0] is pair[1] else jnp.asarray(pair[1])
    return segments.sides(of_queries, of_keys, implementation)


def _sequences(check: ArgumentChecker, cu_q_lens: Any) -> tuple[segments.Documents, segments.Documents]:
    check.array("cu_q_lens", cu_q_lens, ("num_seqs + 1",), [jnp.int32])
    check.non_empty("cu_q_lens", cu_q_lens)
    check.not_descending("cu_q_lens", cu_q_lens)
    batch, q_len, kv_len = (check.dims[dim] for dim in ("batch", "q_len", "kv_len"))
    if batch != 1:
        check.fail("query", "a batch of 1 where there are cu_q_lens", str(batch))
    if q_len != kv_len:
        check.fail("key", f"as many tokens as query ({q_len}) where there are cu_q_lens", str(kv_len))
    return segments.sides_of_lengths(jnp.asarray(cu_q_lens), q_len)
