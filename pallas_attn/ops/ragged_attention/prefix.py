"""`prefix_prefill`: signature and documentation; see arguments.py for the checks."""

import dataclasses
from typing import Literal, overload

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.pools import FP8_DTYPES
from pallas_attn._types import Dtype, FloatName, Fp8Name, ImplementationOrCuda, KVCache, Layout
from pallas_attn.ops.ragged_attention import arguments
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.record import record

OP = record("prefix_prefill")


@overload
def prefix_prefill(
    query: jax.Array, key: jax.Array, value: jax.Array, key_cache: KVCache, value_cache: KVCache,
    block_tables: jax.Array, seq_lens: jax.Array, cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None, softcap: float | None = None,
    sliding_window: int | jax.Array | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, skip_decode: bool = False,
    out: jax.Array | None = None, out_scale: jax.typing.ArrayLike | None = None,
    out_dtype: Dtype | FloatName | Fp8Name | None = None, return_lse: Literal[False] = False,
    layout: Layout = "NHD", implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def prefix_prefill(
    query: jax.Array, key: jax.Array, value: jax.Array, key_cache: KVCache, value_cache: KVCache,
    block_tables: jax.Array, seq_lens: jax.Array, cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None, softcap: float | None = None,
    sliding_window: int | jax.Array | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, skip_decode: bool = False,
    out: jax.Array | None = None, out_scale: jax.typing.ArrayLike | None = None,
    out_dtype: Dtype | FloatName | Fp8Name | None = None, return_lse: Literal[True], layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None, config: RaggedAttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def prefix_prefill(
    query: jax.Array, key: jax.Array, value: jax.Array, key_cache: KVCache, value_cache: KVCache,
    block_tables: jax.Array, seq_lens: jax.Array, cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None, softcap: float | None = None,
    sliding_window: int | jax.Array | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, skip_decode: bool = False,
    out: jax.Array | None = None, out_scale: jax.typing.ArrayLike | None = None,
    out_dtype: Dtype | FloatName | Fp8Name | None = None, return_lse: bool = False, layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None, config: RaggedAttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def prefix_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_cache: KVCache,
    value_cache: KVCache,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    causal: bool = True,
    skip_decode: bool = False,
    out: jax.Array | None = None,
    out_scale: jax.typing.ArrayLike | None = None,
    out_dtype: Dtype | FloatName | Fp8Name | None = None,
    return_lse: bool = False,
    layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of new tokens over a context in pages and over themselves, before they are in any page.

    Like `ragged_paged_attention`, which explains the arguments that are not listed here. But the new tokens' keys and
    values are arrays of their own, in the query's dtype; beside a quantised cache they are not rounded to it. They see
    all of their context (or what the window leaves of it) and themselves causally. Beside a cache of 8 bits "cuda"
    rounds its values, times their scale, to the query's dtype.

    Args:
        key: [total_tokens, num_kv_heads, head_dim], of the tokens of `query` and in its dtype.
        value: [total_tokens, num_kv_heads, value_dim].
        key_cache, value_cache, block_tables: hold the context: the first seq_lens[i] - q_len[i] tokens of sequence i.
        seq_lens: [max_seqs] int32, context and new tokens together; less than the new tokens alone gives NaN.
        skip_decode: leave sequences with one new token to another kernel: their rows keep what `out` holds, or are 0
            without `out`; their lse is -inf.
        out: [total_tokens, num_heads, value_dim] in the output's dtype, which the result takes the place of: donate it,
            or it is copied. Every row is written except those that `skip_decode` leaves.
        out_scale: with an fp8 output, a number above 0 or a float32 scalar that may be traced: stored = out /
            out_scale, saturating. None is 1.
        out_dtype: None (out's, or else query's), float8_e4m3fn or float8_e5m2.

    Returns:
        out [total_tokens, num_heads, value_dim]; with return_lse, also lse [total_tokens, num_heads], float32.

    Raises:
        TypeError, ValueError: as `ragged_paged_attention`.

    Source: vLLM's Triton kernel prefix_prefill, whose features these are.
    """
    check = ArgumentChecker("prefix_prefill")
    num_seqs = arguments.check_arrays(
        check, query, key_cache, value_cache, block_tables, seq_lens, cu_q_lens, num_seqs, layout
    )
    check.array("key", key, ("total_tokens", "num_kv_heads", "head_dim"), [query.dtype])
    check.array("value", value, ("total_tokens", "num_kv_heads", "value_dim"), [query.dtype])
    check.flag("skip_decode", skip_decode)
    dtype = arguments.output_dtype(check, query.dtype, out_dtype)
    if out is not None:
        dtypes = [query.dtype, *FP8_DTYPES] if out_dtype is None else [dtype]
        check.array("out", out, ("total_tokens", "num_heads", "value_dim"), dtypes)
        dtype = jnp.dtype(out.dtype)
    operands = arguments.made(
        check,
        query=query,
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        tree_mask=tree_mask,
        query_positions=query_positions,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=causal,
        out_scale=out_scale,
        out_dtype=dtype,
        return_lse=return_lse,
        layout=layout,
    )
    if out is not None or skip_decode:
        shape = (*query.shape[:2], check.dims["value_dim"])
        operands = dataclasses.replace(
            operands,
            skip_decode=bool(skip_decode),
            out=jnp.zeros(shape, dtype) if out is None else jnp.asarray(out),
            lse=jnp.full(shape[:2], -jnp.inf, jnp.float32),
        )
    out, lse = OP.serve(operands, implementation=implementation, config=config)
    return (out, lse) if return_lse else out
