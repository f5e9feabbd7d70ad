"""Stand-ins with the signatures of the packages that benchmarks/baselines calls. They attend in torch, on the CPU, to
what they are handed, so that a wrong argument or order gives a wrong output."""

import itertools
import types

import jax
import numpy as np
import torch


def attention(query, keys, values, scale, causal, left=-1):
    """[q_len, heads, dim] of one sequence: keys and values [length, kv_heads, dim]; a query sees
    `left` of them before its own, -1: all."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("ihd,thd->iht", query.float(), keys) * scale
    q_len, length = len(query), len(keys)
    behind = torch.arange(length)[None] - (length - q_len + torch.arange(q_len)[:, None])
    hidden = (behind > 0) & bool(causal) | (behind < -left) & (left >= 0)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("iht,thd->ihd", scores.softmax(-1), values).to(query.dtype)


def rows_of(cache, pages, length):
    return cache[pages.long()].reshape(-1, *cache.shape[-2:])[:length]


def flash_mla_package(*, lazy: bool):
    """`lazy`: as it is since 2025, with the schedule in an object; otherwise in two arrays."""
    package = types.ModuleType("flash_mla")
    made = []

    def get_mla_metadata(cache_seqlens=None, num_heads_per_head_k=None, num_heads_k=None):
        made.append((cache_seqlens, num_heads_per_head_k, num_heads_k))
        return ("schedule", None) if lazy else (torch.zeros(132, 8), torch.zeros(len(cache_seqlens) + 1))

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
    ):
        assert is_fp8_kvcache == (indices is not None)
        if is_fp8_kvcache:
            assert (block_table, cache_seqlens, head_dim_v, causal) == (None, None, 512, False)
            assert (tile_scheduler_metadata, num_splits) == ("schedule", None)
            rows = fp8_latents(k_cache.reshape(-1, 656))
            return named(q, rows, indices, softmax_scale, 64), "lse"
        if lazy:
            assert (tile_scheduler_metadata, num_splits) == ("schedule", None)
        else:
            assert (tile_scheduler_metadata.shape, len(num_splits)) == ((132, 8), len(q) + 1)
        ((lengths, rows, kv_heads),) = made
        assert (lengths is cache_seqlens, rows, kv_heads) == (True, q.shape[1] * q.shape[2], k_cache.shape[2])
        assert head_dim_v == 512
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        outs = []
        for query, table, length in zip(q, block_table, cache_seqlens, strict=True):
            keys = rows_of(k_cache, table, length)
            outs.append(attention(query, keys, keys[..., :512], softmax_scale, causal))
        return torch.stack(outs), "lse"

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert kv.shape[1:] == (1, 576)
        assert kv.dtype == torch.bfloat16
        out = named(q[None], kv[:, 0].float(), indices[None, :, 0], sm_scale, 128)
        return out[0, ..., :d_v], "max logits", "lse"

    package.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    package.get_mla_metadata = get_mla_metadata
    package.flash_mla_with_kvcache = flash_mla_with_kvcache
    return package


def named(query, rows, indices, scale, multiple):
    """[batch, q_len, heads, 512] of rows [num_rows, 576] by indices [batch, q_len, topk]; -1 is none."""
    assert query.shape[2] in (64, 128)
    assert query.is_contiguous()
    assert indices.dtype == torch.int32
    assert indices.shape[2] % multiple == 0
    out = torch.zeros(*query.shape[:3], 512, dtype=query.dtype)
    for b, i in itertools.product(range(query.shape[0]), range(query.shape[1])):
        keys = rows[indices[b, i][indices[b, i] >= 0].long()][:, None]
        out[b, i] = attention(query[b, i][None], keys, keys[..., :512], scale, False)[0]
    return out


def fp8_latents(tokens):
    """[num_tokens, 576] of [num_tokens, 656] bytes."""
    values = tokens[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = tokens[:, 512:528].contiguous().view(torch.float32)
    rope = tokens[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([values * scales.repeat_interleave(128, dim=1), rope], dim=1)


class LatentWrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        assert float_workspace_buffer.numel() >= 128 << 20
        assert not use_cuda_graph, "its buffers would be those of the last table in all calls"
        assert backend in ("fa2", "fa3")

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        starts = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert {array.dtype for array in starts} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True)
        assert q_data_type == kv_data_type == torch.bfloat16
        self.qo_indptr, self.kv_indptr, self._kv_indices_buf, self.lengths = starts
        self.num_heads, self.page_size, self.causal, self.sm_scale = num_heads, page_size, causal, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        assert q_nope.shape[1:] == (self.num_heads, 512)
        assert q_nope.is_contiguous()
        assert q_pe.is_contiguous()
        assert ckv_cache.shape[1:] == (self.page_size, 512)
        query = torch.cat([q_nope, q_pe], -1)
        cache = torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]
        assert self.kv_indptr[-1] == len(self._kv_indices_buf)
        for i, length in enumerate(self.lengths):
            own = slice(*self.qo_indptr[i : i + 2])
            keys = rows_of(cache, self._kv_indices_buf[slice(*self.kv_indptr[i : i + 2])], length)
            out[own] = attention(query[own], keys, keys[..., :512], self.sm_scale, self.causal)
        return out


class PagedWrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        assert kv_layout == "NHD"

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        window_left=-1,
        q_data_type=None,
        kv_data_type=None,
        sm_scale=None,
    ):
        self.window_left = window_left
        self.indptr, self._paged_kv_indices_buf, self.last_page_len = indptr, indices, last_page_len
        assert {array.dtype for array in (indptr, indices, last_page_len)} == {torch.int32}
        self.heads, self.page_size, self.sm_scale = (
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            sm_scale,
        )

    def run(self, q, paged_kv_cache, out=None):
        assert (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2]) == self.heads
        for i, (first, last) in enumerate(zip(self.indptr[:-1], self.indptr[1:], strict=True)):
            length = int(last - first - 1) * self.page_size + int(self.last_page_len[i])
            pages = self._paged_kv_indices_buf[first:last]
            keys, values = (rows_of(cache, pages, length) for cache in paged_kv_cache)
            out[i] = attention(q[i : i + 1], keys, values, self.sm_scale, False, self.window_left)[0]
        return out


class PrefillWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert (kv_layout, backend in ("fa2", "fa3")) == ("NHD", True)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal=False,
        sm_scale=None,
        window_left=-1,
        q_data_type=None,
        kv_data_type=None,
    ):
        self.starts, self.indptr, self.last = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        self._paged_kv_indices_buf, self.page_size = paged_kv_indices, page_size
        self.heads, self.options = (num_qo_heads, num_kv_heads, head_dim_qk), (sm_scale, causal, window_left)

    def run(self, q, paged_kv_cache, out=None):
        assert (q.shape[1], paged_kv_cache[0].shape[2], q.shape[2]) == self.heads
        for i, (first, last) in enumerate(zip(self.indptr[:-1], self.indptr[1:], strict=True)):
            length = int(last - first - 1) * self.page_size + int(self.last[i])
            keys, values = (
                rows_of(cache, self._paged_kv_indices_buf[first:last], length) for cache in paged_kv_cache
            )
            own = slice(int(self.starts[i]), int(self.starts[i + 1]))
            out[own] = attention(q[own], keys, values, *self.options)
        return out


def flashinfer_package():
    package = types.ModuleType("flashinfer")
    package.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper)
    package.BatchDecodeWithPagedKVCacheWrapper = PagedWrapper
    package.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    return package


class FlashAttention3:
    """torch.ops._vllm_fa3_C; arguments in its order."""

    @staticmethod
    def get_scheduler_metadata(*arguments):
        assert len(arguments) == 23
        return ("metadata", arguments)

    @staticmethod
    def fwd(*arguments):
        assert len(arguments) == 37
        q, k, v, k_new, v_new, qv, out, starts = arguments[:8]
        lengths, max_q, max_k, table = arguments[11:15]
        scale, causal, left, right, softcap, _, metadata, splits = arguments[23:31]
        assert k_new is v_new is out is None
        assert (right, softcap) == (0 if left >= 0 else -1, 0.0)
        if table is None:
            key_starts = arguments[8]
            bounds = [list(itertools.pairwise(ends)) for ends in (starts, key_starts)]
            assert (max_q, max_k) == tuple(max(e - b for b, e in side) for side in bounds)
            assert lengths is metadata is qv is None
            pairs = zip(*bounds, strict=True)
            return [
                torch.cat(
                    [attention(q[i:j], k[m:n], v[m:n], scale, causal, left) for (i, j), (m, n) in pairs]
                )
            ]
        name, planned = metadata
        assert name == "metadata"
        assert planned[:7] == (len(lengths), max_q, max_k, q.shape[1], k.shape[2], k.shape[3], v.shape[3])
        assert planned[8] is lengths
        assert planned[9] is starts
        assert planned[17:19] == (left, right)
        assert (planned[14], planned[16], planned[20]) == (k.shape[1], causal, splits)
        query = q if qv is None else torch.cat([qv, q], -1)
        outs = []
        for i, length in enumerate(lengths):
            keys, values = (rows_of(cache, table[i], length) for cache in (k, v))
            keys = keys if qv is None else torch.cat([values, keys], -1)
            own = query[starts[i] : starts[i + 1]]
            outs.append(attention(own, keys, values, scale, causal, left))
        return [torch.cat(outs)]


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    *,
    seq_threshold_3D,
    num_par_softmax_segments,
    softmax_segm_output,
    softmax_segm_max,
    softmax_segm_expsum,
):
    assert (softcap, q_descale) == (0, None)
    assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], num_par_softmax_segments, q.shape[2])
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
    for i, length in enumerate(seqused_k):
        own = slice(*cu_seqlens_q[i : i + 2])
        keys, values = (rows_of(cache, block_table[i], length) for cache in (k, v))
        out[own] = attention(q[own], keys, values, softmax_scale, causal, window_size[0])


def decode_attention_fwd(
    q, k, v, o, lse, table, lengths, partial, splits, scale, page_size, *, k_scale, v_scale, is_mla
):
    assert is_mla
    assert page_size == k.shape[1]
    assert partial.shape == (*o.shape[:2], splits, o.shape[2] + 1)
    assert float(k_scale) == float(v_scale) == 1
    for i, length in enumerate(lengths):
        keys, values = (rows_of(cache, table[i], length) for cache in (k, v))
        o[i] = attention(q[i : i + 1], keys, values, scale, False)[0]


def dew_package():
    """dew_flash_attn."""
    package = types.ModuleType("dew_flash_attn")

    def of_one(row, options):
        query, *_ = tensors = [torch.from_numpy(np.array(x, np.float32)) for x in row]
        (left, _), causal = options.get("window_size", (-1, -1)), options["is_causal"]
        return attention(*tensors, query.shape[-1] ** -0.5, causal, left).numpy().astype(row[0].dtype)

    def flash_mha(query, key, value, **options):
        def batch(*arrays):
            return np.stack([of_one(row, options) for row in zip(*arrays, strict=True)])

        return jax.pure_callback(batch, query, query, key, value)

    def flash_mha_varlen(query, key, value, cu_seqlens, max_seqlen, **options):
        def packed(*arrays):
            *arrays, starts = arrays
            spans = list(itertools.starmap(slice, itertools.pairwise(np.asarray(starts))))
            assert max_seqlen == max(span.stop - span.start for span in spans)
            return np.concatenate([of_one([x[span] for x in arrays], options) for span in spans])

        return jax.pure_callback(packed, query, query, key, value, cu_seqlens)

    package.flash_mha, package.flash_mha_varlen = flash_mha, flash_mha_varlen
    return package
