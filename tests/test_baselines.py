"""Other projects' kernels in benchmarks/baselines, with stand-ins for their packages."""

import dataclasses
import importlib
import sys
import types

import baselines
import jax
import measure
import numpy as np
import pytest
import reference
from workloads import WORKLOADS
from workloads.paged_attention import PagedAttention

import pallas_attn
from pallas_attn.testing import cases
from pallas_attn.testing.flash_attention import FlashCase

pytestmark = pytest.mark.once  # other projects' arguments

torch = pytest.importorskip("torch")
stand_ins = pytest.importorskip("peer_stand_ins")

MLA = {
    q_len: cases.MLADecodeCase((64, 150, 3), 4, q_len=q_len, causal=q_len > 1, spare_pages=0)
    for q_len in (1, 2)
}
FP8 = "float8_e4m3fn"
SPARSE = {
    "all tokens": dataclasses.replace(MLA[2], cache_dtype=FP8),
    "chosen": cases.SparseMLACase(
        (200, 90), 4, q_len=2, topk=128, page_size=16, spare_pages=0, cache_dtype=FP8
    ),
    "prefill": cases.SparsePrefillCase((200,), 3, q_len=5, topk=128, spare_pages=0),
}
PAGED = {q_len: cases.DecodeCase((64, 150, 3), 4, 2, 16, 16, q_len=q_len, spare_pages=0) for q_len in (1, 2)}
RAGGED = cases.RaggedCase(
    (64, 150, 3), 4, 2, 16, 16, q_lens=(64, 20, 1), padding=0, spare_seqs=0, spare_pages=0
)
WINDOWS = [dataclasses.replace(case, sliding_window=30) for case in (PAGED[1], RAGGED)]
DENSE = [
    FlashCase(24, 24, 4, 2, 16, "bfloat16", causal=True, value_dim=32),
    FlashCase(20, 20, 2, 2, 16, "bfloat16", causal=True, documents=(3, 12, 5)),
    FlashCase(20, 20, 2, 2, 16, "bfloat16", causal=True, sliding_window=7),
]


def stand_in(monkeypatch, name: str) -> None:
    if name == "flash_mla":
        monkeypatch.setitem(sys.modules, "flash_mla", stand_ins.flash_mla_package(lazy=True))
    elif name == "flash_mla with arrays":
        monkeypatch.setitem(sys.modules, "flash_mla", stand_ins.flash_mla_package(lazy=False))
    elif name == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", stand_ins.flashinfer_package())
    elif name == "fa3":
        monkeypatch.setattr(baselines.load("fa3"), "_operators", lambda: stand_ins.FlashAttention3)
    elif name == "vllm_triton":
        for module, function in (
            ("triton_unified_attention", stand_ins.unified_attention),
            ("triton_decode_attention", stand_ins.decode_attention_fwd),
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
            workload = WORKLOADS[case.op](pallas_attn, True)
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
    *(("flash_mla", case) for case in SPARSE.values()),
    ("flashinfer", PAGED[1]),
    ("vllm_triton", MLA[1]),
    ("vllm_triton", PAGED[1]),
    ("vllm_triton", PAGED[2]),
    *((name, RAGGED) for name in ("fa3", "flashinfer", "vllm_triton")),
    *((name, case) for name in ("fa3", "flashinfer", "vllm_triton") for case in WINDOWS),
    *(("fa3", case) for case in DENSE),
]


@pytest.mark.parametrize(("name", "case"), ON_TORCH, ids=lambda value: getattr(value, "id", value))
def test_outputs_of_the_peers(monkeypatch, made, name, case):
    stand_in(monkeypatch, name)
    inputs, expected = made(case)
    assert not np.allclose(*expected, atol=0.1), "other pages, other results"
    peer = baselines.load(name.split()[0])
    assert peer.supports(case) is None
    calls = peer.build(case, baselines.as_tensors(inputs))
    assert len(calls) == (1 if case in DENSE else {"flashinfer": 2, "fa3": 2}.get(name, 1))
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
        (
            "flash_mla",
            dataclasses.replace(SPARSE["chosen"], topk=96),
            "names a multiple of 64 tokens, not 96",
        ),
        ("flash_mla", dataclasses.replace(SPARSE["chosen"], cache_dtype=None), "over fp8 latents alone"),
        ("flash_mla", dataclasses.replace(SPARSE["prefill"], cache_dtype=FP8), "over bf16 latents alone"),
        ("flash_mla", dataclasses.replace(SPARSE["prefill"], num_heads=130), "up to 128 heads"),
        ("fa3", SPARSE["all tokens"], "bf16 and fp16 caches"),
        ("flashinfer", PAGED[2], "one query token a sequence"),
        ("vllm_triton", MLA[2], "one query token a sequence"),
        ("flashinfer", dataclasses.replace(RAGGED, value_dim=8), "as wide as its keys"),
        ("vllm_triton", dataclasses.replace(RAGGED, value_dim=8), "as wide as its keys"),
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


