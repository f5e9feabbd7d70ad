"""fp8 latents: the bytes, their error, writing them in place, and the cache that holds them."""

import functools
import re
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from references.latents_torch import dequantized
from support import COMPILED, ON_GPU, unchecked

import pallas_attn
from pallas_attn.ops.latent_cache.kernel import _e4m3_bits
from pallas_attn.testing import cases

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]
SCALES = ["exact", "power_of_two"]


def some_latents(*lead: int, dtype="bfloat16", seed: int = 0) -> np.ndarray:
    """Groups of very different magnitude, some of zeros, in tokens of which no two are alike."""
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((*lead, 576)) * np.exp2(
        rng.integers(-20, 12, (*lead, 576 // 64)).repeat(64, -1)
    )
    latents.reshape(-1, 576)[0, 128:256] = 0
    return np.asarray(latents.astype(np.float32), jnp.dtype(dtype))


def scales_of(tokens) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(tokens)[..., 512:528]).view("<f4")


@pytest.mark.once
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_error_is_what_is_promised(dtype, scales):
    """At most 1/16 of an element, or 2**-10 of the scale, which is at most a 224th of the largest magnitude."""
    latents = some_latents(40, dtype=dtype)
    tokens = pallas_attn.quantize_latents(jnp.asarray(latents), scales=scales)
    assert (tokens.shape, tokens.dtype) == ((40, 656), jnp.uint8)
    back, exact = dequantized(np.asarray(tokens)).numpy(), latents.astype(np.float64)
    scale = scales_of(tokens).astype(np.float64)
    peak = np.abs(exact[:, :512]).reshape(40, 4, 128).max(-1)
    assert (scale[peak > 0] <= peak[peak > 0] / (448 if scales == "exact" else 224) * (1 + 2**-22)).all()
    assert (scale >= peak / 448 * (1 - 2**-22)).all()
    if scales == "power_of_two":
        assert (np.frexp(scale)[0] == 0.5).all()
    error = np.abs(back - exact)[:, :512]
    bound = np.maximum(np.abs(exact[:, :512]) / 16, scale.repeat(128, -1) * 2**-10)
    assert (error <= bound * (1 + 2**-20)).all()
    assert error.max() > 0.5 * bound[error == error.max()].max(), (
        "the bound is of another size than the error"
    )
    np.testing.assert_array_equal(
        back[:, 512:], np.asarray(latents[:, 512:], jnp.bfloat16).astype(np.float64)
    )


@pytest.mark.once
@pytest.mark.parametrize("scales", SCALES)
def test_converters_agree_with_the_second_hand(scales):
    tokens = pallas_attn.quantize_latents(jnp.asarray(some_latents(2, 8, 1)), scales=scales)
    back = pallas_attn.dequantize_latents(tokens, dtype=jnp.float32)
    np.testing.assert_allclose(back, dequantized(np.asarray(tokens)).numpy(), rtol=2**-23)
    bf16 = np.asarray(pallas_attn.dequantize_latents(tokens)).astype(np.float32)
    if scales == "power_of_two":
        np.testing.assert_array_equal(bf16, back)
    # What was read back is stored again as the same bytes: no drift.
    again = pallas_attn.quantize_latents(back, scales=scales)
    np.testing.assert_allclose(pallas_attn.dequantize_latents(again, dtype=jnp.float32), back, rtol=2**-21)


@pytest.mark.once
def test_every_byte_reads_as_the_second_hand_reads_it():
    tokens = np.zeros((2, 656), np.uint8)
    tokens[:, :512] = np.arange(1024).reshape(2, 512) % 256
    tokens[:, 512:528].view("<f4")[:] = [1.0, 0.3, 2.0**-30, 7e8]
    ours = pallas_attn.dequantize_latents(jnp.asarray(tokens), dtype=jnp.float32)
    np.testing.assert_allclose(ours, dequantized(tokens).numpy(), rtol=2**-23)
    assert np.isnan(np.asarray(ours)).sum() == 8


def test_conversion_to_e4m3_by_bits():
    """Every e4m3 number, every middle between two, and what lies just beside: as the dtype's own cast."""
    numbers = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        [numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), [1e9, np.inf]]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    expected = np.asarray(np.clip(values, -448, 448), jnp.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(_e4m3_bits(jnp.asarray(values)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "scales"), [("float8", "exact"), ("float8", "power_of_two"), ("bfloat16", "exact")]
)
def test_write(dtype, scales, implementation):
    """In place, and nowhere else: every other byte stays as it was."""
    latents = jnp.asarray(some_latents(6, dtype="float32"))
    rng = np.random.default_rng(1)
    if dtype == "float8":
        pool = rng.integers(0, 256, (3, 4, 1, 656)).astype(np.uint8)
        new = np.asarray(pallas_attn.quantize_latents(latents, scales=scales))
    else:
        pool = rng.standard_normal((3, 4, 1, 576)).astype(jnp.bfloat16)
        new = np.asarray(latents.astype(jnp.bfloat16))
    slots = np.array([5, -1, 0, 11, 12, -(2**31)], np.int32)
    write = jax.jit(
        functools.partial(pallas_attn.write_latents, scales=scales, implementation=implementation)
    )
    updated = np.asarray(write(latents, jnp.asarray(pool), jnp.asarray(slots)))
    expected = pool.reshape(12, -1).copy()
    expected[[5, 0, 11]] = new[[0, 2, 3]]
    # A GPU's division may be off by a bit.
    if implementation in COMPILED and dtype == "float8" and scales == "exact":
        differs = updated.reshape(12, -1) != expected
        assert differs.mean() < 1e-3
        np.testing.assert_allclose(
            dequantized(updated).numpy().reshape(12, -1), dequantized(expected).numpy(), rtol=0.13
        )
    else:
        assert updated.tobytes() == expected.tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("value", "scales"), [(np.nan, "exact"), (-np.inf, "power_of_two")])
