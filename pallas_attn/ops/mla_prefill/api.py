"""`mla_prefill`: signature, checks, and which form each sequence takes."""

import functools
import math
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp

from pallas_attn._call import gradients, options, partition, symbolic
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.operands import ready
from pallas_attn._tile.latents import BYTES, LATENT_DIM, QUERY_DIM, ROPE_DIM, token_width
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.ops.mla_prefill import absorbed, projected
from pallas_attn.ops.mla_prefill.batch import Batch
from pallas_attn.ops.mla_prefill.operands import Operands
from pallas_attn.ops.ragged_attention import arguments
from pallas_attn.ops.ragged_attention.record import record

OP = record("mla_prefill")
"""Checks the implementation of the attention in either form."""

type Form = Literal["absorbed", "projected"]
FORMS = get_args(Form.__value__)
# Cost of a product over latents relative to one over keys and values of 192 and 128: measured on an H200 (README).
ABSORBED_COST = 1.75


@overload
def mla_prefill(
    query: jax.Array, latent_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, key_up: jax.Array,
    value_up: jax.Array, scale: float | None = None, form: Form | None = None,
    return_lse: Literal[False] = False, implementation: ImplementationOrCuda | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def mla_prefill(
    query: jax.Array, latent_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, key_up: jax.Array,
    value_up: jax.Array, scale: float | None = None, form: Form | None = None, return_lse: Literal[True],
    implementation: ImplementationOrCuda | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def mla_prefill(
    query: jax.Array, latent_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, key_up: jax.Array,
    value_up: jax.Array, scale: float | None = None, form: Form | None = None, return_lse: bool = False,
    implementation: ImplementationOrCuda | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def mla_prefill(
    query: jax.Array,
    latent_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.typing.ArrayLike | None = None,
    *,
    key_up: jax.Array,
    value_up: jax.Array,
    scale: float | None = None,
    form: Form | None = None,
    return_lse: bool = False,
    implementation: ImplementationOrCuda | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of each sequence's newest tokens, as many as each one has, over its paged latents.

    One call serves prompts, chunks of prompts, continued prompts and decoding, mixed in any way, as
    `ragged_paged_attention`. The two forms of latent attention give the same up to rounding:

    - absorbed: `key_up` is multiplied into the queries, and `value_up` into the output; attention itself is over the
      latents, 576 + 512 products for a pair of a query and a key.
    - projected: keys and values of each head are made from the latents, 2 x 512 x (nope_dim + value_dim) operations for
      a token, and attended to at nope_dim + 64 + value_dim products for a pair. The context's are made 4096 tokens at a
      time, across sequences, and the partial results are merged by their log-sum-exps; the call's own tokens' are made
      at once.

    Without `form`, a sequence is projected from `least_projected` new tokens on, 83 at DeepSeek's 128 and 128, whatever
    its context: from there making keys and values takes less time than it saves. A form that no sequence of a call
    takes is not computed.

    Works inside jit, scan and while_loop, where the host reads nothing. There are no gradients.

    Args:
        query: [total_tokens, num_heads, nope_dim + 64], bf16, fp16 or float32, as projected: not absorbed, and its last
            64 elements rotated. Sequence i's newest tokens are query[cu_q_lens[i]:cu_q_lens[i + 1]], oldest first;
            those behind the last sequence are padding: out 0, lse -inf.
        latent_cache: [num_pages, page_size, 1, 576] in query's dtype: 512 latent elements and 64 of the rotary key;
            or, with a bf16 query, [num_pages, page_size, 1, 656] uint8 of `quantize_latents`, which are projected
            whatever the sequence. The new tokens are in it already. Slots without tokens may hold anything.
        block_tables, seq_lens, cu_q_lens, num_seqs: as of `ragged_paged_attention`. More new tokens than `seq_lens`
            says are NaN; a length of 0 gives out 0 and lse -inf.
        key_up: [num_heads, nope_dim, 512], value_up: [num_heads, value_dim, 512]: the halves of the up-projection, in
            query's dtype.
        scale: factor of the logits, a number above 0; None means (nope_dim + 64) ** -0.5.
        form: "absorbed" or "projected" for all sequences; None as above.
        return_lse: also return the natural log-sum-exp of the logits.
        implementation: of the attention in either form: None, "cuda", "pallas", "triton", "xla" or "interpret", as of
            `ragged_paged_attention`. "cuda" serves the projected form, with nope_dim + 64 and value_dim up to 256,
            multiples of 8; the absorbed form then has what None takes. Projections and merging are XLA's.

    Returns:
        out [total_tokens, num_heads, value_dim] in query's dtype; with return_lse, also lse [total_tokens, num_heads],
        float32. A page id in use outside [0, num_pages), or a length that is negative or beyond the table, gives NaN in
        rows of that sequence alone.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or value, or a form or implementation that cannot serve.

    Sharded over a mesh, outside shard_map, a call is partitioned over heads, of the query and of both up-projections.

    Memory: projected, keys and values of total_tokens and of 4096 more, each num_heads x (nope_dim + 64 + value_dim)
    elements, and two float32 outputs.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1; vLLM's MLA prefill, which also projects in chunks.
    """
    check = ArgumentChecker("mla_prefill")
    check.array("query", query, ("total_tokens", "num_heads", "query_dim"), options.DTYPES)
    nope_dim = query.shape[2] - ROPE_DIM
    if nope_dim < 1:
        check.fail("query", f"more than {ROPE_DIM} elements a head", str(query.shape[2]))
    dtypes = [query.dtype, *([BYTES] if query.dtype == jnp.bfloat16 else [])]
    check.dtype_among("latent_cache", latent_cache, dtypes)
    width = token_width(latent_cache.dtype)
    check.array("latent_cache", latent_cache, ("num_pages", "page_size", 1, width), dtypes)
    num_seqs = arguments.check_batch(check, query, block_tables, seq_lens, cu_q_lens, num_seqs)
    check.non_empty("latent_cache", latent_cache)
    check.array("key_up", key_up, ("num_heads", nope_dim, LATENT_DIM), [query.dtype])
    check.array("value_up", value_up, ("num_heads", "value_dim", LATENT_DIM), [query.dtype])
    check.positive_float("scale", scale)
    check.flag("return_lse", return_lse)
    if form is not None:
        check.one_of("form", form, FORMS)
    if form == "absorbed" and latent_cache.dtype == BYTES:
        check.fail("form", "'projected' or None for latents of 656 bytes", "'absorbed'")

    operands = Operands(
        query=query,
        latent_cache=latent_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        key_up=key_up,
        value_up=value_up,
        scale=float((nope_dim + ROPE_DIM) ** -0.5 if scale is None else scale),
        form=form if latent_cache.dtype != BYTES else "projected",
        implementation=implementation,
    )
    results = ("tokens heads value_dim", "tokens heads")
    out, lse = partition.divide(check.function, _without_gradients, ready(operands), results)
    return (out, lse) if return_lse else out


def _without_gradients(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Gradients are refused: only one of the forms would have any, through plain loops."""
    reason = "there are no gradients; flash_attention over keys and values projected from latents has"
    return gradients.refuse("mla_prefill", _attend, reason)(operands)


def _attend(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """A call, or one device's heads of it."""
    batch, form = Batch.of(operands), operands.form
    least = least_projected(operands.key_up.shape[1], operands.value_up.shape[1])
    in_latents = functools.partial(absorbed.attend, OP, batch)
    in_heads = functools.partial(projected.attend, OP, batch)
    none_is_long = least is None or (not symbolic.is_open(batch.num_tokens) and batch.num_tokens < least)
    if form == "absorbed" or (form is None and none_is_long):
        return in_latents(batch.holds_some)
    if form == "projected" or least is None:
        return in_heads(batch.holds_some)
    is_long = batch.q_lens >= least
    mine = {in_latents: batch.holds_some & ~is_long, in_heads: batch.holds_some & is_long}
    parts = [_where_any(seqs, attend) for attend, seqs in mine.items()]
    by_token = batch.by_token(is_long)[:, None]
    out, lse = (
        jnp.where(by_token.reshape(-1, *[1] * (a.ndim - 1)), b, a) for a, b in zip(*parts, strict=True)
    )
    return out, lse


def least_projected(nope_dim: int, value_dim: int) -> int | None:
    """The least number of new tokens with which a sequence is projected; None: never.

    For each context token, a new token saves 576 + 512 products of the absorbed kind and costs nope_dim + 64 +
    value_dim of the projected kind; computing that token's keys and values costs 512 x (nope_dim + value_dim) once.
    """
    saved = ABSORBED_COST * (QUERY_DIM + LATENT_DIM) - (nope_dim + ROPE_DIM + value_dim)
    return None if saved <= 0 else math.ceil(LATENT_DIM * (nope_dim + value_dim) / saved)


def _where_any(mine: jax.Array, attend: Any) -> tuple[jax.Array, jax.Array]:
    """attend(mine) if it contains any sequence, otherwise zeros."""
    shapes = jax.eval_shape(attend, mine)

    def nothing(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = shapes
        return jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype)

    return jax.lax.cond(jnp.any(mine), attend, nothing, mine)
