"""Block tables that can hold more tokens than int32 counts: short sequences are served as ever, and long ones are right
as far as their positions, rounded up to tiles, are int32; beyond, they are NaN."""

import functools

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import triton_kernels

import pallas_attn

pytestmark = pytest.mark.once
PAGE_SIZE, COLUMNS = 2**15, 2**16
LONGEST = 2**31 - 2**16
BOUNDS = jnp.array([0, 1], jnp.int32)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])


@functools.cache
def normal(*shape: int) -> jax.Array:
    """By NumPy: of pools of 19 million numbers JAX would make a second's work on a CPU each time."""
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


def arguments(op: str, columns: int) -> dict[str, jax.Array]:
    """Of one query token; every column of the table has the same page."""
    dim = 576 if "mla" in op else 16
    pool, query, tables = normal(1, PAGE_SIZE, 1, dim), normal(1, 2, dim), jnp.zeros((1, columns), jnp.int32)
    lens = jnp.array([100], jnp.int32)
    match op:
        case "mla_decode":
            return dict(query=query[:, None], latent_cache=pool, block_tables=tables, seq_lens=lens)
        case "sparse_mla_decode":
            ids = jnp.array([[[3, 99, -1, 2**15 - 1]]], jnp.int32)
            return dict(query=query[:, None], latent_cache=pool, block_tables=tables, indices=ids)
        case "mla_prefill":
            ups = dict.fromkeys(("key_up", "value_up"), normal(2, 128, 512) / 30)
            cached = dict(latent_cache=pool, block_tables=tables, seq_lens=lens, cu_q_lens=BOUNDS)
            return dict(query=query[..., :192], **cached, **ups)
    cached = dict(key_cache=pool, value_cache=-pool, block_tables=tables, seq_lens=lens)
    bounds = {} if op == "paged_attention" else {"cu_q_lens": BOUNDS}
    new = {"key": normal(1, 1, dim), "value": normal(1, 1, dim)} if op == "prefix_prefill" else {}
    return dict(query=query, **new, **cached, **bounds)


CALLS = {
    "paged_attention": {},
    "ragged_paged_attention": {},
    "prefix_prefill": {},
    "mla_decode": {},
    "sparse_mla_decode": {"addressing": "positions"},
    "absorbed": {"form": "absorbed"},
    "projected": {"form": "projected"},
}


def call(name: str):
    """(the op's name, itself with its options)"""
    op = "mla_prefill" if "form" in CALLS[name] else name
    return op, functools.partial(getattr(pallas_attn, op), **CALLS[name])


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", CALLS)
def test_a_short_sequence_does_not_care(name, implementation):
    op, run = call(name)
    wide, narrow = (run(**arguments(op, columns), implementation=implementation) for columns in (COLUMNS, 1))
    assert np.abs(np.asarray(narrow)).max() > 0.01
    np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["paged_attention", "ragged_paged_attention", "mla_decode", "sparse_mla_decode"]
)
def test_lowers(name):
    op, run = call(name)
    arrays = {n: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for n, x in arguments(op, 1).items()}
    arrays["block_tables"] = jax.ShapeDtypeStruct((1, COLUMNS), jnp.int32)

    def lower(implementation: str):
        return lowering.lower_for_gpu(lambda arrays: run(**arrays, implementation=implementation), arrays)

    assert lowering.triton_kernels(lower("pallas"))
    with triton_kernels.written() as kernels:
        lower("triton")
    assert kernels


@IMPLEMENTATIONS
@pytest.mark.parametrize("op", ["paged_attention", "ragged_paged_attention"])
def test_long_sequences(op, implementation):
    """Of which a window leaves a few tokens to be read."""
    run = functools.partial(getattr(pallas_attn, op), implementation=implementation, sliding_window=70)

    def of(length: int, columns: int = COLUMNS) -> np.ndarray:
        return np.asarray(run(**{**arguments(op, columns), "seq_lens": jnp.array([length], jnp.int32)}))

    for less in (0, 5):
        expected = of(2 * PAGE_SIZE - less, columns=2)
        np.testing.assert_allclose(of(LONGEST - less), expected, rtol=1e-4, atol=1e-5)
    for length in (LONGEST + 1, 2**31 - 1, -1):
        assert np.isnan(of(length)).all(), length
