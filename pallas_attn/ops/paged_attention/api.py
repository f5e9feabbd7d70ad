"""`paged_attention`: signature, checks, dispatch."""

from typing import Literal, overload

import jax
import jax.numpy as jnp

from pallas_attn._call import options
from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.dispatch import Implementation as Served
from pallas_attn._call.op import Op
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import QUANTIZED_DTYPES, check_pools, handles, reaches
from pallas_attn._call.sizes import MAX_HEAD_DIM, too_wide
from pallas_attn._tile import triton
from pallas_attn._tile.masking import LocalStride, Rules
from pallas_attn._types import BlockTables, Implementation, KVCache, Layout, Lse, Query, SeqLens
from pallas_attn.mods.call import PagedSizes, as_window, over_pages
from pallas_attn.mods.ready import MaskMod, ScoreMod
from pallas_attn.ops.paged_attention import config as tiles
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig
from pallas_attn.ops.paged_attention.kernel import paged_attention_pallas
from pallas_attn.ops.paged_attention.operands import Operands
from pallas_attn.ops.paged_attention.reference import paged_attention_xla


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    tree_elements = 0 if operands.tree_mask is None else operands.tree_mask.size
    return (
        too_wide({"head_dim": operands.pool.head_dim}, most=2 * MAX_HEAD_DIM)
        or reaches(operands.pool, operands.key_cache.dtype, lowering)
        or handles("tree masks", tree_elements, jnp.int8, lowering)
    )


def _share(operands: Operands) -> Operands:
    pattern = operands.rules.block_sparse
    if pattern is not None and pattern.head_sliding_step and operands.sizes.num_heads != operands.num_heads:
        expected = (
            "head_sliding_step 0 where heads are sharded (tp_rank is one number, the same on every device)"
        )
        fail("paged_attention", "block_sparse", expected, str(pattern.head_sliding_step))
    return operands


OP = Op(
    name="paged_attention",
    implementations={
        **triton.implementations(paged_attention_pallas, _supports),
        "xla": Served(paged_attention_xla, options.xla_supports, takes_config=False),
    },
    results=("seqs q heads dim", "seqs q heads"),
    config=PagedAttentionConfig,
    key=tiles.key,
    heuristic=tiles.default,
    check_config=tiles.check,
    share=_share,
)


@overload
def paged_attention(
    query: Query, key_cache: KVCache, value_cache: KVCache, block_tables: BlockTables, seq_lens: SeqLens, *,
    scale: float | None = None, softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    block_sparse: LocalStride | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None, return_lse: Literal[False] = False,
    batch_invariant: bool = False, layout: Layout = "NHD", implementation: Implementation | None = None,
    config: PagedAttentionConfig | None = None,
) -> Query: ...  # fmt: skip


@overload
def paged_attention(
    query: Query, key_cache: KVCache, value_cache: KVCache, block_tables: BlockTables, seq_lens: SeqLens, *,
    scale: float | None = None, softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    block_sparse: LocalStride | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None, return_lse: Literal[True], batch_invariant: bool = False,
    layout: Layout = "NHD", implementation: Implementation | None = None,
    config: PagedAttentionConfig | None = None,
) -> tuple[Query, Lse]: ...  # fmt: skip


