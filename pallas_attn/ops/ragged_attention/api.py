"""`ragged_paged_attention`: signature and documentation; see arguments.py for the checks."""

from typing import Literal, overload

import jax

from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._types import Dtype, FloatName, Fp8Name, ImplementationOrCuda, KVCache, Layout
from pallas_attn.mods.ready import MaskMod, ScoreMod
from pallas_attn.ops.ragged_attention import arguments
from pallas_attn.ops.ragged_attention.config import RaggedAttentionConfig
from pallas_attn.ops.ragged_attention.record import record

OP = record("ragged_paged_attention")


@overload
def ragged_paged_attention(
    query: jax.Array, key_cache: KVCache, value_cache: KVCache, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None,
    softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    alibi_slopes: jax.Array | None = None, sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    out_scale: jax.typing.ArrayLike | None = None, out_dtype: Dtype | FloatName | Fp8Name | None = None,
    return_lse: Literal[False] = False, layout: Layout = "NHD", implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array: ...  # fmt: skip


@overload
def ragged_paged_attention(
    query: jax.Array, key_cache: KVCache, value_cache: KVCache, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None,
    softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    alibi_slopes: jax.Array | None = None, sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    out_scale: jax.typing.ArrayLike | None = None, out_dtype: Dtype | FloatName | Fp8Name | None = None,
    return_lse: Literal[True], layout: Layout = "NHD", implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


@overload
def ragged_paged_attention(
    query: jax.Array, key_cache: KVCache, value_cache: KVCache, block_tables: jax.Array, seq_lens: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.typing.ArrayLike | None = None, *, scale: float | None = None,
    softcap: float | None = None, sliding_window: int | jax.Array | None = None,
    alibi_slopes: jax.Array | None = None, sinks: jax.Array | None = None, tree_mask: jax.Array | None = None,
    query_positions: jax.Array | None = None, k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None, causal: bool = True, score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    out_scale: jax.typing.ArrayLike | None = None, out_dtype: Dtype | FloatName | Fp8Name | None = None,
    return_lse: bool = False, layout: Layout = "NHD", implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
def ragged_paged_attention(
    query: jax.Array,
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
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    out_scale: jax.typing.ArrayLike | None = None,
    out_dtype: Dtype | FloatName | Fp8Name | None = None,
    return_lse: bool = False,
    layout: Layout = "NHD",
    implementation: ImplementationOrCuda | None = None,
    config: RaggedAttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's newest tokens, as many as each one has, over its paged keys and values.

    One call serves prompts, chunks of prompts, continued prompts and decoding, mixed in any way: the query tokens of
    all sequences lie end to end. Shapes are static, but the number of sequences, and of each one's tokens, may change
    from call to call of one compiled function. Nothing is read by the host. Softmax and accumulation are float32; the
    same inputs and config give the same bits. All options combine. Only "xla" has gradients. `pallas_attn.compat` has
    the signature of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

    Args:
        query: [total_tokens, num_heads, head_dim], bf16, fp16 or float32; sequence i's newest tokens are
            query[cu_q_lens[i]:cu_q_lens[i + 1]], oldest first. Tokens behind the last sequence are padding and may
            hold anything; their out is 0 and their lse -inf.
        key_cache, value_cache: pools as of `paged_attention`, the new tokens' keys and values included, of `layout`
            "NHD", "HND" or "PACKED". num_heads is a multiple of num_kv_heads; values may be of another width than
            keys (value_dim), as in latent attention's 192 and 128. head_dim up to 256 on the GPU.
        block_tables: [max_seqs, max_pages] int32, a sequence's pages in order. Entries beyond its last page, and
            those of pages that no query sees (window), may hold anything. With `query_positions`, all pages of a tree's
            sequence count as seen from where the window of its oldest query token's slot begins.
        seq_lens: [max_seqs] int32, tokens in each sequence's pages, the new ones included. A causal query before the
            sequence's start (more query tokens than the length) has out 0 and lse -inf (with `sinks`, the head's sink,
            if the length is not 0).
        cu_q_lens: [max_seqs + 1] int32: where each sequence's query tokens begin, from 0 (the first entry counts as 0),
            and where the last one's end; not decreasing, at most total_tokens. A sequence may have none. An array that
            descends is refused where its values are known; a traced one gives out 0 and lse -inf for all tokens.
        num_seqs: an int, an int32 scalar or an int32 array [1], which may be traced: how many sequences there are;
            rows of the tables and entries of the lengths behind them may hold anything. None: max_seqs.
        scale: factor of the logits, a number above 0; None means head_dim ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); a number above 0 and up to 1e30, or None.
        sliding_window: each query sees keys whose position is more than its own less `sliding_window`; an int >= 1, an
            int32 scalar that may be traced (below 1 it counts as 1), or None. Tiles outside are not read.
        alibi_slopes: [num_heads]; slope * (key position - query position) is added after the soft cap.
        sinks: [num_heads]; a logit without a value that joins each head's softmax (and its lse).
        tree_mask: [total_tokens, max_tree] bool, for drafts that form trees: in a sequence of at most max_tree query
            tokens, the token of row r sees all older tokens, and the sequence's j-th query token where tree_mask[r, j].
            Keys and values of a draft that none sees must be finite too. Longer sequences, such as prompts, are causal,
            and their rows may hold anything. None: all are. (vLLM's and FlashInfer's custom masks have a bit for each
            key as well; trees differ only in the newest.)
        query_positions: [total_tokens] int32, with `tree_mask`: the places in the text of a tree's query tokens, which
            windows and ALiBi use, for queries and keys. A node at depth n is at seq_len - q_len + n. A place that none
            of the sequence's newest slots has counts as the nearest of theirs. None: by slot.
        k_scale, v_scale: for quantised caches, float32 above 0: value = stored * scale. A scalar, [num_kv_heads], or
            [num_pages, num_kv_heads], one for each page and head (`page_scales` makes them), where those of pages that
            no query sees may hold anything; None is 1. Products are in query's dtype. "cuda" multiplies what is stored,
            and values of pages that have scales after scaling and rounding them. If pages have no scales, Pallas
            multiplies fp8 keys with a bf16 query in fp16, where query elements beyond 65504 saturate.
        causal: whether a query sees no key behind its own position; False lets it see the whole sequence.
        score_mod: a function (score, batch, head, q_idx, kv_idx) -> score of float32 and int32 scalars, applied behind
            scale and soft cap and in front of ALiBi and masks. `batch` is the sequence's row of the table; positions
            are the text's, whatever pages hold it: the token of a decode step is at seq_len - 1. It is traced once:
            its operations are elementwise, and of arrays that it captures it reads single elements. A function that
            does the same to arrays of the same shapes compiles nothing. `pallas_attn.mods` has some.
        mask_mod: a function (batch, head, q_idx, kv_idx) -> bool, likewise; joined with the other masks. Where no query
            of a block (a sequence that is decoded is one) can see what comes before a key, or from one on, by blocks of
            16 tokens (longer ones in tables of more than 32768), that is not read, and its pages may be anyone's;
            keys and values in between must be finite.
        out_scale: with an fp8 output, a number above 0 or a float32 scalar that may be traced: stored = out /
            out_scale, saturating. None is 1.
        out_dtype: None (query's), float8_e4m3fn or float8_e5m2.
        return_lse: also return the natural log-sum-exp of the logits, to merge with other parts (`merge_states`).
        layout: order of a page's dimensions.
        implementation: None (cuda on Hopper for prompts of heads wider than 64, else pallas on an NVIDIA GPU; xla
            elsewhere), "cuda" (sm_90: bf16 and fp16; caches of query's dtype, e4m3 or int8 in NHD or HND; head_dim and
            value_dim multiples of 8, of 16 beside 8-bit caches; outputs of query's dtype; no tree_mask; the Pallas
            kernel serves sequences that are decoded), "pallas" (sm_80 or newer; e4m3 from sm_89), "triton" (the same
            kernel by Triton itself, where Pallas cannot; the extra of that name), "xla" (anywhere, for debugging and
            CPUs) or "interpret" (the Pallas kernel run in Python, slow).
        config: tile sizes for "pallas", "triton" and "interpret"; "cuda" uses `short` of 8-bit caches and heads wider
            than 128, whose decoded sequences Pallas serves, and up to `widened_bytes` of memory (512 MiB) for a 16-bit
            copy of what long prompts see in an 8-bit cache. None takes the measured or the heuristic ones.

    Returns:
        out [total_tokens, num_heads, value_dim] in query's dtype or `out_dtype`; with return_lse, also lse
        [total_tokens, num_heads], float32. A page id in use outside [0, num_pages), or a length that is negative or
        beyond the table, gives NaN in the rows that would need it, at most in that sequence's; nothing out of bounds
        is read.

    Raises:
        TypeError: an argument of the wrong dtype or a config of the wrong type.
        ValueError: a wrong shape or value, or an implementation that cannot serve, with its reason.

    Sharded over a mesh, outside shard_map, a call is partitioned over heads. A pool that would have to move is a
    ValueError (see `paged_attention`).

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023);
    chunked prefill as in vLLM's Triton prefix_prefill; Dao, "FlashAttention-2" (2023).
    """
    check = ArgumentChecker("ragged_paged_attention")
    num_seqs = arguments.check_arrays(
        check, query, key_cache, value_cache, block_tables, seq_lens, cu_q_lens, num_seqs, layout
    )
    operands = arguments.made(
        check,
        query=query,
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
        score_mod=score_mod,
        mask_mod=mask_mod,
        out_scale=out_scale,
        out_dtype=arguments.output_dtype(check, query.dtype, out_dtype),
        return_lse=return_lse,
        layout=layout,
    )
    out, lse = OP.serve(operands, implementation=implementation, config=config)
    return (out, lse) if return_lse else out
