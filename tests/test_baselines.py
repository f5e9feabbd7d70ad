"""Other projects' kernels in benchmarks/baselines: stand-ins with the packages' signatures attend in torch, on the CPU,
to what they are handed, so that a wrong argument or order gives a wrong output."""

import importlib
import sys
import types

import jax
import numpy as np
import pytest
from support import BENCHMARKS, TINY

torch = pytest.importorskip("torch")


def attention(query, keys, scale, causal):
    """[q_len, heads, 512] of one request: query [q_len, heads, 576], keys [length, 576]."""
    scores = torch.einsum("ihd,td->iht", query.float(), keys.float()) * scale
    q_len, length = len(query), len(keys)
    if causal:
        hidden = torch.arange(length)[None] > length - q_len + torch.arange(q_len)[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return (scores.softmax(-1) @ keys[:, :512].float()).to(query.dtype)


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
            keys = k_cache[table.long()].reshape(-1, k_cache.shape[-1])[:length]
            outs.append(attention(query, keys, softmax_scale, causal))
        return torch.stack(outs), "lse"

    package.get_mla_metadata = get_mla_metadata
    package.flash_mla_with_kvcache = flash_mla_with_kvcache
    return package


class Wrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        assert float_workspace_buffer.numel() >= 128 << 20
        assert not use_cuda_graph, "its buffers would be those of the last table in all calls"
        assert backend == "fa3"

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
        cache = torch.cat([ckv_cache, kpe_cache], -1)
        assert self.kv_indptr[-1] == len(self._kv_indices_buf)
        for i, length in enumerate(self.lengths):
            rows = slice(*self.qo_indptr[i : i + 2])
            pages = self._kv_indices_buf[slice(*self.kv_indptr[i : i + 2])]
            keys = cache[pages.long()].reshape(-1, 576)[:length]
            out[rows] = attention(query[rows], keys, self.sm_scale, self.causal)
        return out


def flashinfer_package():
    package = types.ModuleType("flashinfer")
    package.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    return package


PACKAGES = {
    "flash_mla": lambda: flash_mla_package(lazy=True),
    "flash_mla with arrays": lambda: flash_mla_package(lazy=False),
    "flash_infer": flashinfer_package,
}


@pytest.fixture
def bandwidth(monkeypatch, tmp_path):
    """The program, with tiny pools."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("mla_bandwidth")
    for constant in TINY.keys() & vars(module.mla_decode).keys():
        monkeypatch.setattr(module.mla_decode, constant, TINY[constant])
    return module


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("standing_in", PACKAGES)
def test_outputs_of_the_peers(bandwidth, monkeypatch, standing_in, q_len):
    name = standing_in.split()[0]
    package = PACKAGES[standing_in]()
    monkeypatch.setitem(sys.modules, bandwidth.baselines.PACKAGES[name], package)
    shape = bandwidth.Shape("uneven", (64, 150, 3), 4, q_len, 64)
    inputs = bandwidth.inputs_of(shape)
    outputs = bandwidth.peer_runner(name, shape, inputs).outputs()
    expected = bandwidth.expected_ends(shape, inputs)
    assert len(outputs) == len(expected) == 2
    assert not np.allclose(*expected, atol=0.1), "other pages, other results"
    assert bandwidth.worst_error([out[[0, -1]] for out in outputs], expected) < 5e-3
    run, schedule = bandwidth.mla_decode.build(shape, "xla")
    for ours, theirs in zip(run(inputs, schedule), outputs, strict=True):
        assert bandwidth.disagreement((name, "xla"), np.asarray(ours, np.float32), theirs) is None


def test_tensors_share_the_arrays_memory(bandwidth):
    inputs = bandwidth.inputs_of(bandwidth.shape_of(2, 20, 4, 1))
    tensors = bandwidth.baselines.tensors(inputs)
    assert tensors.cache.data_ptr() == inputs.cache.unsafe_buffer_pointer()
    assert tensors.cache.dtype == tensors.query.dtype == torch.bfloat16
    assert len(tensors.tables) == 2


def test_compare_with_a_peer(bandwidth, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flash_mla", PACKAGES["flash_mla"]())
    monkeypatch.setattr(bandwidth.baselines, "refusal", lambda name: None)
    monkeypatch.setattr(bandwidth.mla_decode, "device_seconds", lambda run, repeats: 4e-7)
    monkeypatch.setattr(bandwidth.mla_decode, "warm_up", lambda run: None)
    graphs = importlib.import_module("cuda_graphs")
    monkeypatch.setattr(graphs, "microseconds", lambda call, num_sets: 0.05 * num_sets / 2)
    options = ["--batch", "3", "--seqlens", "20", "--heads", "4"]
    assert bandwidth.main(["--compare", "--target", "flash_mla", *options]) == 0
    num_bytes = 2 * (66 * 576 + 3 * 4 * 1088)
    assert (tmp_path / "xla_vs_flash_mla_perf.csv").read_text().splitlines()[1:] == [
        f"xla,3,22,4,{num_bytes / 1e-7 / 1e9:.0f}",
        f"flash_mla,3,22,4,{num_bytes / 5e-8 / 1e9:.0f}",
    ]


def test_peer_that_fails_at_a_shape_is_a_missing_row(bandwidth, monkeypatch, tmp_path, capsys):
    package = PACKAGES["flash_mla"]()

    def fail(*arguments, **options):
        raise AssertionError("head count 4 is not supported\nsecond line")

    package.get_mla_metadata = fail
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    reasons = dict(flash_mla=None, flash_infer="not today")
    monkeypatch.setattr(bandwidth.baselines, "refusal", reasons.get)
    monkeypatch.setattr(bandwidth.mla_decode, "device_seconds", lambda run, repeats: 2e-7)
    monkeypatch.setattr(bandwidth.mla_decode, "warm_up", lambda run: None)
    assert bandwidth.main(["--all", "--batch", "3", "--seqlens", "20", "--heads", "4"]) == 0
    assert [row[:4] for row in (tmp_path / "all_perf.csv").read_text().splitlines()[1:]] == ["xla,"]
    printed = capsys.readouterr().out
    assert "no figure: AssertionError: head count 4 is not supported\n" in printed
    assert "flash_infer cannot run here: not today" in printed


def test_why_a_peer_cannot_run(bandwidth, monkeypatch, tmp_path):
    refusal = bandwidth.baselines.refusal
    assert refusal("flash_infer") == "package 'flashinfer' is not installed"
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = tmp_path / "flashinfer.py"
    broken.write_text("raise OSError('libcudart.so.12: not found\\nmore')")
    assert (
        refusal("flash_infer")
        == "package 'flashinfer' cannot be imported: OSError: libcudart.so.12: not found"
    )
    broken.write_text("import a_package_that_it_needs")
    importlib.invalidate_caches()
    assert "No module named 'a_package_that_it_needs'" in refusal("flash_infer")
    monkeypatch.setitem(sys.modules, "flashinfer", PACKAGES["flash_infer"]())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal("flash_infer") == "needs an NVIDIA GPU, torch finds none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert refusal("flash_infer") == "needs its inputs on a GPU, JAX makes them on the cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert refusal("flash_infer") is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "'torch'" in refusal("flash_infer")


def test_bursts_are_as_long_as_one_replay_says(bandwidth, monkeypatch):
    graphs = importlib.import_module("cuda_graphs")
    asked = []

    def replayed(graph, num_calls, replays):
        asked.append((graph, num_calls, replays))
        return 10.0 + len(asked)

    monkeypatch.setattr(graphs, "replayed", replayed)
    monkeypatch.setattr(graphs, "captured", lambda call, num_sets: ("graph", 20))
    # The first replay takes 11 us a call, the first burst 12: so many of 20 calls fit in 12 ms. Median of five.
    assert graphs.microseconds(lambda i: None, 10) == 14.0
    replays = [1, int(12e3 / (11 * 20)), *[int(12e3 / (12 * 20))] * 4]
    assert asked == [("graph", 20, count) for count in replays]
    asked.clear()
    monkeypatch.setattr(graphs, "captured", lambda call, num_sets: ("graph", 10**6))
    graphs.microseconds(lambda i: None, 10)
    assert {replays for _, _, replays in asked[1:]} == {graphs.LEAST_REPLAYS}
