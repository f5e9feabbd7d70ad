"""vLLM's unified attention in the form in which jax-triton calls a kernel: arrays read, arrays written, constants.

Imported only where vLLM and Triton are. What our cells do not use (windows, biases, quantised caches) is off.
"""

import triton
import triton.language as tl
from vllm.v1.attention.ops.triton_unified_attention import kernel_unified_attention, reduce_segments


@triton.jit
def _attend(
    query, keys, values, tables, lengths, starts, out, sums, maxima, weights,
    SCALE: tl.constexpr, NUM_SEQS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_PAGES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, SEGMENTS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    token = NUM_HEADS * HEAD_DIM
    slot = NUM_HEADS // GROUP * HEAD_DIM
    kernel_unified_attention(
        output_ptr=out, segm_output_ptr=sums, segm_max_ptr=maxima, segm_expsum_ptr=weights,
        query_ptr=query, key_cache_ptr=keys, value_cache_ptr=values, sink_ptr=None,
        block_tables_ptr=tables, seq_lens_ptr=lengths, query_start_len_ptr=starts,
        alibi_slopes_ptr=None, qq_bias_ptr=None, per_seq_causal_ptr=None, mm_prefix_range_ptr=None,
        rswa_prefix_lens_ptr=lengths, scale=SCALE, q_scale=None, k_scale=None, v_scale=None,
        out_scale=1.0, softcap=0.0, num_query_heads=NUM_HEADS, num_queries_per_kv=GROUP,
        block_table_stride=MAX_PAGES, query_stride_0=token, query_stride_1=HEAD_DIM,
        output_stride_0=token, output_stride_1=HEAD_DIM, qq_bias_stride_0=0,
        BLOCK_SIZE=PAGE_SIZE, TILE_SIZE=TILE, HEAD_SIZE=HEAD_DIM, HEAD_SIZE_PADDED=PADDED_DIM,
        USE_ALIBI_SLOPES=False, USE_ALIBI_SQRT=False, USE_QQ_BIAS=False, USE_SOFTCAP=False,
        USE_SINKS=False, SLIDING_WINDOW=0, USE_CAUSAL=True, USE_PER_SEQ_CAUSAL=False,
        USE_MM_PREFIX=False, MAX_MM_RANGES=0, R_SWA_WINDOW=0, USE_R_SWA=False,
        stride_k_cache_0=PAGE_SIZE * slot, stride_k_cache_1=slot, stride_k_cache_2=HEAD_DIM,
        stride_k_cache_3=1, stride_v_cache_0=PAGE_SIZE * slot, stride_v_cache_1=slot,
        stride_v_cache_2=HEAD_DIM, stride_v_cache_3=1, BLOCK_Q=BLOCK_Q, num_seqs=NUM_SEQS,
        BLOCK_M=BLOCK_M, NUM_SEGMENTS_PER_SEQ=SEGMENTS, USE_FP8=False, IS_3D=CUT,
    )  # fmt: skip


@triton.jit
def attend_whole(
    query, keys, values, tables, lengths, starts, out,
    SCALE: tl.constexpr, NUM_SEQS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_PAGES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each sequence by the programs of its heads."""
    _attend(
        query, keys, values, tables, lengths, starts, out, None, None, None, SCALE, NUM_SEQS, NUM_HEADS,
        GROUP, HEAD_DIM, PADDED_DIM, PAGE_SIZE, MAX_PAGES, BLOCK_Q, BLOCK_M, TILE,
        SEGMENTS=tl.constexpr(1), CUT=tl.constexpr(False),
    )  # fmt: skip


@triton.jit
def attend_cut(
    query, keys, values, tables, lengths, starts, sums, maxima, weights,
    SCALE: tl.constexpr, NUM_SEQS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_PAGES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Each sequence in segments, which `merge` puts together. The output is not written: any pointer will do."""
    _attend(
        query, keys, values, tables, lengths, starts, sums, sums, maxima, weights, SCALE, NUM_SEQS, NUM_HEADS,
        GROUP, HEAD_DIM, PADDED_DIM, PAGE_SIZE, MAX_PAGES, BLOCK_Q, BLOCK_M, TILE, SEGMENTS,
        CUT=tl.constexpr(True),
    )  # fmt: skip


@triton.jit
def merge(
    sums, maxima, weights, lengths, starts, out,
    NUM_SEQS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    MAX_PAGES: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    reduce_segments(
        output_ptr=out, segm_output_ptr=sums, segm_max_ptr=maxima, segm_expsum_ptr=weights,
        seq_lens_ptr=lengths, num_seqs=NUM_SEQS, num_query_heads=NUM_HEADS, out_scale_inv=1.0,
        output_stride_0=NUM_HEADS * HEAD_DIM, output_stride_1=HEAD_DIM, block_table_stride=MAX_PAGES,
        TILE_SIZE=TILE, HEAD_SIZE=HEAD_DIM, HEAD_SIZE_PADDED=PADDED_DIM, query_start_len_ptr=starts,
        BLOCK_Q=BLOCK_Q, NUM_SEGMENTS_PER_SEQ=SEGMENTS, USE_FP8=False,
    )  # fmt: skip
