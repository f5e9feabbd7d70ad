"""Other projects' kernels in benchmarks/baselines: stand-ins with the packages' signatures attend in torch, on the CPU,
to what they are handed, so that a wrong argument or order gives a wrong output."""

import importlib
import sys
import types

import baselines
import jax
import measure
import numpy as np
import pytest
import reference
from workloads.mla_decode import MLADecode
from workloads.paged_attention import PagedAttention

import pallas_attn
from pallas_attn.testing import cases

torch = pytest.importorskip("torch")

MLA = {
    q_len: cases.MLADecodeCase((64, 150, 3), 4, q_len=q_len, causal=q_len > 1, spare_pages=0)
    for q_len in (1, 2)
}
PAGED = {q_len: cases.DecodeCase((64, 150, 3), 4, 2, 16, 16, q_len=q_len, spare_pages=0) for q_len in (1, 2)}


def attention(query, keys, values, scale, causal):
    """[q_len, heads, dim] of one sequence: keys and values [length, kv_heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("ihd,thd->iht", query.float(), keys) * scale
    q_len, length = len(query), len(keys)
    if causal:
        hidden = torch.arange(length)[None] > length - q_len + torch.arange(q_len)[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("iht,thd->ihd", scores.softmax(-1), values).to(query.dtype)


def rows_of(cache, pages, length):
    return cache[pages.long()].reshape(-1, *cache.shape[-2:])[:length]


def flash_mla_package(*, lazy: bool):
    """`lazy`: as it is since 2025, with the schedule in an object; otherwise in two arrays."""
    package = types.ModuleType("flash_mla")
    made = []

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
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
    ):
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

    package.get_mla_metadata = get_mla_metadata
    package.flash_mla_with_kvcache = flash_mla_with_kvcache
    return package


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
        q_data_type=None,
        kv_data_type=None,
        sm_scale=None,
    ):
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
            out[i] = attention(q[i : i + 1], keys, values, self.sm_scale, False)[0]
        return out


def flashinfer_package():
    package = types.ModuleType("flashinfer")
    package.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=LatentWrapper)
    package.BatchDecodeWithPagedKVCacheWrapper = PagedWrapper
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
        assert (left, right, softcap) == (-1, -1, 0.0)
        name, planned = metadata
        assert name == "metadata"
        assert planned[:7] == (len(lengths), max_q, max_k, q.shape[1], k.shape[2], k.shape[3], v.shape[3])
        assert planned[8] is lengths
        assert planned[9] is starts
        assert (planned[14], planned[16], planned[20]) == (k.shape[1], causal, splits)
        query = q if qv is None else torch.cat([qv, q], -1)
        outs = []
        for i, length in enumerate(lengths):
            keys, values = (rows_of(cache, table[i], length) for cache in (k, v))
            keys = keys if qv is None else torch.cat([values, keys], -1)
            own = query[starts[i] : starts[i + 1]]
            outs.append(attention(own, keys, values, scale, causal))
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
    assert (window_size, softcap, q_descale) == ((-1, -1), 0, None)
    assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], num_par_softmax_segments, q.shape[2])
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == softmax_segm_output.shape[:3]
    for i, length in enumerate(seqused_k):
        own = slice(*cu_seqlens_q[i : i + 2])
        keys, values = (rows_of(cache, block_table[i], length) for cache in (k, v))
        out[own] = attention(q[own], keys, values, softmax_scale, causal)


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


def stand_in(monkeypatch, name: str) -> None:
    if name == "flash_mla":
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_package(lazy=True))
    elif name == "flash_mla with arrays":
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_package(lazy=False))
    elif name == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_package())
    elif name == "fa3":
        monkeypatch.setattr(baselines.load("fa3"), "_operators", lambda: FlashAttention3)
    elif name == "vllm_triton":
        for module, function in (
            ("triton_unified_attention", unified_attention),
            ("triton_decode_attention", decode_attention_fwd),
        ):
            made = types.ModuleType(module)
            setattr(made, function.__name__, function)
            monkeypatch.setitem(sys.modules, f"vllm.v1.attention.ops.{module}", made)


@pytest.fixture(scope="session")
def made():
    """made(case) -> (inputs, what is right for the first and the last table), once for all peers."""
    found = {}

    def make(case):
        if case not in found:
            workload = (MLADecode if case.op == "mla_decode" else PagedAttention)(pallas_attn, True)
            inputs = workload.inputs(case)
            found[case] = inputs, workload.compile_expected(case)(inputs)
        return found[case]

    return make


ON_TORCH = [
    *(
        (name, MLA[q_len])
        for name in ("flash_mla", "flash_mla with arrays", "flashinfer")
        for q_len in (1, 2)
    ),
    *(
        (name, cases_of[q_len])
        for name in ("fa3", "torch_sdpa")
        for cases_of in (MLA, PAGED)
        for q_len in (1, 2)
    ),
    ("flashinfer", PAGED[1]),
    ("vllm_triton", MLA[1]),
    ("vllm_triton", PAGED[1]),
    ("vllm_triton", PAGED[2]),
]


@pytest.mark.parametrize(("name", "case"), ON_TORCH, ids=lambda value: getattr(value, "id", value))
def test_outputs_of_the_peers(monkeypatch, made, name, case):
    stand_in(monkeypatch, name)
    inputs, expected = made(case)
    assert not np.allclose(*expected, atol=0.1), "other pages, other results"
    peer = baselines.load(name.split()[0])
    assert peer.supports(case) is None
    calls = peer.build(case, baselines.as_tensors(inputs))
    assert len(calls) == {"flashinfer": 2, "fa3": 2}.get(name, 1)
    for call in calls.values():
        outs = [call(i).float().numpy() for i in (0, len(inputs.tables) - 1)]
        assert reference.worst_error(outs, expected) < 5e-3


@pytest.mark.parametrize("name", ["jax_nn", "jax_deprecated"])
def test_outputs_of_the_peers_on_jax(name):
    case = cases.served(2, 64, 4, 2, 16, 16)
    workload, peer = PagedAttention(pallas_attn, True), baselines.load(name)
    inputs = workload.inputs(case)
    expected = workload.compile_expected(case, order=peer.ORDER)(inputs)
    found = {}
    for variant, call in peer.variants(case).items():
        out, _ = jax.jit(call)(inputs.query, inputs.caches, inputs.tables[-1], inputs.lengths, None)
        found[variant] = reference.worst_error([out], expected[1:])
    assert found
    assert all(error < (peer.ERROR_LIMIT or 5e-3) for error in found.values()), found


def test_the_deprecated_kernel_reads_the_pool_in_another_order():
    case = cases.served(2, 64, 4, 2, 16, 16)
    workload = PagedAttention(pallas_attn, True)
    inputs = workload.inputs(case)
    orders = [
        workload.compile_expected(case, order=order)(inputs) for order in ("pages first", "heads first")
    ]
    assert not np.allclose(orders[0][0], orders[1][0], atol=0.1)


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("flash_mla", cases.MLADecodeCase((40,), 4, page_size=16), "has pages of 64 tokens, not 16"),
        ("flashinfer", PAGED[2], "one query token a sequence"),
        ("vllm_triton", MLA[2], "one query token a sequence"),
        ("jax_deprecated", PAGED[2], "one query token a sequence"),
        ("jax_deprecated", cases.served(1, 48, 4, 2, 16, 16), "a table whose pages split evenly"),
        ("fa3", cases.served(1, 64, 4, 2, 16, 16, cache_dtype="int8"), "bf16 and fp16 caches"),
        ("torch_sdpa", cases.served(1, 64, 4, 2, 16, 16, sliding_window=8), "without sliding_window"),
        (
            "fa3",
            cases.served(1, 64, 4, 2, 16, 16, block_sparse=pallas_attn.LocalStride(16, 1, 2)),
            "block_sparse",
        ),
    ],
)
def test_cases_that_a_peer_cannot_serve(name, case, words):
    assert words in baselines.load(name).supports(case)


def test_variants_of_the_deprecated_kernel_fit_the_table():
    peer = baselines.load("jax_deprecated")
    for batch, tokens in ((1, 1024), (1, 8192), (64, 32768), (256, 1024)):
        case = cases.served(batch, tokens, 32, 8, 128, 16)
        variants = peer.variants(case)
        assert len(variants) == 2
        for variant in variants:
            splits, pages = (int(word) for word in variant.split() if word.isdigit())
            assert (tokens // 16) % (splits * min(pages, tokens // 16 // splits)) == 0


def test_tensors_share_the_arrays_memory(made):
    inputs, _ = made(MLA[1])
    tensors = baselines.as_tensors(inputs)
    assert tensors.caches[0].data_ptr() == inputs.caches[0].unsafe_buffer_pointer()
    assert tensors.caches[0].dtype == tensors.query.dtype == torch.bfloat16
    assert len(tensors.tables) == len(inputs.tables)


def test_a_peer_that_fails_at_a_case_has_no_figure(monkeypatch, made):
    def fail(case, inputs):
        raise AssertionError("head count 4 is not supported\nsecond line")

    peer = baselines.load("flash_mla")
    monkeypatch.setattr(peer, "build", fail)
    inputs, expected = made(MLA[1])
    done = measure.Future()
    done.set_result(lambda inputs: expected)
    build = lambda inputs: measure.torch_runners(peer, MLA[1], inputs)  # noqa: E731
    candidate = measure.Candidate("flash_mla", "FlashMLA", 5e-3, {}, done, build)
    right, outcome = measure.checked(candidate, inputs)
    assert not right
    assert outcome.note == "AssertionError: head count 4 is not supported"
    assert not outcome.wrong
    ours = candidate._replace(name="auto")
    with pytest.raises(AssertionError, match="head count"):
        measure.checked(ours, inputs)


def test_why_a_peer_cannot_run(monkeypatch, tmp_path):
    available = baselines.load("flashinfer").available
    assert available() == "package 'flashinfer' is not installed"
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = tmp_path / "flashinfer.py"
    broken.write_text("raise OSError('libcudart.so.12: not found\\nmore')")
    assert available() == "package 'flashinfer' cannot be imported: OSError: libcudart.so.12: not found"
    broken.write_text("import a_package_that_it_needs")
    importlib.invalidate_caches()
    assert "No module named 'a_package_that_it_needs'" in available()
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_package())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available() == "needs an NVIDIA GPU, torch finds none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert available() == "needs its inputs on a GPU, JAX makes them on the cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert available() is None
    assert "vllm" in baselines.load("vllm_triton").available()
    assert "cannot be loaded: ModuleNotFoundError" in baselines.load("fa3").available()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "'torch'" in available()


def test_folders_are_searched(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a_peer_for_this_test.py").write_text("")
    monkeypatch.setenv("BENCH_PEERS", f"{tmp_path}:/nowhere")
    assert baselines.importable("a_peer_for_this_test") == "package 'a_peer_for_this_test' is not installed"
    baselines.search_folders()
    assert baselines.importable("a_peer_for_this_test") is None
    assert sys.path.index(str(tmp_path)) > 0, "what is installed comes first"


def test_every_peer_says_what_run_asks():
    for name in baselines.PEERS:
        peer = baselines.load(name)
        assert peer.TITLE
        assert set(peer.OPS) <= {"mla_decode", "paged_attention"}
        assert callable(peer.available)
        assert callable(peer.supports)
        if hasattr(peer, "variants"):
            assert peer.ORDER in (reference.PAGES_FIRST, reference.HEADS_FIRST)
        else:
            assert callable(peer.build)


def test_bursts_are_as_long_as_one_replay_says(monkeypatch):
    graphs = importlib.import_module("graphs")
    captured = object.__new__(graphs.Captured)
    captured.num_calls, captured._replays = 20, 0
    asked = []
    monkeypatch.setattr(captured, "_seconds", lambda replays: asked.append(replays) or 10e-6, raising=False)
    assert [captured.sample() for _ in range(3)] == [10e-6] * 3
    assert asked == [1, *[int(graphs.BURST_SECONDS / (20 * 10e-6))] * 3]
    assert graphs.burst_replays(1.0) == graphs.LEAST_REPLAYS
