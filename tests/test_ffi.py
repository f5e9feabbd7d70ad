"""Finding the CUDA library, and what a call of it looks like to XLA. No GPU."""

import ctypes.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec
from lowering import lower_for_gpu

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn._call.pools import PoolShape
from pallas_attn.ops.mla_decode import cuda
from pallas_attn.ops.mla_decode.schedule_cuda import mla_schedule_cuda

ROOT = Path(__file__).parent.parent


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


@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.util.find_library("c")
    monkeypatch.setattr(ffi.Path, "exists", lambda path: str(path) == libc)
    monkeypatch.setenv("PALLAS_ATTN_CUDA_LIBRARY", str(libc))
    assert ffi.is_available() == (
        False,
        f"{libc} lacks pallas_attn_ffi_targets and pallas_attn_cuda_versions: it is from another version",
    )


@pytest.mark.parametrize(
    ("built_with", "driver", "reason"),
    [
        (13000, 0, "no NVIDIA driver was found"),
        (
            13010,
            12040,
            "the CUDA library was built with CUDA 13.1 and needs a driver for CUDA 13 (R580 or newer); this "
            "machine's is for CUDA 12.4",
        ),
        (
            12080,
            11080,
            "the CUDA library was built with CUDA 12.8 and needs a driver for CUDA 12 (R525 or newer); this "
            "machine's is for CUDA 11.8",
        ),
        (13010, 13000, None),  # minor versions run each other's programs
        (12080, 13000, None),
    ],
)
def test_is_available_asks_the_driver(
    monkeypatch: pytest.MonkeyPatch, built_with: int, driver: int, reason: str | None
) -> None:
    monkeypatch.setattr(ffi, "_load", lambda: (ctypes.CDLL(None), None))
    monkeypatch.setattr(ffi, "_versions", lambda _: (built_with, driver))
    assert ffi.is_available() == (reason is None, reason)


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
    assert "causal = true, cooperative = true, scale = 1.250000e-01 : f32" in text
    # Scratch: two slots for each of 132 parts.
    assert "tensor<264x32x512xf32>, tensor<264x32x2xf32>)" in text
    out, lse = jax.eval_shape(call, *_arguments(q_len=2))
    assert (out.shape, out.dtype) == ((2, 2, 16, 512), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 2, 16), jnp.float32)


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
    assert "-> (tensor<2x4x3x4x512xbf16>, tensor<2x3x16xf32>" in line
    assert [out.shape for out in traced.out_info] == [(2, 3, 16, 512), (2, 3, 16)]


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(("asked", "cooperates"), [(None, True), ("1", True), ("0", False)])
def test_cooperative_launches_can_be_declined(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, cooperates: bool
) -> None:
    if asked is None:
        monkeypatch.delenv("PALLAS_ATTN_COOPERATIVE", raising=False)
    else:
        monkeypatch.setenv("PALLAS_ATTN_COOPERATIVE", asked)

    def text(**keywords) -> str:
        def call(*arguments):
            return cuda.mla_decode_cuda(*arguments, scale=0.125, causal=True, **keywords)

        return jax.jit(call).trace(*_arguments()).lower(lowering_platforms=("cuda",)).as_text()

    assert f"cooperative = {str(cooperates).lower()}" in text()
    assert "cooperative = true" in text(cooperative=True)
    assert "cooperative = false" in text(cooperative=False)


