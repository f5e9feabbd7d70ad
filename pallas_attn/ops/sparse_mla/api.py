"""`sparse_mla_decode` and `sparse_mla_prefill`: signatures, checks, dispatch."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from pallas_attn._call import configs, dispatch, partition
from pallas_attn._call.checks import ArgumentChecker, dtype_name, fail
from pallas_attn._call.device import current_device
from pallas_attn._tile import triton
from pallas_attn._tile.latents import BYTES, QUERY_DIM, token_width
from pallas_attn._tile.layout import DIMS, PoolCase, PoolShape, reaches
from pallas_attn._types import BlockTables, ImplementationOrCuda
from pallas_attn.ops.sparse_mla import cuda
from pallas_attn.ops.sparse_mla.config import SparseMLAConfig, heuristic
from pallas_attn.ops.sparse_mla.kernel import sparse_mla_pallas
from pallas_attn.ops.sparse_mla.problem import Ids
from pallas_attn.ops.sparse_mla.reference import sparse_mla_xla

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
ADDRESSING = ("slots", "positions")
type Addressing = Literal["slots", "positions"]


@dataclass(frozen=True)
class Case:
    """The static facts of a call that decide which implementation can serve it."""

    num_tokens: int
    num_heads: int
    topk: int
    pool: PoolShape
    dtype: Any
    cache_dtype: Any
    configured: bool = False


def _cuda_supports(case: Case) -> str | None:
    return "takes no config" if case.configured else cuda.unsupported(case.dtype, case.topk)


def _supports(case: Case, lowering: triton.Lowering) -> str | None:
    if case.dtype == jnp.float32 and lowering != "interpret":
        return "float32 tiles of 576 do not fit the kernel; bf16 and fp16 do"
    return reaches(PoolCase(case.pool, case.cache_dtype), lowering)


for _op in ("sparse_mla_decode", "sparse_mla_prefill"):
    dispatch.register(
        _op,
        {
            "cuda": dispatch.Implementation(
                functools.partial(cuda.sparse_mla_cuda, function=_op), _cuda_supports
            ),
            **triton.implementations(sparse_mla_pallas, _supports),
            "xla": dispatch.Implementation(sparse_mla_xla),
        },
    )


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
    copied. Softmax and accumulation are float32. There are no gradients, but for "xla"'s.

    Args:
        query: [num_seqs, q_len, num_heads, 576], bf16, fp16 or float32; any num_heads and q_len.
        latent_cache: [num_pages, page_size, 1, 576] in query's dtype, or, with a bf16 query, [num_pages, page_size, 1,
            656] uint8 of `quantize_latents`, whose latents are used as rounded to bf16 ("cuda": to fp16, relative to
            the largest scale).
        indices: [num_seqs, q_len, topk] int32, in any order; -1 is skipped, and an id that comes twice counts twice.
            What else names no token makes its query token's rows NaN; nothing out of bounds is read.
        addressing: what ids are: "slots", page * page_size + offset, or "positions" in the sequence, which lead
            through `block_tables`. There is no causal mask: an id is attended to wherever it lies.
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
    num_seqs, q_len, num_heads, _ = query.shape
    positions = addressing == "positions"
    ids = Ids(latent_cache.shape[1], q_len) if positions else Ids()
    operands = {
        "query": query,
        "latent_cache": latent_cache,
        "indices": indices,
        "block_tables": block_tables,
        "topk_length": topk_length,
        "sinks": sinks,
    }
    dims = {
        "query": "seqs q heads dim",
        "latent_cache": DIMS["NHD"]["key"],
        "indices": "seqs q ids",
        "block_tables": "seqs columns",
        "topk_length": "seqs",
        "sinks": "heads",
    }
    out, lse = _call(
        check.function,
        operands,
        dims,
        ("seqs q heads dim", "seqs q heads"),
        Case(num_seqs * q_len, num_heads, indices.shape[2], *_pool_of(latent_cache, query)),
        implementation,
        config,
        ids=ids,
        scale=scale,
        max_logits=False,
    )
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
        indices: [num_tokens, 1, topk] int32 rows of `latents`, in any order; -1, and whatever else names none, is
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
    num_tokens, num_heads, _ = query.shape
    operands = {
        "query": query,
        "latent_cache": latents,
        "indices": indices,
        "topk_length": topk_length,
        "sinks": sinks,
    }
    dims = {
        "query": "seqs heads dim",
        "latent_cache": "pages kv_heads dim",
        "indices": "seqs kv_heads ids",
        "topk_length": "seqs",
        "sinks": "heads",
    }
    out, lse, max_logits = _call(
        check.function,
        operands,
        dims,
        ("seqs heads dim", "seqs heads", "seqs heads"),
        Case(num_tokens, num_heads, indices.shape[2], *_pool_of(latents, query)),
        implementation,
        config,
        ids=Ids(skip_all_outside=True),
        scale=scale,
        max_logits=True,
    )
    return out, max_logits, lse


def check_decode(
    check: ArgumentChecker, query, latent_cache, indices, addressing, block_tables, topk_length, sinks, scale
) -> None:
    """What `sparse_mla_decode`, and FlashMLA's function for it, want of a call."""
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
    """What `sparse_mla_prefill`, and FlashMLA's function for it, want of a call."""
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