@overload
def paged_attention(
    query: Query, key_cache: KVCache, value_cache: KVCache, block_tables: BlockTables, seq_lens: SeqLens, *,
    scale: float | None = None, softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    block_sparse: LocalStride | None = None, alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None, return_lse: bool = False, batch_invariant: bool = False,
    layout: Layout = "NHD", implementation: Implementation | None = None,
    config: PagedAttentionConfig | None = None,
) -> Query | tuple[Query, Lse]: ...  # fmt: skip
def paged_attention(
    query: Query,
    key_cache: KVCache,
    value_cache: KVCache,
    block_tables: BlockTables,
    seq_lens: SeqLens,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | jax.Array | None = None,
    block_sparse: LocalStride | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    layout: Layout = "NHD",
    implementation: Implementation | None = None,
    config: PagedAttentionConfig | None = None,
) -> Query | tuple[Query, Lse]:
    """Attention of each sequence's newest tokens over the sequence's paged keys and values.

    Works inside jit, scan, while_loop, vmap and shard_map; lengths and tables are never read by the host, and the
    caches are never copied. Softmax and accumulation are float32; the same inputs and config give the same bits. All
    options combine. Only "xla" has gradients.

    One call serves prompts, chunks of prompts and decoding: see `PagedKVCache`, with an example. `pallas_attn.compat`
    has the signature of `jax.experimental.pallas.ops.gpu.paged_attention`.

    Args:
        query: [num_seqs, num_heads, head_dim], one token per sequence, or [num_seqs, q_len, num_heads, head_dim], the
            newest q_len tokens of each, causal among themselves (speculative decoding) unless `tree_mask` says
            otherwise; bf16, fp16 or float32.
        key_cache, value_cache: pools of one dtype, query's or (quantised) float8_e4m3fn, float8_e5m2 or int8, of
            `layout` "NHD" [num_pages, page_size, num_kv_heads, head_dim],
            "HND" [num_pages, num_kv_heads, page_size, head_dim], or
            "PACKED" keys [num_pages, num_kv_heads, head_dim/x, page_size, x] with x = 16 / itemsize, and values
            [num_pages, num_kv_heads, head_dim, page_size].
            num_heads is a multiple of num_kv_heads; query head h uses KV head h // (num_heads / num_kv_heads).
            Any page_size; head_dim up to 512 on the GPU. Slots at or beyond a sequence's length may hold anything.
        block_tables: [num_seqs, max_pages] int32, a sequence's pages in order. Entries beyond its last page, and those
            of pages that no query sees (window, block_sparse), may hold anything. With `query_positions`, all pages
            count as seen from where the window of the oldest new slot, seq_len - q_len, begins.
        seq_lens: [num_seqs] int32, tokens in each sequence's pages, the queries' own included. A length of 0 gives
            out 0 and lse -inf, and so does a query before the sequence's start (q_len > length; with `sinks` its lse
            is the head's sink).
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); a number above 0 and up to 1e30, or None.
        sliding_window: each query sees the newest `sliding_window` tokens up to itself; an int >= 1, an int32 scalar
            that may be traced (below 1 it counts as 1), or None. Tokens outside are not read. A traced window is an
            operand, so that a model whose windows alternate can be scanned over its layers.
        block_sparse: a `LocalStride` pattern, or None. Blocks outside it are not read.
        alibi_slopes: [num_heads] float32; slope * (key position - query position) is added after the soft cap.
        sinks: [num_heads] float32; a logit without a value that joins each head's softmax (and its lse).
        k_scale, v_scale: for quantised caches, float32 above 0: value = stored * scale. A scalar, [num_kv_heads], or
            [num_pages, num_kv_heads], one for each page and head (`page_scales` makes them), where those of pages that
            no query sees may hold anything; None is 1. Pallas multiplies fp8 keys with a bf16 query in fp16, where
            query elements beyond 65504 saturate; with scales of pages, in query's dtype.
        tree_mask: [num_seqs, q_len, q_len] bool, for drafts that form a tree: newest token i sees all older tokens, and
            newest token j where tree_mask[:, i, j]. Keys and values of a draft that none sees must be finite too. None:
            causal.
        query_positions: [num_seqs, q_len] int32, with `tree_mask`: each newest token's place in the text, which windows
            and ALiBi use, for queries and keys; a node at depth n is at seq_len - q_len + n. A place that no newest
            slot has counts as the nearest of theirs. None: by slot. `block_sparse` always goes by slot.
        score_mod: a function (score, batch, head, q_idx, kv_idx) -> score of float32 and int32 scalars, applied behind
            scale and soft cap and in front of ALiBi and masks. `batch` is the sequence; positions are the text's,
            whatever pages hold it: new token i is at seq_len - q_len + i. It is traced once: its operations are
            elementwise, and of arrays that it captures it reads single elements. A function that does the same to
            arrays of the same shapes compiles nothing. `pallas_attn.mods` has some.
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool, likewise; joined with the other masks. What comes
            before the first key that a sequence's newest tokens may see, and behind the last, is not read, by blocks
            of 16 tokens (longer ones in tables of more than 32768), and its pages may be anyone's; keys and values in
            between must be finite. With `block_sparse` it is the pattern that says what is read.
        return_lse: also return the natural log-sum-exp of the logits.
        batch_invariant: a sequence's rows have the same bits whatever else is in the batch, in whichever order, and
            however wide the table: how it is cut depends on its own length alone, and tile sizes on the heads, dtypes,
            q_len and the kind of GPU. Slower, most with few sequences. Partial results take memory for up to 64 splits
            of every sequence: 4 GiB for 4096 of 32 heads of 128 in tables of 32768 tokens or more. Not "xla"; in
            "interpret" the CPU's compiler may round sums with ALiBi's slopes and with sinks differently in another
            batch. A `config` must have `split_tokens`, and should have `num_splits` 0, which makes room for all splits.
        layout: order of a page's dimensions.
        implementation: None (pallas on an NVIDIA GPU, xla elsewhere), "pallas" (sm_80 or newer; e4m3 from sm_89),
            "triton" (the same kernel by Triton itself, where Pallas cannot; the extra of that name), "xla" (anywhere,
            for debugging and CPUs) or "interpret" (the Pallas kernel run in Python, slow).
        config: tile sizes for "pallas", "triton" and "interpret"; None takes the measured or the heuristic one.

    Returns:
        out in query's shape and dtype; with return_lse, also lse, of query's shape without head_dim, float32.
        A page id in use outside [0, num_pages), or a length that is negative or beyond the table, gives NaN in that
        sequence's rows (with `block_sparse`, at least in those of the heads that see the page); nothing out of bounds
        is read.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Sharded over a mesh, outside shard_map, a call is partitioned over heads and sequences. A pool that would have to
    move is a ValueError; under Auto axes, a JaxRuntimeError of XLA's partitioner that ends in the same message.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023);
    split-KV after Dao et al., "Flash-Decoding" (2023); LocalStride and PACKED as in vLLM's CUDA kernels.
    """
    check = ArgumentChecker("paged_attention")
    check.dtype_among("query", query, DTYPES)
    if len(query.shape) not in (3, 4):
        forms = "[num_seqs, num_heads, head_dim] or [num_seqs, q_len, num_heads, head_dim]"
        check.fail("query", f"shape {forms}", str(list(query.shape)))
    q_len = ("q_len",) if len(query.shape) == 4 else ()
    check.array("query", query, ("num_seqs", *q_len, "num_heads", "head_dim"), DTYPES)
    pool = check_pools(check, key_cache, value_cache, layout, [query.dtype, *QUANTIZED_DTYPES])
    check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
    check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
    for name, array in (("query", query), ("block_tables", block_tables)):
        check.non_empty(name, array)
    num_heads = check.dims["num_heads"]
    check.multiple("query", num_heads, "num_kv_heads", pool.num_kv_heads)
    check.positive_float("scale", scale)
    softcap = options.softcap(check, softcap)
    k_scale, v_scale = options.scales(check, key_cache.dtype, pool, k_scale, v_scale)
    sliding_window, traced_window = options.window(check, sliding_window)
    check.instance("block_sparse", block_sparse, LocalStride, optional=True)
    check.flag("return_lse", return_lse)
    check.flag("batch_invariant", batch_invariant)
    if tree_mask is not None:
        check.array("tree_mask", tree_mask, ("num_seqs", *2 * (q_len or (1,))), [jnp.bool_])
        tree_mask = tree_mask.astype(jnp.int8)
    if query_positions is not None:
        check.array("query_positions", query_positions, ("num_seqs", *(q_len or (1,))), [jnp.int32])
        if tree_mask is None:
            check.fail("query_positions", "None without 'tree_mask'", "an array")

    sizes = PagedSizes(query.shape[0], num_heads, block_tables.shape[1], pool.page_size)
    mods, captured = over_pages(check, sizes, score_mod, mask_mod, query_positions, shared_seqs=True)
    if tree_mask is None and traced_window is None and block_sparse is None:
        mods, sliding_window = as_window(mods, sliding_window)
    operands = Operands(
        query=query if query.ndim == 4 else query[:, None],
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        sliding_window=traced_window,
        alibi_slopes=options.by_head(check, "alibi_slopes", alibi_slopes),
        sinks=options.by_head(check, "sinks", sinks),
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        query_positions=query_positions,
        captured=captured,
        mods=mods,
        layout=layout,
        scale=float(pool.head_dim**-0.5 if scale is None else scale),
        rules=Rules(sliding_window, softcap, block_sparse),
        batch_invariant=bool(batch_invariant),
        num_heads=num_heads,
    )
    out, lse = OP.serve(operands, implementation=implementation, config=config)
    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out
