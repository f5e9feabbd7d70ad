"""`pallas-attn tune` for ops without block tables, whose kernels are measured one by one."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import SparseLayout, flash_attention
from pallas_attn._call import configs
from pallas_attn._call.device import Device, current_device
from pallas_attn._tile.band import Band
from pallas_attn._tile.masking import Rules
from pallas_attn.cli import main, tune
from pallas_attn.ops.blocksparse_attention import api as blocksparse_api
from pallas_attn.ops.flash_attention import api as flash_api
from pallas_attn.tuning import errors, points, timing
from pallas_attn.tuning.registry import OPS

TINY = ["--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16", "--num-seqs", "2", "--max-len", "16"]
KERNELS = {
    "flash_attention": ["forward", "key_value", "query"],
    "blocksparse_attention": ["decode", "dkv", "dq", "prefill"],
}


@pytest.mark.once
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_candidates_differ_in_the_kernel_that_is_measured(op, head_dim, monkeypatch):
    for module in (flash_api.tiles, blocksparse_api.tiles):
        monkeypatch.setattr(module, "current_device", lambda: Device("gpu", "one", 132, 90))
    kind = OPS[op]
    for point in kind.variants(2, 1024, **{**kind.sizes, "head_dim": head_dim}):
        found = [point.config(**fields) for fields in point.candidates()]
        assert found[0] == point.config()
        assert len(set(found)) == len(found) > 2
        for fields, config in zip(point.candidates(), found, strict=True):
            kept = point.chosen(fields)
            assert point.tiles(fields) == point.tiles(point.candidates()[found.index(config)])
            assert set(kept) <= set(vars(config))


@pytest.fixture
def few(monkeypatch):
    """Two calls, one candidate."""
    for module, name in ((timing, "MOST_SETS"), (timing, "QUEUED"), (points, "REPEATS")):
        monkeypatch.setattr(module, name, 1)
    for name in KERNELS:
        monkeypatch.setattr(OPS[name], "candidates", lambda self: [{}])


@pytest.mark.parametrize("op", KERNELS)
def test_each_kernel_has_an_entry(op, few, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tune, "measure", lambda point, choices, _: [points.Timing(choices[0], 3.0, 1e-3, None)]
    )
    assert main(["tune", "--op", op, *TINY, "--implementation", "interpret", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / current_device().slug / f"{op}.json").read_text())["entries"]
    assert sorted({entry["key"]["kernel"] for entry in found}) == KERNELS[op]
    assert all(entry["config"] for entry in found)


@pytest.mark.once
@pytest.mark.parametrize("limit", ["LARGEST_ERROR", "LARGEST_GRADIENT_ERROR"])
@pytest.mark.control
def test_a_wrong_result_does_not_count(limit, few, monkeypatch):
    monkeypatch.setitem(getattr(errors, limit), "bfloat16", 1e-9)
    kind = OPS["flash_attention"]
    sizes = dict(kind.sizes, num_heads=2, num_kv_heads=1, head_dim=16)
    forward, query, _ = kind.variants(1, 16, **sizes)
    point = forward if limit == "LARGEST_ERROR" else query
    [found] = points.measure(point, [{}], "interpret")
    assert found.error > 1e-4, "rounding of bf16"
    assert found.problem is not None
    assert "wrong: error" in found.problem


@pytest.mark.once
@pytest.mark.slow
def test_gradients_over_random_layouts_are_measured(few):
    [*_, point, _] = OPS["blocksparse_attention"].variants(
        1, 48, num_heads=2, num_kv_heads=1, head_dim=16, dtype="float32"
    )
    assert point.kind == "dq, blocks of 128"
    [found] = points.measure(point, [{}], "interpret")
    assert found.problem is None
    assert 0 < found.error < errors.LARGEST_GRADIENT_ERROR["float32"]


def measured(folder, op: str, kernel: str, config: dict, **key) -> None:
    key = {"kernel": kernel, "head_dim": 16, "dtype": "bfloat16"} | key
    configs.save(folder / current_device().slug / f"{op}.json", [{"key": key, "config": config}])


def test_flash_attention_takes_each_kernels_own_entry(tmp_path, monkeypatch):
    sizes = {"block_q": 32, "block_kv": 16, "num_warps": 2, "num_stages": 1}
    measured(
        tmp_path, "flash_attention", "query", {"query": sizes}, max_len=[1, 40], streams=[2, 2], rows=[1, 80]
    )
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))

    def config(tokens: int):
        query = jnp.zeros((1, tokens, 2, 2, 16), jnp.bfloat16)
        key = jnp.zeros((1, tokens, 2, 16), jnp.bfloat16)
        rules = flash_api.Rules("BTNH", 0.25, None, Band(None, 0, 0))
        return flash_api.OP.tiles(flash_api.Operands(query=query, key=key, value=key, rules=rules))

    near, far = config(40), config(41)
    assert near.query == flash_api.tiles.FlashAttentionTiles(**sizes) != far.query
    assert (near.forward, near.key_value) == (far.forward, far.key_value)


def test_blocksparse_attention_takes_each_kernels_own_entry(tmp_path, monkeypatch):
    sizes = {"dq_block_q": 16, "dq_block_kv": 16, "dq_warps": 2, "dq_stages": 1}
    key = dict(block_size=32, q_block_size=32, max_len=[64, 64])
    measured(tmp_path, "blocksparse_attention", "dq", sizes, **key)
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    struct = jax.ShapeDtypeStruct

    def config(nnz: int):
        query, ends = struct((64, 2, 16), jnp.bfloat16), struct((2,), jnp.int32)
        layout = SparseLayout(struct((1, 5), jnp.int32), struct((1, nnz), jnp.int32), 32, 32)
        kind = dict(layout=layout, cache_layout=None, kinds="prefill", scale=1.0, rules=Rules())
        given = blocksparse_api.Operands(query=query, key=query, value=query, cu_k_lens=ends, **kind)
        return blocksparse_api.OP.tiles(given)

    near, far = config(8), config(12)
    assert {name: getattr(near, name) for name in sizes} == sizes
    assert far.dq_warps != 2
    assert near.num_warps == far.num_warps


def test_options_without_a_page_are_refused(capsys):
    assert (
        main(["tune", "--op", "flash_attention", "--page-size", "16", "--implementation", "interpret"]) == 1
    )
    assert "'--page-size': expected none with --op flash_attention, got 16" in capsys.readouterr().err


def test_flash_attention_is_served_by_what_was_measured(tmp_path, monkeypatch):
    """And is as right."""
    tiles = {"block_q": 16, "block_kv": 16, "num_warps": 2, "num_stages": 1}
    measured(tmp_path, "flash_attention", "forward", {"forward": tiles})
    query = jax.random.normal(jax.random.key(0), (1, 33, 2, 16), jnp.bfloat16)
    plain: Any = flash_attention(query, query, query, causal=True)
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))
    found: Any = flash_attention(query, query, query, causal=True, implementation="interpret")
    assert jnp.max(jnp.abs((found - plain).astype(jnp.float32))) < 0.02