@pytest.mark.usefixtures("unregistered")
def test_cooperative_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALLAS_ATTN_COOPERATIVE", "no")
    message = "mla_decode: environment variable 'PALLAS_ATTN_COOPERATIVE': expected '0' or '1', got 'no'"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *a: cuda.mla_decode_cuda(*a, scale=0.125, causal=True), *_arguments())


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(("overhead", "attribute"), [(7, 7), (None, 0)])
def test_schedule_lowers(overhead: int | None, attribute: int) -> None:
    text = (
        jax.jit(lambda lens: mla_schedule_cuda(lens, 132, overhead, 64))
        .trace(_struct(7))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "custom_call @pallas_attn_mla_schedule_sm90" in text
    assert f"overhead_blocks = {attribute} : i64, rows = 64 : i64" in text
    assert "-> (tensor<132x8xi32>, tensor<8xi32>)" in text


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("kind", "library", "num_seqs", "by_kernel"),
    [
        ("NVIDIA H100 80GB HBM3", True, 128, True),
        ("NVIDIA H100 80GB HBM3", True, 256, True),
        ("NVIDIA H100 80GB HBM3", True, 257, False),  # jnp is as fast from some 400 on
        ("NVIDIA H100 80GB HBM3", False, 128, False),
        ("NVIDIA B200", True, 128, False),
    ],
)
def test_schedules_are_made_by_the_kernel_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, library: bool, num_seqs: int, by_kernel: bool
) -> None:
    monkeypatch.setattr(ffi, "is_available", lambda: (library, None if library else "none"))

    def schedule(lens):
        return pallas_attn.mla_schedule(lens, num_heads=128, q_len=2)

    text = lower_for_gpu(schedule, _struct(num_seqs), device=(kind, 132)).as_text()
    assert text.count("custom_call @pallas_attn_mla_schedule_sm90") == int(by_kernel)
    if by_kernel:
        assert "overhead_blocks = 0 : i64, rows = 256 : i64" in text


@pytest.mark.usefixtures("unregistered")
def test_a_call_without_a_schedule_is_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "is_available", lambda: (True, None))
    query, cache, tables, lengths, *_ = _arguments()
    text = lower_for_gpu(
        lambda *a: pallas_attn.mla_decode(*a, implementation="cuda"), query, cache, tables, lengths
    ).as_text()
    assert text.count("custom_call @") == text.count("custom_call @pallas_attn") == 2
    assert not [word for word in ("stablehlo.sort", "stablehlo.reduce", "stablehlo.while") if word in text]


@pytest.mark.usefixtures("unregistered")
def test_exports_and_comes_back() -> None:
    call = jax.jit(lambda *arguments: cuda.mla_decode_cuda(*arguments, scale=0.125, causal=False))
    known = export.DisabledSafetyCheck.custom_call("pallas_attn_mla_decode_sm90")
    exported = export.export(call, platforms=["cuda"], disabled_checks=[known])(*_arguments())
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert [aval.shape for aval in again.out_avals] == [(2, 1, 16, 512), (2, 1, 16)]


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("axis", ["heads", "requests"])
def test_lowers_inside_shard_map(axis: str) -> None:
    """Each device gets its own heads or requests, and its own schedule; the cache is everybody's."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("x"), PartitionSpec()
    heads = PartitionSpec(None, None, "x")
    if axis == "heads":
        specs, out_specs, local = (
            (heads, whole, whole, whole, whole, whole),
            (heads, heads),
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
        (jnp.uint8, 64, 1, None),
        (jnp.float32, 64, 1, "needs bfloat16, float16 or uint8, got float32"),
        (jnp.bfloat16, 16, 1, "needs pages of 64 tokens, got 16"),
        (jnp.bfloat16, 64, 2, None),
    ],
)
def test_unsupported(dtype, page_size: int, num_kv_heads: int, reason: str | None) -> None:
    assert cuda.unsupported(dtype, PoolShape(10, page_size, num_kv_heads, 576)) == reason


def test_every_call_from_python_is_a_target() -> None:
    targets = re.findall(r"^PALLAS_ATTN_TARGET\((\w+)\)", (ROOT / "xla_ffi/targets.def").read_text(), re.M)
    sources = [path.read_text() for path in (ROOT / "pallas_attn").rglob("*.py")]
    called = {
        name for text in sources for name in re.findall(r'(?:ffi_call\(\s*|^TARGET = )"(\w+)"', text, re.M)
    }
    assert called == set(targets)
