"""MLA decode at the size it is for, on a GPU: FlashMLA's test matrix, and what that leaves out.

Compiling is what takes time here, most of all products whose kernels XLA chooses by trying. So only the call under
test is compiled for its own shape: what it is compared with sees query rows padded to one number, and lengths, tables,
what a row may see and the cache's contents are data.
"""

import functools
from typing import NamedTuple

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn.ops.mla_decode import MLASchedule
from pallas_attn.testing import compare

pytestmark = pytest.mark.gpu

DIM, LATENT = 576, 512
COSINE_DIFFERENCE = 1e-5  # FlashMLA's own bar
REFERENCE_TOKENS = 512  # of every sequence at once
SCHEDULE_ROWS = 64  # query rows of a part's program


class Size(NamedTuple):
    """What all tests of a matrix share."""

    num_seqs: int
    rows: int
    """Query rows of a sequence, padding included."""
    pool_tokens: int
    table_tokens: int


SEED_SIZE = Size(128, rows=256, pool_tokens=36_000 * 64, table_tokens=640 * 64)
ODD_SIZE = Size(64, rows=512, pool_tokens=1 << 17, table_tokens=6144)


class Data(NamedTuple):
    query: jax.Array  # [num_seqs, rows, 576]
    cache: jax.Array
    tables: jax.Array
    lens: jax.Array
    row_end: jax.Array  # [num_seqs, rows]: where what a row sees ends; 0 in padding
    real: jax.Array  # [rows]: not padding


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


@functools.cache
def queries(num_seqs: int, rows: int, dtype: str) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((num_seqs, rows, DIM), np.float32).astype(jnp.dtype(dtype)))


