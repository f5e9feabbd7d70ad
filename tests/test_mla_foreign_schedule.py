"""The CUDA MLA kernel under schedules that were not made for its call: never outside the arrays, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.mla_schedule_model import plain_schedule

from pallas_attn._call import ffi
from pallas_attn.ops.mla_decode.cuda import mla_decode_cuda

pytestmark = pytest.mark.gpu

PAGE, DIM, LATENT, HEADS = 64, 576, 512, 16
EXTREMES = (-(2**31), -65, -1, 0, 1, 2, 63, 64, 1000, 2**30, 2**31 - 1)


@pytest.fixture(autouse=True)
def _needs_library() -> None:
    available, reason = ffi.is_available()
    if not available:
        pytest.skip(str(reason))


@functools.cache
def _compiled(cooperative: bool):
    return jax.jit(functools.partial(mla_decode_cuda, scale=DIM**-0.5, causal=True, cooperative=cooperative))


def decode(query, cache, tables, lengths, metadata, num_splits, cooperative: bool = True):
    integers = (np.asarray(x, np.int32) for x in (tables, lengths, metadata, num_splits))
    out, lse = _compiled(cooperative)(query, cache, *integers)
    return np.asarray(out, np.float32), np.asarray(lse)


def arrays(batch: int, num_pages: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 2)
    query = jax.random.normal(keys[0], (batch, 1, HEADS, DIM), jnp.bfloat16)
    return query, jax.random.normal(keys[1], (num_pages, PAGE, 1, DIM), jnp.bfloat16)


def scheduled(lengths, parts: int) -> tuple[np.ndarray, np.ndarray]:
    metadata, num_splits, _ = plain_schedule([int(n) for n in lengths], parts)
    return np.array(metadata), np.array(num_splits)


def test_a_kept_split_is_written_though_nothing_was_cut() -> None:
    """num_splits says that sequence 0 has two splits, but no part has the second: its CTA keeps the first in
    registers for a merge that does not come. More sequences than parts, or few rows would be merged behind."""
    batch, parts = 150, 100
    lengths = np.full(batch, PAGE)
    query, cache = arrays(batch, batch)
    tables = np.arange(batch)[:, None]
    metadata = np.zeros((parts, 8), int)
    for part in range(parts):
        last = part if part < parts - 1 else batch - 1
        metadata[part, :4] = part, 0, last, PAGE
    foreign = np.arange(batch + 1)
    foreign[1:] += 1
    # Other queries first, so that memory that nobody writes does not hold the answer.
    decode(query + 1, cache, tables, lengths, metadata, np.arange(batch + 1))
    out, lse = decode(query, cache, tables, lengths, metadata, foreign)
    want, want_lse = decode(query, cache, tables, lengths, *scheduled(lengths, parts))
    assert (out == want).all()
    assert (lse == want_lse).all()


@pytest.mark.parametrize("cooperative", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_leaves_the_device_sound(seed: int, cooperative: bool) -> None:
    rng = np.random.default_rng(seed)
    batch, parts = int(rng.choice([1, 7, 200])), int(rng.choice([1, 40, 132]))
    lengths = rng.integers(0, 700, batch)
    query, cache = arrays(batch, 11 * batch)
    tables = rng.permutation(11 * batch).reshape(batch, 11)
    good = scheduled(lengths, parts)
    want = decode(query, cache, tables, lengths, *good)
    for foreign in (
        (rng.choice(EXTREMES, (parts, 8)), rng.choice(EXTREMES, batch + 1)),
        (good[0], rng.choice(EXTREMES, batch + 1)),
        (rng.choice(EXTREMES, (parts, 8)), good[1]),
        scheduled(rng.integers(0, 20_000, batch), parts),
    ):
        decode(query, cache, tables, lengths, *foreign, cooperative=cooperative)
    again = decode(query, cache, tables, lengths, *good)
    for got, expected in zip(again, want, strict=True):
        assert (got == expected).all()


def test_the_last_pages_of_the_longest_length() -> None:
    """2^31 - 1 tokens, whose last two pages alone are scheduled: sums of page and token stay below 2^31."""
    length, width = 2**31 - 1, 2**25
    query, cache = arrays(1, 2)
    tables = np.tile(np.arange(2), width // 2)[None]
    metadata = [[0, (width - 2) * PAGE, 0, length, 0, 0, 0, 0]]
    out, lse = decode(query, cache, tables, [length], metadata, [0, 1])
    want, want_lse = decode(
        query, cache, [[0, 1]], [2 * PAGE - 1], [[0, 0, 0, 2 * PAGE - 1, 0, 0, 0, 0]], [0, 1]
    )
    assert (out == want).all()
    assert (lse == want_lse).all()
