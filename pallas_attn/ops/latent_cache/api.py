"""`write_latents`: signature, checks, dispatch."""

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.op import Op
from pallas_attn._call.operands import ready
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import pool_shape, reaches
from pallas_attn._tile import triton
from pallas_attn._tile.latents import QUERY_DIM, SCALES, Scales
from pallas_attn._types import Implementation, KVCache, SlotMapping
from pallas_attn.ops.latent_cache.convert import check_pool
from pallas_attn.ops.latent_cache.kernel import write_latents_pallas
from pallas_attn.ops.latent_cache.operands import POOL, Operands
from pallas_attn.ops.latent_cache.reference import write_latents_xla


def _supports(operands: Operands, lowering: triton.Lowering) -> str | None:
    return reaches(pool_shape(operands.latent_cache, "NHD"), operands.latent_cache.dtype, lowering)


OP = Op(
    name="write_latents",
    implementations={
        **triton.implementations(write_latents_pallas, _supports, takes_config=False),
        "xla": dispatch.Implementation(write_latents_xla, takes_config=False),
    },
    results=(POOL,),
)


def write_latents(
    latents: jax.Array,
    latent_cache: KVCache,
    slot_mapping: SlotMapping,
    *,
    scales: Scales = "power_of_two",
    implementation: Implementation | None = None,
) -> KVCache:
    """Writes new tokens' latents into their slots of an MLA cache (vLLM's `concat_and_cache_mla`).

    The pool is updated in place when it is donated: call it under a `jax.jit` whose cache is in `donate_argnums` (or
    carried by a loop). Without donation XLA must copy the pool first.

    Args:
        latents: [num_tokens, 576] bf16, fp16 or float32: the 512 latent, then the 64 rotary elements.
        latent_cache: [num_pages, page_size, 1, 576] bf16, fp16 or float32, to whose dtype tokens are cast, or
            [num_pages, page_size, 1, 656] uint8, to whose bytes they are quantised as by `quantize_latents`.
        slot_mapping: [num_tokens] int32; slot = page * page_size + offset. Tokens whose slot is negative (usually -1)
            or beyond the pool are skipped. Two tokens must not share a slot.
        scales: "exact" or "power_of_two", as in `quantize_latents`; without effect on a cache that is not quantised.
        implementation: None (chosen), "pallas" or "triton" (NVIDIA, sm_80 or newer), "xla" (anywhere) or "interpret".
            On a GPU the kernels and "xla" may round an element that lies halfway between two values differently where
            scales are exact.

    Returns:
        latent_cache, updated.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, unknown scales, or an implementation that cannot serve.
    """
    check = ArgumentChecker("write_latents")
    check_pool(check, "latent_cache", latent_cache, DTYPES)
    check.array("latents", latents, ("num_tokens", QUERY_DIM), DTYPES)
    check.array("slot_mapping", slot_mapping, ("num_tokens",), [jnp.int32])
    check.non_empty("latent_cache", latent_cache)
    check.one_of("scales", scales, SCALES)
    given = Operands(latents=latents, latent_cache=latent_cache, slot_mapping=slot_mapping, scales=scales)
    given = ready(given)
    if latents.shape[0] == 0:
        dispatch.check_name("write_latents", "write_latents", implementation)
        return given.latent_cache
    [updated] = OP.serve(given, implementation=implementation)
    return updated