def test_what_is_not_finite_stays_so(value, scales, implementation):
    latents = some_latents(2, dtype="float32")
    latents[1, 200] = value
    pool = pallas_attn.write_latents(
        jnp.asarray(latents),
        jnp.zeros((1, 2, 1, 656), jnp.uint8),
        jnp.arange(2, dtype=jnp.int32),
        scales=scales,
        implementation=implementation,
    )
    back = np.asarray(pallas_attn.dequantize_latents(pool)).astype(np.float32)[0, :, 0]
    assert np.isnan(back[1, 128:256]).all()
    assert np.isfinite(back[0]).all()
    assert np.isfinite(back[1, :128]).all()
    assert np.isfinite(back[1, 256:]).all()


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_the_cache_writes_layers_and_is_read_by_mla_decode(implementation):
    tables = jnp.array([[2, 0], [1, -1]], jnp.int32)
    cache = pallas_attn.PagedLatentCache.create(
        num_layers=2, num_pages=3, page_size=8, block_tables=tables, dtype=jnp.float8_e4m3fn, scales="exact"
    )
    assert (cache.latent_cache.shape, cache.latent_cache.dtype) == ((6, 8, 1, 656), jnp.uint8)
    latents = jnp.asarray(some_latents(2, 10))
    positions = jnp.stack([jnp.arange(10), jnp.arange(10) - 4]).astype(jnp.int32)
    write = jax.jit(functools.partial(type(cache).write, implementation=implementation))
    cache = write(cache, 1, latents, positions)
    assert (np.asarray(cache.latent_cache[:3]) == 0).all()
    tokens = np.asarray(pallas_attn.quantize_latents(latents, scales="exact"))
    pool = np.asarray(cache.latent_cache[3:, :, 0])
    np.testing.assert_array_equal(np.concatenate([pool[2], pool[0, :2]]), tokens[0])
    np.testing.assert_array_equal(pool[1, :6], tokens[1, 4:])

    plain = pallas_attn.PagedLatentCache.create(
        num_layers=2, num_pages=3, page_size=8, block_tables=tables, dtype="float32"
    )
    plain = plain.write(1, pallas_attn.dequantize_latents(jnp.asarray(tokens), dtype="float32"), positions)
    query = jnp.asarray(some_latents(2, 1, 3, dtype="bfloat16", seed=3) * np.asarray(2.0**-9, jnp.bfloat16))
    lens = jnp.array([10, 6], jnp.int32)
    out: Any = pallas_attn.mla_decode(
        query, cache.latent_cache, cache.layer_tables(1), lens, implementation=implementation
    )
    expected: Any = pallas_attn.mla_decode(
        query.astype(jnp.float32), plain.latent_cache, plain.layer_tables(1), lens, implementation="xla"
    )
    error = np.linalg.norm(np.float32(out) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() < 4e-3


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", jnp.float8_e4m3fn, np.dtype(jnp.float8_e4m3fn)])
def test_fp8_latents_by_any_name_of_the_dtype(dtype):
    tables = jnp.zeros((1, 1), jnp.int32)
    cache = pallas_attn.PagedLatentCache.create(
        num_layers=1, num_pages=1, page_size=2, block_tables=tables, dtype=dtype, index_dim=8
    )
    assert (cache.latent_cache.shape, cache.latent_cache.dtype) == ((1, 2, 1, 656), jnp.uint8)
    assert cache.index_keys.dtype == jnp.bfloat16


def test_writing_is_in_place():
    """The kernel's output is its input, and nothing else in the module touches the pool."""
    shape = jax.ShapeDtypeStruct
    lowered = lowering.lower_for_gpu(
        functools.partial(pallas_attn.write_latents, implementation="pallas"),
        shape((4, 576), jnp.bfloat16),
        shape((9000, 64, 1, 656), jnp.uint8),
        shape((4,), jnp.int32),
    )
    [call] = [line for line in lowered.as_text().splitlines() if "custom_call" in line]
    assert re.search(r"output_tuple_indices = \[0?\],\s*operand_index = 0", call), call
    for line in lowered.as_text().splitlines():
        if "9000x64x1x656" in line:
            assert any(word in line for word in ("custom_call", "call @", "func.func", "return")), line


@pytest.mark.parametrize(("num_pages", "bits"), [(9000, 32), (61 * 16384, 64)])
def test_bytes_beyond_int32_are_addressed(num_pages, bits):
    """61 layers of a million tokens are 42 GB."""
    shape = jax.ShapeDtypeStruct
    lowered = lowering.lower_for_gpu(
        functools.partial(pallas_attn.write_latents, implementation="pallas"),
        shape((4, 576), jnp.bfloat16),
        shape((num_pages, 64, 1, 656), jnp.uint8),
        shape((4,), jnp.int32),
    )
    [(_, kernel, _, _)] = lowering.triton_kernels(lowered)
    assert ("i64" in lowering.triton_text(kernel)) == (bits == 64)


def test_numpy_arrays_and_no_tokens_will_do():
    pool = np.zeros((1, 2, 1, 656), np.uint8)
    latents, slots = some_latents(1, dtype="float32"), np.zeros(1, np.int32)
    updated = unchecked(pallas_attn.write_latents)(latents, pool, slots, implementation="xla")
    assert np.asarray(updated).any()
    same = unchecked(pallas_attn.write_latents)(latents[:0], pool, slots[:0])
    assert not np.asarray(same).any()


@pytest.mark.parametrize("lead", [(0,), (3, 0, 1)])
def test_no_tokens_are_converted_to_none(lead):
    tokens = pallas_attn.quantize_latents(jnp.zeros((*lead, 576)))
    assert (tokens.shape, tokens.dtype) == ((*lead, 656), jnp.uint8)
    assert pallas_attn.dequantize_latents(tokens).shape == (*lead, 576)


ERRORS = {
    "latents: expected shape .num_tokens, 576., got .1, 512.": dict(latents=jnp.zeros((1, 512))),
    "latents: expected dtype bfloat16 or float16 or float32, got int8": dict(
        latents=jnp.zeros((1, 576), jnp.int8)
    ),
    "latent_cache: expected shape .num_pages, page_size, 1, 656., got .1, 2, 1, 576.": dict(
        latent_cache=jnp.zeros((1, 2, 1, 576), jnp.uint8)
    ),
    "latent_cache: expected shape .num_pages, page_size, 1, 576., got .1, 2, 1, 656.": dict(
        latent_cache=jnp.zeros((1, 2, 1, 656), jnp.float32)
    ),
    "latent_cache: expected no empty dimension": dict(latent_cache=jnp.zeros((0, 2, 1, 656), jnp.uint8)),
    "slot_mapping: expected shape .num_tokens=1": dict(slot_mapping=jnp.zeros(2, jnp.int32)),
    "scales: expected one of 'exact', 'power_of_two', got 'pow2'": dict(scales="pow2"),
}


@pytest.mark.once
@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    right = dict(
        latents=jnp.zeros((1, 576)),
        latent_cache=jnp.zeros((1, 2, 1, 656), jnp.uint8),
        slot_mapping=jnp.zeros(1, jnp.int32),
    )
    name, _, rest = message.partition(":")
    with pytest.raises((TypeError, ValueError), match=f"^write_latents: argument '{name}':{rest}"):
        unchecked(pallas_attn.write_latents)(**(right | ERRORS[message]))


@pytest.mark.once
def test_errors_of_the_converters():
    with pytest.raises(
        ValueError, match=r"quantize_latents: argument 'latents': expected shape \[dim0, 576\]"
    ):
        pallas_attn.quantize_latents(jnp.zeros((3, 656)))
    with pytest.raises(
        TypeError, match="dequantize_latents: argument 'tokens': expected dtype uint8, got float32"
    ):
        pallas_attn.dequantize_latents(jnp.zeros((3, 656)))
    with pytest.raises(ValueError, match="dequantize_latents: argument 'dtype': expected one of"):
        pallas_attn.dequantize_latents(jnp.zeros((3, 656), jnp.uint8), dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"PagedLatentCache.create: argument 'scales': expected one of"):
        unchecked(pallas_attn.PagedLatentCache.create.__func__)(
            pallas_attn.PagedLatentCache,
            num_layers=1,
            num_pages=1,
            page_size=1,
            scales="none",
            block_tables=jnp.zeros((1, 1), jnp.int32),
        )


@pytest.mark.once
def test_inputs_of_fp8_cases_have_the_shapes_that_are_told():
    case = cases.MLADecodeCase((20, 0, 3), 2, page_size=16, cache_dtype="float8_e4m3fn")
    made = inputs.make(case)
    assert [(a.shape, a.dtype) for a in made.arguments()] == [(s.shape, s.dtype) for s in inputs.shapes(case)]
    poisoned = np.isnan(dequantized(made.latent_cache).numpy()).all(axis=-1)
    assert poisoned.sum() == poisoned.size - 23
    assert not poisoned[inputs.token_places(made.block_tables[0], 20, 16)].any()
