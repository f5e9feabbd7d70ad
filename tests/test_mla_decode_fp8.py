"""`mla_decode` over fp8 latents: float64 torch reads the same bytes."""

import dataclasses
import functools
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import lowering
import numpy as np
import op_cases
import pytest
import test_mla_decode as plain
import test_mla_lowering as plain_lowering
import torch
from references.latents_torch import dequantized
from references.mla_decode_torch import mla_decode as reference
from support import COMPILED, ON_GPU, unchecked

import pallas_attn
from pallas_attn._call.device import Device
from pallas_attn._tile import latent_tile
from pallas_attn.testing import cases, compare

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU, CUDA]


def quantized(data: inputs.LatentInputs, scales: Any = "power_of_two") -> inputs.LatentInputs:
    """The same call over bytes; a token that is nobody's has bytes of 0xFF, NaN as e4m3, float32 and bf16."""
    tokens = np.array(pallas_attn.quantize_latents(jnp.asarray(data.latent_cache), scales=scales))
    tokens[np.isnan(data.latent_cache.astype(np.float32)).any(-1)] = 0xFF
    return data.copy(latent_cache=tokens)


def read(data: inputs.LatentInputs) -> inputs.LatentInputs:
    """What the reference takes: the latents rounded to bf16, as they are promised to be used."""
    return data.copy(latent_cache=dequantized(data.latent_cache).bfloat16().double().numpy())


def check(case: cases.MLADecodeCase, data: inputs.LatentInputs, out, lse) -> None:
    plain.check(case, read(data), out, lse)


def check_scales_that_round(case, data: inputs.LatentInputs, implementation: str, out, lse) -> None:
    """The CUDA kernel does not round latents to bf16: it is nearer to the latents themselves."""
    if implementation != "cuda":
        return check(case, data, out, lse)
    exact = data.copy(latent_cache=dequantized(data.latent_cache).numpy())
    expected, expected_lse = reference(exact, causal=case.causal)
    compare.assert_rows_close(out, expected, dtype=case.dtype, case_id=case.id)
    compare.assert_lse_close(lse, expected_lse, dtype=case.dtype, case_id=case.id)


def served_cases():
    for case in op_cases.of("mla_decode"):
        if case.dtype != "bfloat16":
            continue
        if case.fast:
            yield from (pytest.param(case, name, id=f"{case.id}-{name}") for name in ("xla", "interpret"))
        # Beside this tile in bf16 there is no room for one in bytes.
        if dict(case.config).get("block_kv") == 128:
            case = dataclasses.replace(case, config=(("block_kv", 128), ("num_stages", 1)))
        for name in (*COMPILED, *(["cuda"] if case.page_size == 64 else [])):
            yield pytest.param(case, name, id=f"{case.id}-{name}", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("case", "implementation"), list(served_cases()))
