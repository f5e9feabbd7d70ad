"""Sparse MLA's CUDA kernels at sizes that the interpreter does not reach: against float64 on the host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from references.latents_torch import dequantized
from references.sparse_mla_torch import sparse_mla as reference

import pallas_attn
from pallas_attn.testing import compare

pytestmark = pytest.mark.gpu
PAGE = 64


def attend(query, pool, ids, **options):
    call = functools.partial(pallas_attn.sparse_mla_decode, return_lse=True, implementation="cuda")
    return jax.jit(call)(*map(jnp.asarray, (query, pool, ids)), **options)


def inputs(seqs: int, q_len: int, heads: int, rows: int, topk: int, fp8: bool, seed: int = 0):
    """(query, pool, floats, ids): a tenth of the ids -1, rows that no id names NaN."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((seqs, q_len, heads, 576), np.float32).astype(jnp.bfloat16)
    latents = rng.standard_normal((-(-rows // PAGE) * PAGE, 576), np.float32).astype(jnp.bfloat16)
    ids = rng.integers(0, rows, (seqs, q_len, topk)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    unnamed = np.setdiff1d(np.arange(len(latents)), ids)
    if fp8:
        pool = np.array(pallas_attn.quantize_latents(jnp.asarray(latents), scales="exact"))
        floats = dequantized(pool).numpy()
        pool[unnamed] = 0xFF
    else:
        pool, floats = latents, latents.astype(np.float64)
        pool[unnamed] = np.nan
    return query, pool.reshape(-1, PAGE, 1, pool.shape[-1]), floats, ids


def check(query, floats, ids, out, lse, tokens, case_id, **sinks) -> None:
    """A handful of query tokens, since float64 on the host is slow."""
    flat = query.reshape(-1, *query.shape[2:])
    listed = [[i for i in row if i >= 0] for row in ids.reshape(-1, ids.shape[-1])[tokens].tolist()]
    want, _, want_lse = reference(flat[tokens], floats, listed, **sinks)
    rounded, *_ = reference(flat[tokens], floats, listed, rounding=torch.bfloat16, **sinks)
    about: Any = dict(dtype="bfloat16", case_id=case_id)
    out = np.asarray(out.astype(jnp.float32)).reshape(-1, *out.shape[2:])
    compare.assert_rows_close(out[tokens], want, rounded_reference=rounded, **about)
    compare.assert_lse_close(np.asarray(lse).reshape(-1, lse.shape[-1])[tokens], want_lse, **about)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("seqs", "q_len", "heads", "rows", "topk"),
    [
        (4, 1, 64, 512, 64),
        (4, 3, 128, 512, 64),
        (74, 1, 128, 1024, 576),
        (74, 3, 64, 2046, 2048),
        (321, 1, 64, 2046, 2048),
        (2, 1, 16, 32768, 8192),  # cut into many splits
        (1, 1, 128, 32768, 16384),
        (150, 1, 8, 4096, 1000),
        (200, 2, 100, 4096, 257),
    ],
    ids=str,
)
def test_decode_at_scale(seqs, q_len, heads, rows, topk, fp8):
    query, pool, floats, ids = inputs(seqs, q_len, heads, rows, topk, fp8)
    ids[seqs // 2] = -1  # nothing at all
    out, lse = attend(query, pool, ids)
    tokens = np.unique(np.linspace(0, seqs * q_len - 1, 5).astype(int))
    check(query, floats, ids, out, lse, tokens, f"{seqs}x{q_len}x{heads}x{topk}")
    assert np.isneginf(np.asarray(lse[seqs // 2])).all()
    assert not np.asarray(out[seqs // 2].astype(jnp.float32)).any()
    again, _ = attend(query, pool, ids)
    np.testing.assert_array_equal(np.asarray(again).view(np.uint16), np.asarray(out).view(np.uint16))


@pytest.mark.parametrize("heads", [16, 30, 64, 128])
@pytest.mark.parametrize(("seqs", "topk"), [(3, 2000), (140, 700)])
def test_bytes_by_every_tile(seqs, topk, heads):
    query, pool, floats, ids = inputs(seqs, 2, heads, 8192, topk, True, seed=5)
    ids[1, 0, 64:192] = -1
    sinks = np.linspace(-3, 8, heads, dtype=np.float32)
    out, lse = attend(query, pool, ids, sinks=jnp.asarray(sinks))
    check(query, floats, ids, out, lse, np.array([0, 2, seqs * 2 - 1]), f"bytes-{heads}", sinks=sinks)
    again, _ = attend(query, pool, ids, sinks=jnp.asarray(sinks))
    np.testing.assert_array_equal(np.asarray(again).view(np.uint16), np.asarray(out).view(np.uint16))


@pytest.mark.parametrize(("fp8", "heads"), [(False, 40), (True, 40), (True, 12)])
@pytest.mark.parametrize("seqs", [5, 140])
def test_lengths_at_scale(seqs, fp8, heads):
    """Tokens with fewer ids than the schedule was made for: some splits are empty, or shorter."""
    query, pool, floats, ids = inputs(seqs, 1, heads, 4096, 1500, fp8, seed=1)
    lengths = np.random.default_rng(1).integers(0, 1501, seqs).astype(np.int32)
    lengths[:3] = 0, 1500, 64
    out, lse = attend(query, pool, ids, topk_length=jnp.asarray(lengths))
    seen = np.where(np.arange(1500) < lengths[:, None, None], ids, -1)
    check(query, floats, seen, out, lse, np.array([0, 1, 2, seqs - 1]), f"lengths-{seqs}")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("seqs", "heads"), [(1, 128), (5, 40), (140, 70), (1, 16), (5, 9)], ids=str)
def test_sinks_at_scale(seqs, heads, fp8):
    """Wherever a token's result is finished: by its CTA alone, by the first of a few, by the merging kernel."""
    query, pool, floats, ids = inputs(seqs, 1, heads, 4096, 1500, fp8, seed=4)
    sinks = np.random.default_rng(4).standard_normal(heads).astype(np.float32) * 3 + 5
    sinks[0] = -np.inf
    if seqs > 1:
        ids[-1] = -1
    out, lse = attend(query, pool, ids, sinks=jnp.asarray(sinks))
    check(query, floats, ids, out, lse, np.unique([0, seqs // 2, seqs - 1]), f"sinks-{seqs}", sinks=sinks)
    without, same = attend(query, pool, ids)
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(same))
    assert (np.asarray(out) != np.asarray(without)).any()


@pytest.mark.parametrize(("fp8", "heads"), [(False, 70), (True, 70), (True, 16)])
def test_poison_stays_in_its_row(fp8, heads):
    query, pool, floats, ids = inputs(140, 1, heads, 4096, 700, fp8, seed=2)
    bad = {3: 4096 + PAGE * 100, 70: -2, 139: 2**31 - 1}
    for seq, row in bad.items():
        ids[seq, 0, 7 * seq % 700] = row
    out, lse = attend(query, pool, ids)
    poisoned = np.isnan(np.asarray(out.astype(jnp.float32))).all(axis=(1, 2, 3))
    assert np.flatnonzero(poisoned).tolist() == sorted(bad)
    assert np.isnan(np.asarray(lse)[sorted(bad)]).all()
    good = [i for i in range(140) if i not in bad]
    assert np.isfinite(np.asarray(out.astype(jnp.float32))[good]).all()
    check(
        query[good],
        floats,
        ids[good],
        out[jnp.asarray(good)],
        lse[jnp.asarray(good)],
        np.array([0, 9]),
        "poison",
    )


@pytest.mark.parametrize(("fp8", "heads"), [(False, 128), (True, 128), (True, 64)])
def test_prefill_at_scale(fp8, heads):
    """Over bytes by kernels of its own, for pairs of CTAs and for single ones."""
    query, pool, floats, ids = inputs(600, 1, heads, 3000, 512, fp8, seed=3)
    ids[0, 0, :9] = 10**6  # skipped
    if fp8:
        floats = torch.from_numpy(floats).bfloat16().double().numpy()
    call = jax.jit(functools.partial(pallas_attn.sparse_mla_prefill, implementation="cuda"))
    out, top, lse = call(*map(jnp.asarray, (query[:, 0], pool.reshape(-1, 1, pool.shape[-1]), ids)))
    tokens = np.array([0, 1, 299, 599])
    listed = [[i for i in row if 0 <= i < len(floats)] for row in ids[:, 0][tokens].tolist()]
    want, want_top, want_lse = reference(query[tokens, 0], floats, listed)
    rounded, *_ = reference(query[tokens, 0], floats, listed, rounding=torch.bfloat16)
    about: Any = dict(dtype="bfloat16", case_id="prefill")
    compare.assert_rows_close(
        np.asarray(out.astype(jnp.float32))[tokens], want, rounded_reference=rounded, **about
    )
    compare.assert_lse_close(np.asarray(lse)[tokens], want_lse, **about)
    compare.assert_lse_close(np.asarray(top)[tokens], want_top, **about)
