"""`blocksparse_attention`: signature, checks, dispatch."""

import dataclasses
import functools
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import options
from pallas_attn._call.checks import ArgumentChecker, is_traced
from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.op import Op
from pallas_attn._call.operands import ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import LAYOUTS, check_pools, reaches
from pallas_attn._call.sizes import too_wide
from pallas_attn._tile import triton
from pallas_attn._tile.masking import Rules, ascending
from pallas_attn._types import ImplementationOrCuda, Layout
from pallas_attn.ops.blocksparse_attention import backward as tiled
from pallas_attn.ops.blocksparse_attention import config as tiles
from pallas_attn.ops.blocksparse_attention import cuda, gradients
from pallas_attn.ops.blocksparse_attention.config import BlockSparseConfig, BlockSparseCudaConfig
from pallas_attn.ops.blocksparse_attention.decode import decode
from pallas_attn.ops.blocksparse_attention.kernel import prefill
from pallas_attn.ops.blocksparse_attention.layout import SparseLayout
from pallas_attn.ops.blocksparse_attention.operands import Operands
from pallas_attn.ops.blocksparse_attention.problem import Problem
from pallas_attn.ops.blocksparse_attention.reference import blocksparse_attention_xla


@functools.partial(jax.jit, static_argnames=("config", "keep", "lowering"))
def blocksparse_attention_pallas(
    operands: Operands,
    *,
    config: BlockSparseConfig,
    keep: bool = False,
    lowering: triton.Lowering = "pallas",
) -> tuple[jax.Array, ...]:
    """query [num_tokens, num_heads, head_dim] -> (out in query's dtype, lse float32 [num_tokens, num_heads]) and, with
    `keep`, a byte of out's lower bits."""
    problem = Problem.of(operands, config)
    if keep:
        return prefill(operands, problem=problem, keep=True, lowering=lowering)
    if problem.kinds == "decode":
        return decode(operands, problem=problem, lowering=lowering)
    out, lse = prefill(operands, problem=problem, lowering=lowering)
    if problem.kinds == "mixed":
        return decode(operands, problem=problem, lowering=lowering, into=(out, lse))
    return out, lse


def blocksparse_attention_cuda(operands: Operands, *, keep: bool = False) -> tuple[jax.Array, ...]:
    """The same, prefill by the Hopper kernel. Sequences with one query are the other kernels' all the same."""
    problem = Problem.of(operands)
    if keep:
        return cuda.prefill(operands, problem=problem, keep=True)
    out, lse = cuda.prefill(operands, problem=problem)
    if problem.kinds == "mixed":
        tiled, beside = Problem.of(operands, OP.tiles(operands)), triton.first_lowering()
        return decode(operands, problem=tiled, lowering=beside, into=(out, lse))
    return out, lse


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    return too_wide({"head_dim": operands.pool.head_dim}) or reaches(operands.pool, jnp.bfloat16, lowering)


def _prepared(operands: Operands, lowering: triton.Lowering) -> Operands:
    return dataclasses.replace(operands, limits_registers=triton.limits_registers(lowering))


def _with_gradients(implementation: Implementation, lowering: triton.Lowering) -> Implementation:
    backward = functools.partial(tiled.backward, lowering=lowering)
    prepare = functools.partial(_prepared, lowering=lowering)
    steps = {"backward": Implementation(backward), **implementation.steps}
    return dataclasses.replace(implementation, prepare=prepare, steps=steps)


HOPPER = Implementation(
    blocksparse_attention_cuda,
    cuda.unsupported,
    cuda.is_slower,
    takes_config=False,
    own_config=BlockSparseCudaConfig,
    check_config=cuda.check,
    steps={"cuda_backward": Implementation(cuda.backward, takes_config=False)},
)
TILED = triton.implementations(blocksparse_attention_pallas, _supports)
OP = Op(
    name="blocksparse_attention",
    implementations={
        "cuda": _with_gradients(HOPPER, triton.first_lowering()),
        **{name: _with_gradients(TILED[name], name) for name in get_args(triton.Lowering)},
        "xla": Implementation(blocksparse_attention_xla, takes_config=False),
    },
    results=gradients.RESULTS,
    config=BlockSparseConfig,
    key=tiles.key,
    heuristic=tiles.default,
    check_config=tiles.check,
    kernels=tiles.TILES,
    derivative=gradients.attend,
)