def test_matches_reference(case, implementation):
    data = quantized(inputs.make(case))
    out, lse = plain.run(case, data, implementation)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    check(case, data, out, lse)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_heads_and_exact_scales(implementation):
    """128 query rows in two blocks of 64, whose branch around the mask is another path; scales that round."""
    case = cases.MLADecodeCase((0, 1, 70, 130), 128, config=(("num_splits", 2), ("min_split_tokens", 64)))
    data = quantized(inputs.make(case), "exact")
    check_scales_that_round(case, data, implementation, *plain.run(case, data, implementation))


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_boundary_token_is_lost(implementation):
    case = cases.MLADecodeCase((400, 257), 4, num_parts=3)
    call, cut = plain.compiled(case, implementation), plain.split_end(case)
    for place in (0, 63, 64, cut - 1, cut, None):
        made = inputs.make(case)
        last = {seq: n - 1 for seq, n in enumerate(case.seq_lens)}
        inputs.plant_needles(
            case, made, {seq: end if place is None else min(place, end) for seq, end in last.items()}
        )
        data = quantized(made)
        check(case, data, *call(*data.arguments()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_pages_and_lengths_poison_only_their_rows(implementation):
    size = 64 if implementation == "cuda" else 16
    case = cases.MLADecodeCase((100,) * 5, 4, page_size=size, config=(("num_splits", 2),))
    data = quantized(inputs.make(case))
    data.block_tables[1, 99 // size] = -1
    data.block_tables[2, 0] = data.latent_cache.shape[0]
    data.seq_lens[3] = data.block_tables.shape[1] * case.page_size + 1
    out, lse = plain.run(case, data, implementation)
    expected, expected_lse = reference(read(inputs_of(data, [0, 4])), causal=False)
    compare.assert_rows_close(np.asarray(out)[[0, 4]], expected, dtype="bfloat16", case_id="good rows")
    compare.assert_lse_close(np.asarray(lse)[[0, 4]], expected_lse, dtype="bfloat16", case_id="good rows")
    assert np.isnan(np.float32(out[1:4])).all()
    assert np.isnan(lse[1:4]).all()


def inputs_of(data: inputs.LatentInputs, seqs: list[int]) -> inputs.LatentInputs:
    rows = {name: getattr(data, name)[seqs] for name in ("query", "block_tables", "seq_lens")}
    return data.copy(**rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "q_len", "num_parts"), [(16, 1, 5), (40, 2, 3), (128, 1, 7)])
def test_cuda_deals_many_sequences_over_few_parts(heads, q_len, num_parts):
    """Runs follow each other in one CTA, some without pages; the same bits each time."""
    lengths = [int(n) for n in np.random.default_rng(heads).integers(0, 500, 21)]
    case = cases.MLADecodeCase((*lengths, 0, 0, 130, 0), heads, q_len=q_len, causal=True, num_parts=num_parts)
    data = quantized(inputs.make(case), "exact")
    call = plain.compiled(case, "cuda")
    out, lse = call(*data.arguments())
    check_scales_that_round(case, data, "cuda", out, lse)
    for _ in range(10):
        again, _ = call(*data.arguments())
        np.testing.assert_array_equal(np.asarray(again), np.asarray(out))


@pytest.mark.once
@pytest.mark.parametrize("seed", range(3))
def test_random_cases(seed):
    rng = np.random.default_rng(seed)
    heads, q_len = int(rng.integers(1, 21)), int(rng.integers(1, 4))
    case = cases.MLADecodeCase(
        tuple(int(n) for n in rng.integers(0, 200, 4)),
        heads,
        q_len=q_len,
        causal=bool(rng.integers(2)),
        page_size=int(rng.choice([1, 16, 24, 64])),
        num_parts=[None, 3][seed % 2],
    )
    data = quantized(inputs.make(case, seed), ["exact", "power_of_two"][seed % 2])
    for implementation in ("xla", "interpret"):
        check(case, data, *plain.run(case, data, implementation))


@pytest.mark.once
def test_with_64_bit_types_enabled():
    case = cases.MLADecodeCase((0, 70), 4, page_size=16)
    data = quantized(inputs.make(case))
    with jax.enable_x64(True):
        out, lse = plain.run(case, data, "interpret")
    check(case, data, out, lse)


@pytest.mark.once
@pytest.mark.control
def test_faults_are_caught():
    """Scales left out, or of the wrong group, and every other way to misread the bytes."""
    case = cases.MLADecodeCase((130, 65), 4)
    made = inputs.make(case)
    made.latent_cache[..., :512] *= np.exp2(np.arange(4) - 2.0).repeat(128).astype(jnp.bfloat16)
    data = quantized(made)
    expected, _ = reference(read(data), causal=False)
    held = ~np.isnan(made.latent_cache.astype(np.float32)).any(-1)

    def misread(change) -> np.ndarray:
        tokens = data.latent_cache.copy()
        tokens[held] = change(tokens[held])
        return reference(read(data.copy(latent_cache=tokens)), causal=False)[0]

    def put(first: int, values: np.ndarray):
        def change(tokens: np.ndarray) -> np.ndarray:
            tokens[:, first : first + values.shape[-1]] = values
            return tokens

        return change

    def rolled(first: int, end: int, by: int):
        return lambda tokens: put(first, np.roll(tokens[:, first:end], by, -1))(tokens)

    faults = {
        "scales ignored": put(512, np.full(4, 2.0**-7, "<f4").view(np.uint8)),
        "scales of the next group": rolled(512, 528, 4),
        "scales backwards": lambda tokens: put(
            512, tokens[:, 512:528].reshape(-1, 4, 4)[..., ::-1].reshape(-1, 16)
        )(tokens),
        "groups swapped": rolled(0, 512, 128),
        "elements in another order": rolled(0, 512, 1),
        "rotary part ignored": put(528, np.zeros(128, np.uint8)),
        "rotary halves swapped": rolled(528, 656, 2),
        "signs ignored": lambda tokens: put(0, tokens[:, :512] & 0x7F)(tokens),
    }
    compare.assert_rows_close(expected, expected, dtype="bfloat16", case_id="right")
    for fault, change in faults.items():
        with pytest.raises(AssertionError):
            compare.assert_rows_close(misread(change), expected, dtype="bfloat16", case_id=fault)


def test_bytes_are_read_alike_with_and_without_hardware(monkeypatch):
    """All but NaN: before sm_89 those bytes are +-480."""
    tile = jnp.arange(256, dtype=jnp.uint8)[None, :]
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()[None, :]
    np.testing.assert_array_equal(latent_tile.values(tile), expected)
    monkeypatch.setattr(latent_tile, "current_device", lambda: Device("gpu", "NVIDIA A100", 108, 80))
    by_bits = np.asarray(latent_tile.values(tile))
    np.testing.assert_array_equal(by_bits[np.isfinite(expected)], expected[np.isfinite(expected)])
    assert (np.abs(by_bits[np.isnan(expected)]) == 480).all()


def lowered(num_heads: int, page_size: int, scheduled: bool, sm: int, num_pages: int = 9000):
    return plain_lowering.lowered_call(
        num_heads, 1, page_size, jnp.bfloat16, scheduled, sm=sm, num_pages=num_pages, cache_dtype=jnp.uint8
    )


@pytest.mark.parametrize(
    ("num_heads", "page_size", "scheduled", "sm"),
    [(16, 64, True, 90), (16, 16, False, 90), (32, 64, True, 90), (128, 64, True, 90), (16, 64, True, 80)],
)
def test_compiles(num_heads, page_size, scheduled, sm):
    kernels = lowering.compile_kernels(lowered(num_heads, page_size, scheduled, sm), sm)
    assert [k.name for k in kernels] == ["pallas_attn_mla_decode", "pallas_attn_mla_decode_combine"]
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[sm], kernel.name
        assert kernel.stack_bytes <= 512, f"{kernel.name} keeps {kernel.stack_bytes} bytes on the stack"
    assert "cp.async" in kernels[0].ptx, "loads are not pipelined"
    assert ("cvt.rn.f16x2.e4m3x2" in kernels[0].ptx) == (sm == 90), "not converted by the hardware"


def test_latents_are_converted_once_and_nothing_copies_the_pool():
    [attend, _] = lowering.compile_kernels(module := lowered(16, 64, True, 90), 90)
    # Two elements each; a tile of 64 tokens, or 32 where the heuristic takes those, in four warps or eight.
    assert attend.ptx.count("cvt.rn.f16x2.e4m3x2") in (64 * 256 // 128, 64 * 256 // 256, 32 * 256 // 128)
    for line in module.as_text().splitlines():
        if "9000x64x1x656" in line:
            assert any(word in line for word in ("custom_call", "call @", "func.func")), line


def test_pools_beyond_int32():
    """61 layers of a million tokens are addressed in 64 bits; what lowers wrongly is refused by name."""
    [(_, kernel, _, _), _] = lowering.triton_kernels(lowered(16, 64, True, 90, num_pages=61 * 16384))
    assert "i64" in lowering.triton_text(kernel)
    with pytest.raises(ValueError, match=r"cannot serve this call: 8-bit pools of 2\*\*31 to 2\*\*32"):
        lowered(16, 64, True, 90, num_pages=2**31 // (64 * 656) + 1)


@pytest.mark.once
@pytest.mark.parametrize(
    ("dtype", "width", "error", "message"),
    [
        ("float16", 656, TypeError, "expected dtype float16, got uint8"),
        (
            "bfloat16",
            576,
            ValueError,
            r"expected shape \[num_pages, page_size, num_kv_heads, 656\], got \[3, 8, 1, 576\]",
        ),
        ("bfloat16", 655, ValueError, r"expected shape .* 656\], got"),
    ],
)
def test_errors(dtype, width, error, message):
    arguments = (
        jnp.zeros((1, 1, 4, 576), dtype),
        jnp.zeros((3, 8, 1, width), jnp.uint8),
        jnp.zeros((1, 2), jnp.int32),
        jnp.ones(1, jnp.int32),
    )
    with pytest.raises(error, match=f"^mla_decode: argument 'latent_cache': {message}"):
        unchecked(pallas_attn.mla_decode)(*arguments)


@pytest.mark.once
def test_the_cuda_kernel_says_why_it_does_not_serve():
    with pytest.raises(ValueError, match="implementation 'cuda' cannot serve this call"):
        functools.partial(plain_lowering.lowered_call, implementation="cuda", cache_dtype=jnp.uint8)(
            16, 1, 64, jnp.bfloat16, True
        )