@pytest.mark.parametrize("compiled", [{True}, set()])
def test_flashinfer_needs_one_of_its_kernels(monkeypatch, made, compiled):
    class Wrapper(stand_ins.PagedWrapper):
        def __init__(self, workspace, layout, use_tensor_cores):
            if use_tensor_cores not in compiled:
                raise ValueError("not compiled")

    stand_in(monkeypatch, "flashinfer")
    monkeypatch.setattr(sys.modules["flashinfer"], "BatchDecodeWithPagedKVCacheWrapper", Wrapper)
    peer, inputs = baselines.load("flashinfer"), baselines.as_tensors(made(PAGED[1])[0])
    if compiled:
        assert list(peer.build(PAGED[1], inputs)) == ["tensor cores"]
    else:
        with pytest.raises(ValueError, match="not compiled"):
            peer.build(PAGED[1], inputs)


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
    right, outcome = measure.checked(candidate, inputs, expected)
    assert not right
    assert outcome.note == "AssertionError: head count 4 is not supported"
    assert not outcome.wrong
    ours = candidate._replace(name="auto")
    with pytest.raises(AssertionError, match="head count"):
        measure.checked(ours, inputs, expected)


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
    monkeypatch.setitem(sys.modules, "flashinfer", stand_ins.flashinfer_package())
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
        assert set(peer.OPS) <= set(WORKLOADS)
        assert callable(peer.available)
        assert callable(peer.supports)
        if hasattr(peer, "variants"):
            assert peer.ORDER in (reference.PAGES_FIRST, reference.HEADS_FIRST)
        else:
            assert callable(peer.attend if hasattr(peer, "attend") else peer.build)


def test_bursts_are_as_long_as_one_replay_says(monkeypatch):
    graphs = importlib.import_module("graphs")
    captured = object.__new__(graphs.Captured)
    captured.num_calls, captured._replays = 20, 0
    asked = []
    monkeypatch.setattr(captured, "_seconds", lambda replays: asked.append(replays) or 10e-6, raising=False)
    assert [captured.sample() for _ in range(3)] == [10e-6] * 3
    assert asked == [1, *[int(graphs.BURST_SECONDS / (20 * 10e-6))] * 3]
    assert graphs.burst_replays(1.0) == graphs.LEAST_REPLAYS
    calls = [graphs.least_calls(seconds) for seconds in (1e-5, graphs.GRAPH_SECONDS / 4, 1.0)]
    assert calls == [graphs.LEAST_CALLS, 4, 1]


@pytest.mark.parametrize("documents", [(), DENSE[1].documents], ids=["whole", "documents"])
def test_outputs_of_jax_mha(made, documents):
    case = dataclasses.replace(DENSE[1], documents=documents)
    inputs, expected = made(case)
    peer = baselines.load("jax_mha")
    assert peer.supports(case) is None
    outs = [jax.jit(peer.attend(case))(*inputs.tables[i])[0] for i in (0, -1)]
    assert reference.worst_error(outs, expected) < 5e-3


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_outputs_of_dew(made, monkeypatch, case):
    case = dataclasses.replace(case, value_dim=None)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", stand_ins.dew_package())
    inputs, expected = made(case)
    peer = baselines.load("dew")
    assert peer.supports(case) is None
    outs = [jax.jit(peer.attend(case))(*inputs.tables[i])[0] for i in (0, -1)]
    assert reference.worst_error(outs, expected) < 5e-3
    assert "own places" in peer.supports(dataclasses.replace(case, q_offset=1))
    assert "values" in peer.supports(dataclasses.replace(case, value_dim=32))
