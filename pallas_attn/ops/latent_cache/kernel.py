"""`write_latents` in Pallas: each program writes one token into its slot, in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._tile import triton
from pallas_attn._tile.latents import (
    BYTES,
    FP8,
    GROUP,
    LATENT_DIM,
    NUM_GROUPS,
    ROPE_AT,
    ROPE_DIM,
    SCALES_AT,
    Scales,
)
from pallas_attn._tile.quantization import largest
from pallas_attn.ops.latent_cache.format import group_scale
from pallas_attn.ops.latent_cache.operands import Operands


@functools.partial(jax.jit, static_argnames="lowering")
def write_latents_pallas(operands: Operands, *, lowering: triton.Lowering = "pallas") -> tuple[jax.Array]:
    latents, latent_cache = operands.latents, operands.latent_cache
    [updated] = triton.kernel_call(
        functools.partial(_write_kernel, scales=operands.scales),
        latent_cache,
        operands.slot_mapping,
        latents,
        name="pallas_attn_write_latents",
        grid=(latents.shape[0],),
        out_shape=[jax.ShapeDtypeStruct(latent_cache.shape, latent_cache.dtype)],
        input_output_aliases={0: 0},
        num_warps=1,
        num_stages=1,
        lowering=lowering,
    )
    return (updated,)


def _write_kernel(_cache_in, slots_ref, latents_ref, cache_ref, *, scales: Scales):
    num_pages, page_size, *_ = cache_ref.shape
    token = triton.program_id(0)
    slot = triton.load(slots_ref.at[token])
    usable = (slot >= 0) & (slot < num_pages * page_size)
    page, offset = slot // page_size, slot % page_size

    def store(first: int, values: jax.Array) -> None:
        """[rows, columns] contiguous elements from `first` of the token on."""
        rows, columns = (jnp.arange(size) for size in values.shape)
        at = first + rows[:, None] * values.shape[1] + columns[None, :]
        zeros = jnp.zeros(values.shape, jnp.int32)
        place = cache_ref.at[page + zeros, offset + zeros, zeros, at]
        triton.store(place, values.astype(cache_ref.dtype), mask=usable & (zeros == 0))

    at = jnp.arange(NUM_GROUPS)[:, None] * GROUP + jnp.arange(GROUP)[None, :]
    latent = triton.load(latents_ref.at[token + 0 * at, at]).astype(jnp.float32)
    at = LATENT_DIM + jnp.arange(ROPE_DIM)
    rope = triton.load(latents_ref.at[token + 0 * at, at])
    if cache_ref.dtype != BYTES:
        store(0, latent)
        store(LATENT_DIM, rope[:, None])
        return
    scale = group_scale(latent, scales)
    store(0, _e4m3_bits(latent / scale[:, None]))
    store(SCALES_AT, _bytes_of(lax.bitcast_convert_type(scale, jnp.int32), 4))
    rope_bits = lax.bitcast_convert_type(rope.astype(jnp.bfloat16), jnp.int16)
    store(ROPE_AT, _bytes_of(rope_bits.astype(jnp.int32), 2))


def _e4m3_bits(values: jax.Array) -> jax.Array:
    """float32 as the bits of float8_e4m3fn (saturating, int32), by integer arithmetic: GPUs before sm_89 lack the
    conversion. NaN gives anything, since such a group's scale is NaN."""
    magnitude = jnp.minimum(jnp.abs(values), largest(FP8))
    bits = _bits(magnitude)
    # To nearest, ties to even, at the third bit of the mantissa; an exponent of 0 is 127 there and 7 here.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 e4m3 has steps of 2**-9, the last bit of 2**14 in float32.
    subnormal = _bits(magnitude + 2.0**14) - ((127 + 14) << 23)
    sign = (_bits(values) >> 24) & 0x80
    return jnp.where(magnitude < 2.0**-6, subnormal, normal) | sign


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _bytes_of(numbers: jax.Array, size: int) -> jax.Array:
    """[n] int32 as [n, size] bytes in int32, the lowest first."""
    return (numbers[:, None] >> (8 * jnp.arange(size, dtype=jnp.int32))[None, :]) & 0xFF