@overload
def blocksparse_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, layout: SparseLayout, *,
    cu_q_lens: jax.Array | None = None, cu_k_lens: jax.Array | None = None,
    block_tables: jax.Array | None = None, seq_lens: jax.Array | None = None, scale: float | None = None,
    softcap: float | None = None, return_lse: Literal[False] = False, cache_layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None, config: BlockSparseConfig | BlockSparseCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def blocksparse_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, layout: SparseLayout, *,
    cu_q_lens: jax.Array | None = None, cu_k_lens: jax.Array | None = None,
    block_tables: jax.Array | None = None, seq_lens: jax.Array | None = None, scale: float | None = None,
    softcap: float | None = None, return_lse: Literal[True], cache_layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None, config: BlockSparseConfig | BlockSparseCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def blocksparse_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, layout: SparseLayout, *,
    cu_q_lens: jax.Array | None = None, cu_k_lens: jax.Array | None = None,
    block_tables: jax.Array | None = None, seq_lens: jax.Array | None = None, scale: float | None = None,
    softcap: float | None = None, return_lse: bool = False, cache_layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None, config: BlockSparseConfig | BlockSparseCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def blocksparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: SparseLayout,
    *,
    cu_q_lens: jax.Array | None = None,
    cu_k_lens: jax.Array | None = None,
    block_tables: jax.Array | None = None,
    seq_lens: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    cache_layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None,
    config: BlockSparseConfig | BlockSparseCudaConfig | None = None,
    residual_checkpoint_name: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention over the blocks of keys that `layout` lists for each head and each block of queries.

    Sequences of any lengths are laid end to end. Each brings its newest q_len tokens as queries: all of them (prefill),
    one (decode), or a chunk in between, mixed in one batch. Positions are absolute: a query's position in its sequence
    gives its row of the layout. Works inside jit, vmap, scan, checkpoint and shard_map; lengths and tables are never
    read by the host. Softmax and accumulation are float32; the same inputs and config give the same bits, gradients
    too: nothing is summed in an order that may change. Keys in rows have first derivatives in reverse mode. Keys in
    pages have gradients only by "xla", which has second derivatives too.

    Args:
        query: [num_tokens, num_heads, head_dim]; bf16, fp16 or float32, head_dim up to 256 on the GPU. Tokens behind
            the last sequence get 0 and lse -inf.
        key, value: query's dtype, [num_key_tokens, num_kv_heads, head_dim] in rows, sequences end to end; or, with
            `block_tables`, pools of pages as of `paged_attention`. num_heads is a multiple of num_kv_heads. What no
            sequence holds may be NaN, and so may a KV head's elements of blocks that none of its query heads sees.
        layout: a `SparseLayout` of num_heads heads, or of one for all, and of at least the longest sequence.
        cu_q_lens: [num_seqs + 1] int32, where each sequence's queries begin, from 0 (the first entry counts as 0), and
            the last one's end. None where all sequences decode (as many queries as sequences) or all prefill (as many
            queries as keys in rows); if it might be either, an error asks for it. A sequence's queries beyond its
            number of keys, the oldest, see nothing. An array that descends is refused where its values are known; a
            traced one gives out 0 and lse -inf for all tokens.
        cu_k_lens: [num_seqs + 1] int32, the same for keys in rows; where a traced one descends, rows of the sequences
            whose keys would end before they begin are NaN.
        block_tables, seq_lens: [num_seqs, max_pages] and [num_seqs] int32 for keys in pages, in place of cu_k_lens; the
            lengths count the queries' own tokens. Pages of blocks that no head sees may be anyone's.
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); a number above 0 and up to 1e30, or None.
        return_lse: also return the natural log-sum-exp of the logits.
        cache_layout: order of a page's dimensions, "NHD", "HND" or "PACKED"; of keys in rows always "NHD".
        implementation: None (cuda or pallas on an NVIDIA GPU, whichever measured faster; xla elsewhere), "cuda" (sm_90:
            bf16 and fp16, head_dim 128, keys in rows, blocks of at least 128 tokens, no softcap; sequences with one
            query by the kernels of "pallas" or else "triton", and so gradients, unless `config` says otherwise),
            "pallas" (sm_80 or newer), "triton" (the same kernels by Triton itself, where Pallas cannot; the extra of
            that name), "xla" (anywhere) or "interpret" (the Pallas kernels run in Python, slow).
        config: tile sizes for "pallas", "triton" and "interpret", None takes the measured or the heuristic ones; or,
            for "cuda", a BlockSparseCudaConfig, which says whose gradients are.
        residual_checkpoint_name: as of `flash_attention`, for implementations other than "xla".

    Returns:
        out in query's shape and dtype; with return_lse, also lse [num_tokens, num_heads], float32. A query that sees no
        block has out 0 and lse -inf. Invalid inputs give NaN, in their own rows: a row of the layout that points
        outside or whose blocks do not ascend (such a layout is refused where its values are known), a position beyond
        the layout's last row, a page id in use outside the pool, lengths outside of keys or table. The gradients of
        such queries are NaN too. By kernels so are those of the keys and values that such a row lists, and of all keys
        of a KV head if the row pointers of one of its heads do not ascend; "xla" leaves such rows out.

    Sharded over a mesh, outside shard_map, a call is partitioned over KV heads; keys' and values' tokens, or pages, are
    whole on every device.

    Raises:
        TypeError: an argument of the wrong dtype or type.
        ValueError: a wrong shape or value; lengths that are missing; an implementation that cannot serve.

    Source: the varlen kernel of vLLM's blocksparse_attention (Phi-3-small); MInference (Jiang et al., 2024).
    """
    check = ArgumentChecker("blocksparse_attention", {"key_cache": "key", "value_cache": "value"})
    check.array("query", query, ("num_tokens", "num_heads", "head_dim"), DTYPES)
    check.non_empty("query", query)
    check.one_of("cache_layout", cache_layout, LAYOUTS)
    paged = block_tables is not None or seq_lens is not None
    if paged:
        check_pools(check, key, value, cache_layout, [query.dtype], named="cache_layout")
        lens = {"block_tables": block_tables, "seq_lens": seq_lens, "cu_k_lens": cu_k_lens}
        _need(check, lens, absent=("cu_k_lens",))
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
        check.non_empty("block_tables", block_tables)
        num_seqs = check.dims["num_seqs"]
    else:
        for name, array in (("key", key), ("value", value)):
            check.array(name, array, ("num_key_tokens", "num_kv_heads", "head_dim"), [query.dtype])
        check.non_empty("key", key)
        if cache_layout != "NHD":
            check.fail("cache_layout", "NHD for keys in rows", repr(cache_layout))
        _need(check, {"cu_k_lens": cu_k_lens})
        check.array("cu_k_lens", cu_k_lens, ("num_seqs_and_1",), [jnp.int32])
        check.not_descending("cu_k_lens", cu_k_lens)
        num_seqs = check.dims["num_seqs_and_1"] - 1
        if num_seqs < 1:
            check.fail("cu_k_lens", "at least 2 elements", str(num_seqs + 1))
    check.multiple("query", query.shape[1], "num_kv_heads", check.dims["num_kv_heads"])
    kinds, q_ends = "mixed", cu_q_lens
    if cu_q_lens is not None:
        check.array("cu_q_lens", cu_q_lens, (num_seqs + 1,), [jnp.int32])
        check.not_descending("cu_q_lens", cu_q_lens)
    elif query.shape[0] == num_seqs:
        kinds = "decode"
        if not paged and query.shape[0] == key.shape[0] and not _is_one_each(cu_k_lens):
            check.fail(
                "cu_q_lens", "an array where there are as many queries as sequences and as keys", "None"
            )
    elif not paged and query.shape[0] == key.shape[0]:
        kinds, q_ends = "prefill", cu_k_lens
    else:
        expected = "an array, for there are neither as many queries as sequences nor as many as keys in rows"
        check.fail("cu_q_lens", expected, "None")
    check.instance("layout", layout, SparseLayout)
    layout.check()
    layout = layout.with_an_entry()
    if layout.layout_heads not in (1, query.shape[1]):
        check.fail("layout", f"1 head or {query.shape[1]} (as query)", f"{layout.layout_heads} heads")
    check.positive_float("scale", scale)
    softcap = options.softcap(check, softcap)
    check.flag("return_lse", return_lse)
    check.instance("residual_checkpoint_name", residual_checkpoint_name, str, optional=True)

    if q_ends is not None:
        q_ends = ascending(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(q_ends)[1:]]))
    operands = Operands(
        query=query,
        key=key,
        value=value,
        layout=layout,
        cu_q_lens=q_ends,
        cu_k_lens=cu_k_lens,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cache_layout=cache_layout if paged else None,
        kinds=kinds,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        rules=Rules(softcap=softcap),
        checkpoint_name=residual_checkpoint_name,
    )
    out, lse = OP.serve(ready(operands), implementation=implementation, config=config)
    return (out, lse) if return_lse else out


def _is_one_each(cu_k_lens: Any) -> bool:
    """Sequences of one token, which decode as they prefill; a single one has no more in its only row."""
    if cu_k_lens.shape[0] == 2:
        return True
    return not is_traced(cu_k_lens) and bool((np.diff(np.asarray(cu_k_lens)) == 1).all())


def _need(check: ArgumentChecker, arrays: dict[str, Any], absent: tuple[str, ...] = ()) -> None:
    where = "keys in pages" if "seq_lens" in arrays else "keys in rows"
    for name, array in arrays.items():
        if (array is None) != (name in absent):
            expected, got = ("None", "an array") if name in absent else ("an array", "None")
            check.fail(name, f"{expected} for {where}", got)
