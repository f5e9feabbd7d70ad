"""Finding the CUDA library, and what a call of it looks like to XLA. No GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn._tile.layout import PoolShape
from pallas_attn.ops.mla_decode import cuda


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "_load", ffi._load.__wrapped__)
    monkeypatch.setattr(ffi, "register", ffi.register.__wrapped__)


@pytest.mark.usefixtures("fresh")
def test_says_why_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PALLAS_ATTN_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(ffi, "_directories", lambda: [tmp_path])
    assert ffi.is_available() == (False, "this build of pallas_attn has no CUDA library (it was not built)")
    (tmp_path / "no_cuda_library.txt").write_text("no nvcc\n")
    assert ffi.is_available() == (False, "this build of pallas_attn has no CUDA library (no nvcc)")
    with pytest.raises(RuntimeError, match="cannot be used: this build of pallas_attn has no CUDA library"):
        ffi.register()
    assert pallas_attn.register_ffi_targets.__wrapped__ is ffi.register


@pytest.mark.usefixtures("fresh")
def test_says_why_a_library_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libpallas_attn_cuda.so"
    broken.write_text("not a library")
    monkeypatch.setenv("PALLAS_ATTN_CUDA_LIBRARY", str(broken))
    available, reason = ffi.is_available()
    assert not available
    assert "libpallas_attn_cuda.so does not load" in reason
    monkeypatch.setenv("PALLAS_ATTN_CUDA_LIBRARY", str(tmp_path / "absent.so"))
    assert "does not exist" in ffi.is_available()[1]


def _struct(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _arguments(b: int = 2, q_len: int = 1, h: int = 16, h_kv: int = 1) -> list[jax.ShapeDtypeStruct]:
    query = _struct(b, q_len, h, 576, dtype=jnp.bfloat16)
    cache = _struct(10, 64, h_kv, 576, dtype=jnp.bfloat16)
    return [query, cache, _struct(b, 8), _struct(b), _struct(132, 8), _struct(b + 1)]


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "register", lambda: None)


@pytest.mark.usefixtures("unregistered")
def test_lowers_to_one_call_with_python_names() -> None:
    def call(*arguments):
        return cuda.mla_decode_cuda(*arguments, scale=0.125, causal=True)

    text = jax.jit(call).trace(*_arguments(q_len=2)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @pallas_attn_mla_decode_sm90") == 1
    assert "causal = true, scale = 1.250000e-01 : f32" in text
    out, lse = jax.eval_shape(call, *_arguments(q_len=2))
    assert (out.shape, out.dtype) == ((2, 2, 16, 512), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 16, 2), jnp.float32)


@pytest.mark.usefixtures("unregistered")
def test_query_rows_of_a_kv_head_lie_together() -> None:
    call = jax.jit(lambda *arguments: cuda.mla_decode_cuda(*arguments, scale=0.125, causal=True))
    traced = call.trace(*_arguments(q_len=3, h_kv=4))
    (line,) = [
        line
        for line in traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
        if "@pallas" in line
    ]
    assert "(tensor<2x4x3x4x576xbf16>, tensor<10x64x4x576xbf16>" in line
    assert "-> (tensor<2x4x3x4x512xbf16>, tensor<2x16x3xf32>" in line
    assert [out.shape for out in traced.out_info] == [(2, 3, 16, 512), (2, 16, 3)]


@pytest.mark.usefixtures("unregistered")
def test_schedule_lowers() -> None:
    text = (
        jax.jit(lambda lens: cuda.mla_schedule_cuda(lens, 132))
        .trace(_struct(7))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "custom_call @pallas_attn_mla_schedule_sm90" in text
    assert "overhead_blocks = 5 : i64" in text


@pytest.mark.usefixtures("unregistered")
def test_exports_and_comes_back() -> None:
    call = jax.jit(lambda *arguments: cuda.mla_decode_cuda(*arguments, scale=0.125, causal=False))
    known = export.DisabledSafetyCheck.custom_call("pallas_attn_mla_decode_sm90")
    exported = export.export(call, platforms=["cuda"], disabled_checks=[known])(*_arguments())
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert [aval.shape for aval in again.out_avals] == [(2, 1, 16, 512), (2, 16, 1)]


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("axis", ["heads", "requests"])
def test_lowers_inside_shard_map(axis: str) -> None:
    """Each device gets its own heads or requests, and its own schedule; the cache is everybody's."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("x"), PartitionSpec()
    heads, by_head = PartitionSpec(None, None, "x"), PartitionSpec(None, "x")
    if axis == "heads":
        specs, out_specs, local = (
            (heads, whole, whole, whole, whole, whole),
            (heads, by_head),
            "2x1x1x8x576xbf16",
        )
    else:
        specs, out_specs, local = (
            (split, whole, split, split, split, split),
            (split, split),
            "2x1x1x16x576xbf16",
        )
    call = jax.shard_map(
        lambda *arguments: cuda.mla_decode_cuda(*arguments, scale=0.125, causal=False),
        mesh=mesh,
        in_specs=specs,
        out_specs=out_specs,
        check_vma=False,
    )
    arguments = _arguments()
    if axis == "requests":
        query, cache, tables, lengths, metadata, splits = _arguments(b=4)
        # Two schedules of two requests each, one after the other.
        metadata, splits = _struct(264, 8), _struct(6)
        arguments = [query, cache, tables, lengths, metadata, splits]
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "@pallas_attn_mla_decode_sm90" in line]
    assert f"(tensor<{local}>" in line


@pytest.mark.usefixtures("unregistered")
def test_vmap_is_a_loop_of_calls() -> None:
    query, *rest = _arguments()
    queries = _struct(3, *query.shape, dtype=query.dtype)

    def calls(queries, *rest):
        return jax.vmap(lambda q: cuda.mla_decode_cuda(q, *rest, scale=1.0, causal=False))(queries)

    text = jax.jit(calls).trace(queries, *rest).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@pallas_attn_mla_decode_sm90") == 1
    assert "stablehlo.while" in text
    out, _ = jax.eval_shape(calls, queries, *rest)
    assert out.shape == (*queries.shape[:-1], 512)


@pytest.mark.parametrize(
    ("dtype", "page_size", "num_kv_heads", "reason"),
    [
        (jnp.bfloat16, 64, 1, None),
        (jnp.float16, 64, 1, None),
        (jnp.float32, 64, 1, "needs bfloat16 or float16, got float32"),
        (jnp.bfloat16, 16, 1, "needs pages of 64 tokens, got 16"),
        (jnp.bfloat16, 64, 2, None),
    ],
)
def test_unsupported(dtype, page_size: int, num_kv_heads: int, reason: str | None) -> None:
    assert cuda.unsupported(dtype, PoolShape(10, page_size, num_kv_heads, 576)) == reason
