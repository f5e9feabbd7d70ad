"""Kernels over pages with functions of the caller's own, lowered for a GPU that is not there and compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import lowering
import pytest
import triton_kernels

import pallas_attn
from pallas_attn import mods

struct = jax.ShapeDtypeStruct
BF16, I32, F32 = jnp.bfloat16, jnp.int32, jnp.float32
TABLES, LENGTHS = struct((16, 512), I32), struct((16,), I32)
SLOPES, BY_KEY, TABLE = struct((32,), F32), struct((16, 8192), F32), struct((32, 8192), BF16)


def _pools(stored: Any) -> list[Any]:
    return [struct((900, 16, 8, 128), stored)] * 2


def _near(batch, head, query, key):
    return (query - key < 1024) | ((head > 3) & (key % 3 == 0))


def paged(slopes, by_key, table, *arrays, **options):
    """A gate for each row, a bias for each key, and an element for each row and key."""

    def score(s, batch, head, query, key):
        return s * slopes[head] + by_key[batch, key] + table[head, query - key]

    return pallas_attn.paged_attention(*arrays, score_mod=score, mask_mod=_near, **options)


def ragged(slopes, by_key, *arrays, **options):
    score = mods.alibi(slopes)
    return pallas_attn.ragged_paged_attention(*arrays, score_mod=score, mask_mod=_near, **options)


def latents(slopes, by_key, *arrays, **options):
    def score(s, batch, head, query, key):
        return s * slopes[head] + by_key[batch, key]

    return pallas_attn.mla_decode(*arrays, score_mod=score, mask_mod=_near, causal=True, **options)


CALLS = {
    "paged": (paged, [SLOPES, BY_KEY, TABLE, struct((16, 2, 32, 128), BF16), *_pools(BF16), TABLES, LENGTHS]),
    "bytes": (
        paged,
        [SLOPES, BY_KEY, TABLE, struct((16, 32, 128), BF16), *_pools(jnp.float8_e4m3fn), TABLES, LENGTHS],
    ),
    "ragged": (
        ragged,
        [SLOPES, BY_KEY, struct((2048, 32, 128), BF16), *_pools(BF16), TABLES, LENGTHS, struct((17,), I32)],
    ),
    "latents": (
        latents,
        [
            SLOPES,
            BY_KEY,
            struct((16, 1, 32, 576), BF16),
            struct((900, 64, 1, 576), BF16),
            struct((16, 128), I32),
            LENGTHS,
        ],
    ),
}


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "by"),
    [("paged", "triton"), ("bytes", "pallas"), ("ragged", "pallas"), ("latents", "triton")],
)
def test_compiles(name, by):
    call, arrays = CALLS[name]
    with triton_kernels.written() as written:
        lowered = lowering.lower_for_gpu(lambda *arrays: call(*arrays, implementation=by), *arrays)
    if by == "pallas":
        ends = ("_attention", "_short", "_decode")
        kernels = lowering.compile_kernels(lowered, 90, ending=ends)
    else:
        kernels = [one.compile(lowering.USUAL_TRITON) for one in written if "combine" not in one.name]
    assert len(kernels) == (2 if name == "ragged" else 1)
    for kernel in kernels:
        assert kernel.shared_bytes <= lowering.SMEM_LIMIT[90]
        assert kernel.stack_bytes < 256