def _pool_of(pool: Any, query: Any) -> tuple[PoolShape, Any, Any]:
    width = pool.shape[-1]
    return PoolShape(pool.size // width, 1, 1, width), query.dtype, pool.dtype


def _call(
    function: str,
    operands: dict[str, Any],
    dims: dict[str, str],
    results: tuple[str, ...],
    case: Case,
    implementation: ImplementationOrCuda | None,
    config: Any,
    *,
    ids: Ids,
    scale: float | None,
    max_logits: bool,
) -> tuple[jax.Array, ...]:
    case = dataclasses.replace(case, configured=config is not None)
    name, fn = dispatch.resolve(function, case, implementation, operands)
    tiled = name not in ("cuda", "xla")
    if not tiled and config is not None:
        fail(function, "config", f"None for implementation {name!r}", "a config")
    configs.check_type(function, SparseMLAConfig, config)
    return partition.run(
        function,
        _attend,
        # Outside jit they may be numpy's.
        {name: jnp.asarray(array) for name, array in operands.items() if array is not None},
        dims,
        results,
        static={
            "function": function,
            "fn": fn,
            "tiled": tiled,
            "ids": ids,
            "scale": float(QUERY_DIM**-0.5 if scale is None else scale),
            "config": config,
            "max_logits": max_logits,
        },
        implementation=name,
    )


def _attend(
    operands: dict[str, jax.Array],
    *,
    function: str,
    fn: Any,
    tiled: bool,
    ids: Ids,
    scale: float,
    config: SparseMLAConfig | None,
    max_logits: bool,
) -> tuple[jax.Array, ...]:
    """A call, or one device's sequences and heads of it, as query tokens one after the other."""
    query, pool, indices = (operands[name] for name in ("query", "latent_cache", "indices"))
    *lead, num_heads, _ = query.shape
    topk = indices.shape[-1]
    indices = indices.reshape(-1, topk)
    num_tokens = indices.shape[0]
    lengths = operands.get("topk_length", jnp.full((1,), topk, jnp.int32))
    lengths = jnp.broadcast_to(lengths[:, None], (lengths.shape[0], num_tokens // lengths.shape[0])).reshape(
        -1
    )
    if tiled:
        case = Case(num_tokens, num_heads, topk, *_pool_of(pool, query))
        fn = functools.partial(fn, config=_resolve_config(function, case, config, max_logits))
    arrays = fn(
        query.reshape(num_tokens, num_heads, QUERY_DIM),
        pool.reshape(-1, pool.shape[-1]),
        indices,
        lengths,
        operands.get("block_tables"),
        ids=ids,
        scale=scale,
        sinks=operands.get("sinks"),
        max_logits=max_logits,
    )
    return tuple(array.reshape(*lead, *array.shape[1:]) for array in arrays)


def _resolve_config(
    function: str, case: Case, explicit: SparseMLAConfig | None, whole: bool
) -> SparseMLAConfig:
    fp8 = case.cache_dtype == BYTES
    # In the words that all ops' entries have: a walk over a cache is here a query token's ids.
    key = dict(
        rows=case.num_heads, dtype=dtype_name(case.cache_dtype), streams=case.num_tokens, max_len=case.topk
    )

    def guess(**measured: Any) -> SparseMLAConfig:
        made = heuristic(
            num_tokens=case.num_tokens,
            num_heads=case.num_heads,
            topk=case.topk,
            fp8=fp8,
            device=current_device(),
        )
        # With the maxima there is no merging.
        return dataclasses.replace(made, **({"num_splits": 1} if whole else {}), **measured)

    return configs.resolve(function, SparseMLAConfig, explicit, key, guess)
