"""The benchmark program's peer that is called through jax-triton: what it hands on, and why it is refused."""

import os
import sys
import types

import baselines
import jax
import jax.numpy as jnp
import pytest
import reference
from baselines import jax_triton
from workloads.paged_attention import PagedAttention

import pallas_attn
from pallas_attn.testing import cases

pytestmark = pytest.mark.once


def attends(query, caches, tables, lengths, **constants):
    """What vLLM's kernel computes of the arrays that it is handed: another order of them gives something else."""
    query = query.reshape(constants["NUM_SEQS"], -1, *query.shape[1:])
    out = pallas_attn.paged_attention(query, *caches, tables, lengths, implementation="xla")
    return out.reshape(-1, *query.shape[2:])


def triton_call(*arrays, kernel, grid, out_shape, **constants):
    if kernel == "merge":
        sums, maxima, weights, *_ = arrays
        assert maxima.shape == weights.shape == sums.shape[:-1]
        assert grid == out_shape.shape[:2]
        return sums[:, :, 0].astype(out_shape.dtype)
    query, keys, values, tables, lengths, starts = arrays
    assert starts.shape == (constants["NUM_SEQS"] + 1,)
    assert constants["BLOCK_Q"] * constants["GROUP"] == constants["BLOCK_M"]
    assert grid[:2] == (len(query) // constants["BLOCK_Q"] + constants["NUM_SEQS"], keys.shape[2])
    out = attends(query, (keys, values), tables, lengths, **constants)
    if kernel == "whole":
        return out
    sums, *rest = out_shape
    assert grid[2] == constants["SEGMENTS"] == sums.shape[2]
    parts = jnp.broadcast_to(out[:, :, None], sums.shape).astype(sums.dtype)
    return [parts, *(jnp.zeros(one.shape, one.dtype) for one in rest)]


@pytest.fixture
def packages(monkeypatch):
    kernels = types.SimpleNamespace(attend_whole="whole", attend_cut="cut", merge="merge")
    unified = types.ModuleType("triton_unified_attention")
    unified._get_tile_size = lambda head_dim, window, itemsize, is_prefill: 32 if is_prefill else 16
    called = types.ModuleType("jax_triton")
    called.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", called)
    monkeypatch.setitem(sys.modules, "baselines.vllm_kernels", kernels)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_unified_attention", unified)
    return called


@pytest.mark.parametrize(("num_seqs", "q_len"), [(3, 1), (3, 2), (65, 1)])
def test_output(packages, num_seqs, q_len):
    """Cut into segments, and, where sequences are many, not."""
    lens = (64, 150, 3, *(5,) * num_seqs)[:num_seqs]
    case = cases.DecodeCase(lens, 4, 2, 16, 16, q_len=q_len, spare_pages=0)
    workload = PagedAttention(pallas_attn, True)
    inputs = workload.inputs(case)
    [call] = jax_triton.variants(case).values()
    out, _ = jax.jit(call)(inputs.query, inputs.caches, inputs.tables[-1], inputs.lengths, None)
    assert reference.worst_error([out], workload.compile_expected(case)(inputs)[1:]) < 5e-3


def test_the_newer_name_of_its_argument(packages, monkeypatch):
    def newer(*arrays, kernel, grid, out_type, **constants):
        return triton_call(*arrays, kernel=kernel, grid=grid, out_shape=out_type, **constants)

    monkeypatch.setattr(packages, "triton_call", newer)
    test_output(packages, 3, 1)


def test_why_it_cannot_run(packages, monkeypatch):
    monkeypatch.setattr(jax_triton, "_release", lambda: "0.4.1")
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    assert jax_triton.available() == (
        "jax-triton 0.4.1 does not work with jax 0.12.0.1: its calls raise a TypeError"
    )
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    assert jax_triton.available() == "needs an NVIDIA GPU, JAX computes on the cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert jax_triton.available() is None
    monkeypatch.setattr(jax_triton, "_release", lambda: "0.4.2")
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    assert jax_triton.available() is None, "a later release is given the chance"
    monkeypatch.delitem(sys.modules, "jax_triton")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert "'jax_triton'" in (jax_triton.available() or "")
    assert "bf16 and fp16 caches" in baselines.load("jax_triton").supports(
        cases.served(1, 64, 4, 2, 16, 16, cache_dtype="int8")
    )


@pytest.mark.parametrize("folder", [None, "mine"])
def test_its_import_leaves_tritons_cache_to_others(packages, folder, tmp_path, monkeypatch):
    """Without that, what torch launches of Triton in the same process is not compiled."""
    (tmp_path / "jax_triton.py").write_text(f'import os\nos.environ["{jax_triton.CACHE}"] = ""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton")
    monkeypatch.delenv(jax_triton.CACHE, raising=False)
    if folder:
        monkeypatch.setenv(jax_triton.CACHE, folder)
    monkeypatch.setattr(jax_triton, "_release", lambda: "0.3.1")
    jax_triton.available()
    assert "jax_triton" in sys.modules
    assert os.environ.get(jax_triton.CACHE) == folder
