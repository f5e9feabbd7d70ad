"""`sparse_mla_decode` and `sparse_mla_prefill`: signatures, checks, dispatch."""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.op import Op
from pallas_attn._call.operands import ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import serves_latents
from pallas_attn._tile import triton
from pallas_attn._tile.latents import BYTES, QUERY_DIM, token_width
from pallas_attn._types import BlockTables, ImplementationOrCuda
from pallas_attn.ops.sparse_mla import config as tiles
from pallas_attn.ops.sparse_mla import cuda
from pallas_attn.ops.sparse_mla.config import SparseMLAConfig
from pallas_attn.ops.sparse_mla.kernel import sparse_mla_pallas
from pallas_attn.ops.sparse_mla.operands import Ids, Operands
from pallas_attn.ops.sparse_mla.reference import sparse_mla_xla

ADDRESSING = ("slots", "positions")
type Addressing = Literal["slots", "positions"]


def _cuda_supports(operands: Operands) -> str | None:
    return cuda.unsupported(operands.query.dtype, operands.topk)


def _by_token(fn: Callable[..., tuple[jax.Array, ...]], operands: Operands, **options: Any):
    """`fn` over query tokens flattened into one dimension."""
    lead = operands.query.shape[:-2]
    return tuple(one.reshape(*lead, *one.shape[1:]) for one in fn(operands.by_token(), **options))


def _op(name: str, results: tuple[str, ...]) -> Op[Operands, SparseMLAConfig]:
    hopper = functools.partial(cuda.sparse_mla_cuda, function=name)
    return Op(
        name=name,
        implementations={
            "cuda": Implementation(functools.partial(_by_token, hopper), _cuda_supports, takes_config=False),
            **triton.implementations(functools.partial(_by_token, sparse_mla_pallas), serves_latents),
            "xla": Implementation(functools.partial(_by_token, sparse_mla_xla), takes_config=False),
        },
        results=results,
        config=SparseMLAConfig,
        key=tiles.key,
        heuristic=tiles.default,
    )


DECODE = _op("sparse_mla_decode", ("seqs q heads dim", "seqs q heads"))
PREFILL = _op("sparse_mla_prefill", ("seqs heads dim", "seqs heads", "seqs heads"))


