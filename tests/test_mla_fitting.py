"""A schedule for other lengths is told from one that fits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import MLASchedule, flash_mla_with_kvcache, mla_decode
from pallas_attn.ops.mla_decode.fitting import fits
from pallas_attn.ops.mla_decode.schedule import tile_schedule


def served(metadata: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """How often each token of each sequence is served, as a kernel follows a schedule."""
    times = [[0] * max(length, 0) for length in lengths]
    for begin_seq, begin, end_seq, end, *_ in metadata:
        for seq in range(begin_seq, end_seq + 1 if begin_seq < len(lengths) else 0):
            first = begin if seq == begin_seq else 0
            for token in range(first, min(end, lengths[seq]) if seq == end_seq else lengths[seq]):
                times[seq][token] += 1
    return times


@pytest.mark.parametrize("num_parts", [1, 3, 16])
def test_what_fits_serves_every_token_once(num_parts):
    """And what does not serve every token once does not fit."""
    rng = np.random.default_rng(num_parts)
    make = jax.jit(tile_schedule, static_argnums=1)
    wrong = 0
    for overhead in (1, 2, 5):
        for most in (3, 150, 900):
            lengths = rng.integers(0, most, 5).astype(np.int32)
            lengths[rng.integers(5)] = rng.choice([0, -7, 64])
            metadata, splits = map(np.asarray, make(lengths, num_parts, overhead))
            assert fits(metadata, splits, lengths)
            for seq, change in ((0, 1), (1, 64), (2, -1), (4, 300), (4, -1)):
                other = lengths.copy()
                other[seq] += change
                every = all(t == 1 for times in served(metadata, other) for t in times)
                found = fits(metadata, splits, other)
                assert every or not found
                wrong += not every
            shifted = splits + (np.arange(6) > 2)
            assert not fits(metadata, shifted, lengths)
    assert wrong > 5


def arguments() -> tuple[jax.Array, ...]:
    lens = jnp.array([700, 20], jnp.int32)
    tables = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    return jnp.ones((2, 1, 4, 576)), jnp.ones((24, 64, 1, 576)), tables, lens


def test_outside_jit_it_is_refused():
    """Inside, where nobody knows the lengths, the call goes on."""
    *rest, lens = arguments()
    for stale in (lens + 1, lens - 500, lens[::-1]):
        schedule = pallas_attn.mla_schedule(stale, num_heads=4, num_parts=4)
        with pytest.raises(
            ValueError, match=r"^mla_decode: argument 'schedule': expected one made for these seq_lens"
        ):
            mla_decode(*rest, lens, schedule=schedule)
        metadata: Any = pallas_attn.get_mla_metadata(stale, 4, 1)
        with pytest.raises(
            ValueError,
            match=r"^flash_mla_with_kvcache: argument 'tile_scheduler_metadata': expected one made for these cache_seq",
        ):
            flash_mla_with_kvcache(*rest, lens, 512, *metadata)
        jax.eval_shape(functools.partial(mla_decode, schedule=schedule), *rest, lens)
    jax.eval_shape(lambda: mla_decode(*rest, lens, schedule=pallas_attn.mla_schedule(lens, num_heads=4)))


def test_wild_numbers_do_not_fit():
    *_, lens = map(np.asarray, arguments())
    metadata, splits = map(np.asarray, pallas_attn.mla_schedule(jnp.asarray(lens), num_heads=4, num_parts=4))
    assert fits(metadata, splits, lens)
    for wild in (metadata * -977, metadata[::-1], np.zeros_like(metadata), np.full_like(metadata, 2**31 - 1)):
        assert not fits(wild, splits, lens)
    assert not fits(metadata[:1], splits, lens)
    schedule = MLASchedule(jnp.asarray(metadata), jnp.asarray(splits))
    out = mla_decode(*arguments(), schedule=schedule)
    np.testing.assert_allclose(out, 1.0, rtol=1e-5)