def data_of(lens: np.ndarray, h_q: int, q_len: int, dtype: str, page: int, size: Size) -> Data:
    """Garbage in every unused table entry; NaN in every slot that is no sequence's."""
    tables, _ = inputs.block_tables(np.random.default_rng(0), tuple(np.maximum(lens, 0).tolist()), page, 1)
    unused = size.table_tokens // page - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, unused)), constant_values=inputs.GARBAGE_IDS[0])
    owned = np.zeros((size.pool_tokens // page, page), bool)
    for table, length in zip(tables, lens.tolist(), strict=True):
        owned[inputs.token_places(table, max(length, 0), page)] = True
    row = np.arange(size.rows)
    real = row < q_len * h_q
    row_end = np.where(real, lens[:, None] - (q_len - 1) + row // h_q, 0)
    return Data(
        queries(size.num_seqs, size.rows, dtype),
        poisoned(noise(size.pool_tokens), owned.ravel(), page, jnp.dtype(dtype)),
        jnp.asarray(tables),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(row_end, jnp.int32),
        jnp.asarray(real),
    )


@functools.partial(jax.jit, static_argnames=("h_q", "q_len", "implementation"))
def attend(data: Data, schedule: MLASchedule | None, h_q: int, q_len: int, implementation: str):
    """The call under test, on the rows that are not padding: out [num_seqs, rows, 512], lse [num_seqs, rows]."""
    num_seqs, rows, _ = data.query.shape
    query = data.query[:, : q_len * h_q].reshape(num_seqs, q_len, h_q, DIM)
    out, lse = pallas_attn.mla_decode(
        query,
        data.cache,
        data.tables,
        data.lens,
        schedule=schedule,
        causal=True,
        return_lse=True,
        implementation=implementation,
    )
    padding = ((0, 0), (0, rows - q_len * h_q))
    out = jnp.pad(out.reshape(num_seqs, -1, LATENT), (*padding, (0, 0)))
    lse = jnp.pad(lse.reshape(num_seqs, -1), padding, constant_values=-jnp.inf)
    return out, lse


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
def reference(data: Data) -> tuple[jax.Array, jax.Array]:
    """float32; as many tokens as the longest sequence has, REFERENCE_TOKENS of all sequences at a time."""
    num_seqs, rows, _ = data.query.shape
    query = data.query.astype(jnp.float32)
    pages_a_step = REFERENCE_TOKENS // data.cache.shape[1]
    highest = functools.partial(jnp.einsum, precision="highest")

    def step(i, state):
        largest, total, acc = state
        pages = jax.lax.dynamic_slice_in_dim(data.tables, i * pages_a_step, pages_a_step, axis=1)
        keys = data.cache.at[pages].get(mode="clip").reshape(num_seqs, REFERENCE_TOKENS, DIM)
        token = i * REFERENCE_TOKENS + jnp.arange(REFERENCE_TOKENS)
        keys = jnp.where((token < data.lens[:, None])[..., None], keys, 0).astype(jnp.float32)
        logits = highest("srd,std->srt", query, keys) * DIM**-0.5
        logits = jnp.where(token < data.row_end[..., None], logits, -jnp.inf)
        larger = jnp.maximum(largest, jnp.max(logits, axis=-1))
        weights, decay = jnp.exp(logits - larger[..., None]), jnp.exp(largest - larger)
        product = highest("srt,std->srd", weights, keys[..., :LATENT])
        return larger, total * decay + jnp.sum(weights, axis=-1), acc * decay[..., None] + product

    # Finite, so that rows that see nothing have weights of 0 and not NaN.
    start = (
        jnp.full((num_seqs, rows), -1e30),
        jnp.zeros((num_seqs, rows)),
        jnp.zeros((num_seqs, rows, LATENT)),
    )
    steps = (jnp.max(data.lens) + REFERENCE_TOKENS - 1) // REFERENCE_TOKENS
    largest, total, acc = jax.lax.fori_loop(0, steps, step, start)
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(total))
    impossible = (data.lens < 0)[:, None] & data.real
    return jnp.where(impossible[..., None], jnp.nan, out), jnp.where(impossible, jnp.nan, lse)


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


@functools.partial(jax.jit, static_argnames="row_blocks")
def seed_schedule(lens: jax.Array, row_blocks: int) -> MLASchedule:
    """Of the query rows only the number of blocks of SCHEDULE_ROWS counts."""
    return MLASchedule(*pallas_attn.get_mla_metadata(lens, row_blocks * SCHEDULE_ROWS, 1))


@functools.partial(jax.jit, static_argnames="row_blocks")
def schedule(lens: jax.Array, row_blocks: int) -> MLASchedule:
    return pallas_attn.mla_schedule(lens, num_heads=row_blocks * SCHEDULE_ROWS)


def check(
    data: Data, h_q: int, q_len: int, implementation: str, schedules: dict[str, MLASchedule | None]
) -> None:
    dtype = data.query.dtype.name
    limits = {
        "NaN or Inf out of place": 0,
        "worst row": compare.CAP[dtype],
        "cosine difference": COSINE_DIFFERENCE,
        "lse": compare.LSE_TOLERANCE[dtype],
        "lse cosine difference": COSINE_DIFFERENCE,
    }
    expected = reference(data)
    for name, made in schedules.items():
        found = jax.device_get(differences(*attend(data, made, h_q, q_len, implementation), *expected))
        for what, value in found.items():
            assert value <= limits[what], f"{name}, lengths {data.lens[:4]}...: {what} {value:.2e}"


def require(implementation: str) -> None:
    if implementation == "cuda" and not ffi.is_available()[0]:
        pytest.skip(str(ffi.is_available()[1]))


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("pallas", "bfloat16"), ("triton", "bfloat16"), ("cuda", "bfloat16"), ("cuda", "float16")],
)
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("h_q", [16, 32, 64, 128])
def test_seed_matrix(h_q: int, q_len: int, implementation: str, dtype: str) -> None:
    """128 sequences of 4096, 8192 and 16384 tokens, all alike and normally distributed; page 64."""
    require(implementation)
    row_blocks = -(-h_q * q_len // SCHEDULE_ROWS)
    for s_k in (4096, 8192, 16384):
        varied = np.random.default_rng(s_k).normal(s_k, s_k / 2, SEED_SIZE.num_seqs).astype(int)
        for lens in (np.full(SEED_SIZE.num_seqs, s_k), np.maximum(varied, q_len)):
            data = data_of(lens, h_q, q_len, dtype, 64, SEED_SIZE)
            made = seed_schedule(data.lens, row_blocks)
            check(data, h_q, q_len, implementation, {"grid": None, "seed's schedule": made})
            del data  # before the next, of 3 GB too, is made


@pytest.mark.parametrize(
    ("implementation", "page", "scheduled"),
    [
        *(("pallas", page, page > 16) for page in (16, 32, 128)),
        *(("triton", page, page > 16) for page in (16, 32, 128)),
        ("cuda", 64, True),
    ],
)
@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("h_q", [1, 3, 9, 63, 126])
def test_odd_shapes(h_q: int, q_len: int, implementation: str, page: int, scheduled: bool) -> None:
    """Heads that fill no tile; half of the sequences empty, some shorter than the query, some lengths negative."""
    require(implementation)
    lens = np.random.default_rng(2).integers(1, 6000, ODD_SIZE.num_seqs)
    lens[::2] = 0
    lens[1], lens[3], lens[5] = -1, 1, 2
    data = data_of(lens, h_q, q_len, "bfloat16", page, ODD_SIZE)
    made = schedule(data.lens, -(-h_q * q_len // SCHEDULE_ROWS)) if scheduled else None
    check(data, h_q, q_len, implementation, {"schedule" if scheduled else "grid": made})
