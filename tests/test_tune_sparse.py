"""`pallas-attn tune` for sparse MLA, whose lists of ids are what others' sequences are."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_attn._call import configs
from pallas_attn._call.device import Device, current_device
from pallas_attn.cli import main
from pallas_attn.ops.sparse_mla import config
from pallas_attn.ops.sparse_mla.api import DECODE
from pallas_attn.ops.sparse_mla.operands import Ids, Operands
from pallas_attn.tuning import errors, points, timing
from pallas_attn.tuning.sparse_mla import SparseMLAPoint

FP8 = "float8_e4m3fn"


@pytest.mark.parametrize("num_heads", [8, 128])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_candidates_are_distinct_and_begin_with_the_heuristic(num_heads, cache_dtype, monkeypatch):
    monkeypatch.setattr(config, "current_device", lambda: Device("gpu", "one", 132, 90))
    sizes = dict(SparseMLAPoint.sizes, num_heads=num_heads, cache_dtype=cache_dtype)
    [point] = SparseMLAPoint.variants(2, 2048, **sizes)
    found = [point.config(**fields) for fields in point.candidates()]
    assert found[0] == point.config()
    assert len(set(found)) == len(found) > 3
    assert point.read_bytes == 2 * 2048 * (656 if cache_dtype else 1152)


@pytest.mark.slow
@pytest.mark.once
def test_a_call_takes_what_was_measured_for_its_kind_of_latents(tmp_path, monkeypatch):
    for module, name in ((timing, "MOST_SETS"), (timing, "QUEUED"), (points, "REPEATS")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(timing, "LEAST_CALLS", 2)
    monkeypatch.setattr(SparseMLAPoint, "candidates", lambda self: [{"block_kv": 16, "num_stages": 7}])
    sizes = ["--num-heads", "2", "--num-seqs", "2", "--max-len", "48", "--cache-dtype", FP8]
    command = ["tune", "--op", "sparse_mla_decode", *sizes, "--implementation", "interpret"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    path = tmp_path / current_device().slug / "sparse_mla_decode.json"
    [found] = json.loads(path.read_text())["entries"]
    assert found["key"] == {"dtype": "uint8", "rows": [1, 16], "streams": [1, 8], "max_len": [12, 192]}
    assert 0 < found["measured"]["error"] < errors.LARGEST_ERROR["bfloat16"]
    monkeypatch.setenv(configs.CONFIGS_VARIABLE, str(tmp_path))

    def stages(cache_dtype) -> int:
        struct = jax.ShapeDtypeStruct
        operands = Operands(
            query=struct((2, 3, 576), jnp.bfloat16),
            latent_cache=struct((64, 656), cache_dtype),
            indices=struct((2, 40), jnp.int32),
            ids=Ids(),
            scale=1.0,
            max_logits=False,
        )
        return DECODE.tiles(operands).num_stages

    assert stages(jnp.uint8) == 7
    assert stages(jnp.bfloat16) != 7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--cache-dtype", "int8"], "argument '--cache-dtype': expected float8_e4m3fn, of latents, got int8"),
        (
            ["--cache-dtype", "float8_e4m3fn", "--dtype", "float16"],
            "argument '--dtype': expected bfloat16 with --cache-dtype, got float16",
        ),
    ],
)
def test_latents_that_there_are_not_are_refused(options, named, capsys):
    assert main(["tune", "--op", "sparse_mla_decode", *options, "--implementation", "interpret"]) == 1
    assert named in capsys.readouterr().err