@overload
def sparse_mla_decode(
    query: jax.Array, latent_cache: jax.Array, indices: jax.Array, *, addressing: Addressing = "slots",
    block_tables: BlockTables | None = None, topk_length: jax.Array | None = None,
    sinks: jax.Array | None = None, scale: float | None = None, return_lse: Literal[False] = False,
    implementation: ImplementationOrCuda | None = None, config: SparseMLAConfig | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def sparse_mla_decode(
    query: jax.Array, latent_cache: jax.Array, indices: jax.Array, *, addressing: Addressing = "slots",
    block_tables: BlockTables | None = None, topk_length: jax.Array | None = None,
    sinks: jax.Array | None = None, scale: float | None = None, return_lse: Literal[True],
    implementation: ImplementationOrCuda | None = None, config: SparseMLAConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def sparse_mla_decode(
    query: jax.Array, latent_cache: jax.Array, indices: jax.Array, *, addressing: Addressing = "slots",
    block_tables: BlockTables | None = None, topk_length: jax.Array | None = None,
    sinks: jax.Array | None = None, scale: float | None = None, return_lse: bool = False,
    implementation: ImplementationOrCuda | None = None, config: SparseMLAConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def sparse_mla_decode(
    query: jax.Array,
    latent_cache: jax.Array,
    indices: jax.Array,
    *,
    addressing: Addressing = "slots",
    block_tables: BlockTables | None = None,
    topk_length: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: ImplementationOrCuda | None = None,
    config: SparseMLAConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of query tokens that each name the cached tokens they attend to.

    The absorbed form, as in `mla_decode`, over the tokens that an indexer has chosen (DeepSeek-V3.2's sparse
    attention). Works inside jit, scan, while_loop and shard_map; nothing is read by the host, and the cache is never
    copied. Softmax and accumulation are float32. Only "xla" has gradients.

    Args:
        query: [num_seqs, q_len, num_heads, 576], bf16, fp16 or float32; any num_heads and q_len.
        latent_cache: [num_pages, page_size, 1, 576] in query's dtype, or, with a bf16 query, [num_pages, page_size, 1,
            656] uint8 of `quantize_latents`, whose latents are used as rounded to bf16 ("cuda": to fp16, relative to
            the largest scale).
        indices: [num_seqs, q_len, topk] int32, in any order; -1 is skipped, and an id that comes twice counts twice.
            Any other id that names no token makes its query token's rows NaN; nothing out of bounds is read.
        addressing: what ids are: "slots", page * page_size + offset, or "positions" in the sequence, looked up in
            `block_tables`. There is no causal mask: an id is attended to wherever it lies.
        block_tables: [num_seqs, max_pages] int32, for "positions" alone. Entries that no id leads to may hold anything.
        topk_length: [num_seqs] int32 in [0, topk]: of a sequence's ids the first that many count, the others may hold
            anything. None: all. A length out of range gives NaN in that sequence's rows.
        sinks: [num_heads] float32: a further logit of each head without a value. The output is scaled by
            exp(lse) / (exp(lse) + exp(sink)); the lse itself is without it.
        scale: factor of the logits, a number above 0; None means 576 ** -0.5.
        return_lse: also return the natural log-sum-exp of the scaled logits.
        implementation: None (chosen), "cuda" (sm_90), "pallas" (sm_80 or newer), both for bf16 and fp16 queries and fp8
            latents, "triton" (the Pallas kernel by Triton itself, where Pallas cannot; the extra of that name), "xla"
            (anywhere, for debugging and CPUs) or "interpret" (the Pallas kernel run in Python, slow).
            PALLAS_ATTN_COOPERATIVE is as in `mla_decode`.
        config: tile sizes for "pallas", "triton" and "interpret"; None takes the measured or the heuristic one.

    Returns:
        out [num_seqs, q_len, num_heads, 512] in query's dtype; with return_lse, also lse [num_seqs, q_len, num_heads]
        float32. A query token without ids gives out 0 and lse -inf.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025); FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("sparse_mla_decode")
    check_decode(check, query, latent_cache, indices, addressing, block_tables, topk_length, sinks, scale)
    check.flag("return_lse", return_lse)
    positions = addressing == "positions"
    operands = Operands(
        query=query,
        latent_cache=latent_cache,
        indices=indices,
        block_tables=block_tables,
        topk_length=topk_length,
        sinks=sinks,
        ids=Ids(latent_cache.shape[1], query.shape[1]) if positions else Ids(),
        scale=float(QUERY_DIM**-0.5 if scale is None else scale),
        max_logits=False,
    )
    out, lse = DECODE.serve(ready(operands), implementation=implementation, config=config)
    return (out, lse) if return_lse else out


def sparse_mla_prefill(
    query: jax.Array,
    latents: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    implementation: ImplementationOrCuda | None = None,
    config: SparseMLAConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sparse multi-head latent attention of many query tokens over latents that lie side by side.

    Args:
        query: [num_tokens, num_heads, 576], bf16, fp16 or float32.
        latents: [num_kv_tokens, 1, 576] in query's dtype, or, with a bf16 query, [num_kv_tokens, 1, 656] uint8 of
            `quantize_latents`.
        indices: [num_tokens, 1, topk] int32 rows of `latents`, in any order; ids that name none, such as -1, are
            skipped, and an id that comes twice counts twice. There is no causal mask.
        topk_length: [num_tokens] int32 in [0, topk]: the first that many ids count, the others may hold anything.
            None: all. A length out of range gives NaN in that token's rows.
        sinks, scale, implementation: as in `sparse_mla_decode`.
        config: as there, with num_splits 1.

    Returns:
        out [num_tokens, num_heads, 512] in query's dtype, max_logits and lse [num_tokens, num_heads] float32: the
        largest scaled logit, and their natural log-sum-exp, without the sink. A token without ids gives 0, -inf, -inf.

    Raises:
        TypeError, ValueError: as in `sparse_mla_decode`.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025); FlashMLA (DeepSeek, 2025).
    """
    check = ArgumentChecker("sparse_mla_prefill")
    check_prefill(check, query, latents, indices, topk_length, sinks, scale)
    if isinstance(config, SparseMLAConfig) and config.num_splits != 1:
        check.fail("config", "num_splits 1", f"num_splits {config.num_splits}")
    operands = Operands(
        query=query,
        latent_cache=latents,
        indices=indices,
        topk_length=topk_length,
        sinks=sinks,
        ids=Ids(skip_all_outside=True),
        scale=float(QUERY_DIM**-0.5 if scale is None else scale),
        max_logits=True,
    )
    out, lse, max_logits = PREFILL.serve(ready(operands), implementation=implementation, config=config)
    return out, max_logits, lse


def check_decode(
    check: ArgumentChecker, query, latent_cache, indices, addressing, block_tables, topk_length, sinks, scale
) -> None:
    """Checks for `sparse_mla_decode` and for FlashMLA's function."""
    check.array("query", query, ("num_seqs", "q_len", "num_heads", QUERY_DIM), DTYPES)
    _check_pool(check, "latent_cache", latent_cache, ("num_pages", "page_size", 1), query.dtype)
    check.array("indices", indices, ("num_seqs", "q_len", "topk"), [jnp.int32])
    check.one_of("addressing", addressing, ADDRESSING)
    if addressing == "positions":
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        check.non_empty("block_tables", block_tables)
    elif block_tables is not None:
        check.fail("block_tables", "None where ids are slots", "an array")
    _check_rest(check, query, indices, topk_length, ("num_seqs",), sinks, scale)


def check_prefill(check: ArgumentChecker, query, latents, indices, topk_length, sinks, scale) -> None:
    """Checks for `sparse_mla_prefill` and for FlashMLA's function."""
    check.array("query", query, ("num_tokens", "num_heads", QUERY_DIM), DTYPES)
    _check_pool(check, "latents", latents, ("num_kv_tokens", 1), query.dtype)
    check.array("indices", indices, ("num_tokens", 1, "topk"), [jnp.int32])
    _check_rest(check, query, indices, topk_length, ("num_tokens",), sinks, scale)


def _check_pool(
    check: ArgumentChecker, name: str, pool: Any, lead: tuple[int | str, ...], dtype: Any
) -> None:
    stored = (dtype, *((BYTES,) if dtype == jnp.bfloat16 else ()))
    check.dtype_among(name, pool, stored)
    check.array(name, pool, (*lead, token_width(pool.dtype)), stored)
    check.non_empty(name, pool)


def _check_rest(check: ArgumentChecker, query, indices, topk_length, per: tuple[str], sinks, scale) -> None:
    for name, array in (("query", query), ("indices", indices)):
        check.non_empty(name, array)
    if topk_length is not None:
        check.array("topk_length", topk_length, per, [jnp.int32])
    if sinks is not None:
        check.array("sinks", sinks, ("num_heads",), [jnp.float32])
    check.positive_float("scale", scale)
