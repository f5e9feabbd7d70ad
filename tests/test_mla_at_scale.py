"""MLA decode at the size it is for, on a GPU: FlashMLA's test matrix, and what that leaves out.

Compiling is what takes time here. Lengths, tables and the cache's contents are therefore data of a few compiled
functions: every test of a page size shares one pool and one width of the tables.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import _ffi
from pallas_attn.ops.mla_decode import MLASchedule
from pallas_attn.testing import compare, inputs

pytestmark = pytest.mark.gpu

DIM, LATENT = 576, 512
COSINE_DIFFERENCE = 1e-5  # FlashMLA's own bar


@functools.cache
def noise(num_tokens: int) -> jax.Array:
    """Drawn in pieces: all at once takes twice its memory for the random bits."""
    keys = jax.random.split(jax.random.key(0), 16)
    pieces = jax.lax.map(lambda key: jax.random.normal(key, (num_tokens // 16, DIM), jnp.bfloat16), keys)
    return pieces.reshape(num_tokens, DIM)


@functools.partial(jax.jit, static_argnames=("page", "dtype"))
def poisoned(tokens: jax.Array, owned: jax.Array, page: int, dtype) -> jax.Array:
    """The pool, NaN where no sequence owns a slot."""
    return jnp.where(owned[:, None], tokens, jnp.nan).astype(dtype).reshape(-1, page, 1, DIM)


def arguments(lens, h_q: int, s_q: int, dtype, *, page: int, pool_tokens: int, table_tokens: int):
    """Query, cache, tables and lengths; garbage in every unused table entry."""
    tables, _ = inputs.block_tables(np.random.default_rng(0), tuple(np.maximum(lens, 0).tolist()), page, 1)
    unused = table_tokens // page - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, unused)), constant_values=inputs.GARBAGE_IDS[0])
    owned = np.zeros((pool_tokens // page, page), bool)
    for table, length in zip(tables, lens.tolist(), strict=True):
        owned[inputs.token_places(table, max(length, 0), page)] = True
    query = jax.random.normal(jax.random.key(1), (len(lens), s_q, h_q, DIM), dtype)
    cache = poisoned(noise(pool_tokens), owned.ravel(), page, dtype)
    return query, cache, jnp.asarray(tables), jnp.asarray(lens, jnp.int32)


@jax.jit
def reference(query, cache, tables, lens):
    """float32, one sequence after the other."""
    s_q = query.shape[1]

    def sequence(item):
        query, table, length = item
        keys = cache.at[table].get(mode="clip").reshape(-1, DIM)
        token = jnp.arange(keys.shape[0])
        keys = jnp.where((token < length)[:, None], keys, 0).astype(jnp.float32)
        logits = jnp.einsum("ihd,td->iht", query.astype(jnp.float32), keys, precision="highest") * DIM**-0.5
        seen = token < length - (s_q - 1 - jnp.arange(s_q))[:, None]
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(jnp.isneginf(lse)[..., None], 0, jnp.exp(logits - lse[..., None]))
        out = jnp.einsum("iht,td->ihd", weights, keys[:, :LATENT], precision="highest")
        return jnp.where(length < 0, jnp.nan, out), jnp.where(length < 0, jnp.nan, lse.T)

    return jax.lax.map(sequence, (query, tables, lens))


@jax.jit
def differences(out, lse, expected, expected_lse) -> dict[str, jax.Array]:
    def cosine(a, b):
        return 1 - 2 * jnp.sum(a * b) / jnp.maximum(jnp.sum(a * a + b * b), 1e-12)

    misplaced = jnp.sum(jnp.isnan(out) != jnp.isnan(expected))
    for test in (jnp.isnan, jnp.isneginf, jnp.isposinf):
        misplaced += jnp.sum(test(lse) != test(expected_lse))
    out, expected = (jnp.nan_to_num(x.astype(jnp.float32), nan=0.0) for x in (out, expected))
    lse, expected_lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (lse, expected_lse))
    norm = jnp.linalg.norm(expected, axis=-1)
    error = jnp.linalg.norm(out - expected, axis=-1) / jnp.where(norm == 0, 1, norm)
    return {
        "NaN or Inf out of place": misplaced,
        "worst row": jnp.max(error),
        "cosine difference": cosine(out, expected),
        "lse": jnp.max(jnp.abs(lse - expected_lse) / jnp.maximum(1, jnp.abs(expected_lse))),
        "lse cosine difference": cosine(lse, expected_lse),
    }


@functools.cache
def compiled(implementation: str):
    """With and without a schedule; the sequences' newest tokens see each other causally."""
    options = dict(causal=True, return_lse=True, implementation=implementation)
    return jax.jit(functools.partial(pallas_attn.mla_decode, **options))


def check(implementation: str, data, schedules: dict[str, MLASchedule | None]) -> None:
    if implementation == "cuda" and not _ffi.is_available()[0]:
        pytest.skip(str(_ffi.is_available()[1]))
    dtype = data[0].dtype.name
    limits = {
        "NaN or Inf out of place": 0,
        "worst row": compare.CAP[dtype],
        "cosine difference": COSINE_DIFFERENCE,
        "lse": compare.LSE_TOLERANCE[dtype],
        "lse cosine difference": COSINE_DIFFERENCE,
    }
    expected = reference(*data)
    for name, schedule in schedules.items():
        found = differences(*compiled(implementation)(*data, schedule=schedule), *expected)
        for what, value in found.items():
            assert float(value) <= limits[what], (
                f"{name}, lengths {data[3][:4]}...: {what} {float(value):.2e}"
            )


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("pallas", "bfloat16"), ("cuda", "bfloat16"), ("cuda", "float16")]
)
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("h_q", [16, 32, 64, 128])
def test_seed_matrix(h_q: int, s_q: int, implementation: str, dtype: str) -> None:
    """128 sequences of 4096, 8192 and 16384 tokens, all alike and normally distributed; page 64."""
    metadata = jax.jit(lambda lens: pallas_attn.get_mla_metadata(lens, s_q * h_q, 1))
    for s_k in (4096, 8192, 16384):
        varied = np.random.default_rng(s_k).normal(s_k, s_k / 2, 128).astype(int)
        for lens in (np.full(128, s_k), np.maximum(varied, s_q)):
            data = arguments(
                lens, h_q, s_q, jnp.dtype(dtype), page=64, pool_tokens=36_000 * 64, table_tokens=640 * 64
            )
            check(implementation, data, {"grid": None, "seed's schedule": MLASchedule(*metadata(data[3]))})
            del data  # before the next, of 3 GB too, is made


@pytest.mark.parametrize(
    ("implementation", "page", "scheduled"),
    [("pallas", 16, False), ("pallas", 32, True), ("pallas", 128, True), ("cuda", 64, True)],
)
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("h_q", [1, 3, 9, 63, 126])
def test_odd_shapes(h_q: int, s_q: int, implementation: str, page: int, scheduled: bool) -> None:
    """Heads that fill no tile; half of the sequences empty, some shorter than the query, some lengths negative."""
    lens = np.random.default_rng(2).integers(1, 6000, 64)
    lens[::2] = 0
    lens[1], lens[3], lens[5] = -1, 1, 2
    data = arguments(lens, h_q, s_q, jnp.bfloat16, page=page, pool_tokens=1 << 17, table_tokens=6144)
    make = jax.jit(lambda lens: pallas_attn.mla_schedule(lens, num_heads=h_q, s_q=s_q))
    check(implementation, data, {"schedule": make(data[3])} if scheduled else {"grid": None})
