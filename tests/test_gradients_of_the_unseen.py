"""What sees nothing and what nobody sees: no gradient passes through it, whatever it holds and whatever comes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import SMALL_TILES as SMALL_BLOCKS
from flash_inputs import SMALL_TILES
from support import ON_GPU

from pallas_attn import blocksparse_attention, flash_attention
from pallas_attn.ops.blocksparse_attention import builders

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LENGTH = 40
BLIND = np.arange(LENGTH) % 3 == 1  # queries, where a mask or a bias says so


def drawn(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def assert_same(got, expected) -> None:
    assert all(np.abs(np.asarray(x, np.float64)).max() > 1e-3 for x in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


OPTIONS = {
    "mask": dict(mask=jnp.asarray(~BLIND)[None, None, :, None] & jnp.ones((1, 1, 1, LENGTH), bool)),
    "bias": dict(bias=jnp.where(BLIND, -jnp.inf, 0.0)[None, None, :, None] * jnp.ones((1, 1, 1, LENGTH))),
    "offset": dict(causal=True, q_offset=-9),
    "window": dict(sliding_window=(4, -1 + 3), q_offset=30),
    "ALiBi": dict(causal=True, q_offset=-9, score_mod=lambda s, b, h, q, k: s - (h + 1) / 8.0 * (q - 9 - k)),
}


@DTYPES
@IMPLEMENTATIONS
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("option", OPTIONS)
def test_queries_that_see_no_key(option, sinks, implementation, dtype):
    """Were their cotangents NaN; through lse, a sink's gradient alone."""
    shapes = [(1, LENGTH, heads, 16) for heads in (4, 2, 2, 4)]
    query, key, value, d_out = drawn(dtype, *shapes)
    (d_lse,) = drawn("float32", (1, LENGTH, 4))
    sink = jnp.linspace(-2.0, 2.0, 4) if sinks else None
    config = SMALL_TILES if implementation == "interpret" else None

    @jax.jit
    def gradients(d_out, d_lse):
        def call(query, key, value, sink):
            return flash_attention(query, key, value, sinks=sink, **OPTIONS[option], return_lse=True,
                                   implementation=implementation, config=config)  # fmt: skip

        results, pull = jax.vjp(call, query, key, value, sink)
        return results, pull((d_out, d_lse))

    (out, _), _ = gradients(d_out, d_lse)
    blind = np.asarray((out == 0).all(axis=(0, 2, 3)))
    assert 0 < blind.sum() < LENGTH
    at = jnp.asarray(blind)[None, :, None]
    _, expected = gradients(jnp.where(at[..., None], 0, d_out), d_lse if sinks else jnp.where(at, 0, d_lse))
    _, got = gradients(
        jnp.where(at[..., None], jnp.nan, d_out), d_lse if sinks else jnp.where(at, jnp.nan, d_lse)
    )
    assert_same(got, expected)
    assert (np.asarray(got[0], np.float64)[:, blind] == 0).all()
    if sinks:
        # A sink is all that such a query's lse is.
        _, without = gradients(d_out, jnp.where(at, 0, d_lse))
        np.testing.assert_allclose(
            got[3] - without[3], jnp.sum(jnp.where(at, d_lse, 0), axis=(0, 1)), atol=1e-5
        )


@IMPLEMENTATIONS
def test_padding_has_no_part_in_sinks(implementation):
    query, key, value, d_out = drawn("float32", *[(1, LENGTH, heads, 16) for heads in (4, 2, 2, 4)])
    lens, real = jnp.array([0, 11, 29], jnp.int32), 29
    config = SMALL_TILES if implementation == "interpret" else None

    @jax.jit
    def both(arrays, d_out, d_lse):
        def call(query, key, value, sinks):
            return flash_attention(query, key, value, sinks=sinks, cu_q_lens=lens, causal=True, return_lse=True,
                                   implementation=implementation, config=config)  # fmt: skip

        results, pull = jax.vjp(call, *arrays, jnp.linspace(-2.0, 2.0, 4))
        return results, pull((d_out, d_lse))

    arrays = [query, key, value]
    (out, lse), expected = both(
        arrays, d_out.at[:, real:].set(0), jnp.ones((1, LENGTH, 4)).at[:, real:].set(0)
    )
    assert (out[:, real:] == 0).all()
    assert (lse[:, real:] == -jnp.inf).all()
    assert jnp.isfinite(lse[:, :real]).all()
    spoiled = [x.at[:, real:].set(jnp.nan) for x in (*arrays, d_out, jnp.ones((1, LENGTH, 4)))]
    _, got = both(spoiled[:3], *spoiled[3:])
    assert_same(got, expected)
    assert all((x[:, real:] == 0).all() for x in got[:3])


def random_blocks(rows: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(2).random((2, rows, blocks)) < 0.4


# (queries, keys) of each sequence, block_size, q_block_size, what sees what
SPARSE = {
    "no queries": (((0, 30), (20, 20)), 16, 16, np.ones((1, 4, 4), bool)),
    "no queries, mixed": (((0, 30), (1, 40), (20, 50)), 16, 16, np.ones((1, 4, 4), bool)),
    "unseen blocks": (((50, 60), (0, 20), (1, 70)), 16, 16, random_blocks(8, 8)),
    "rows of two blocks": (((33, 60), (0, 40), (60, 60), (5, 3)), 16, 32, random_blocks(4, 8)),
    "blocks of two rows": (((33, 60), (0, 40), (60, 60)), 32, 16, random_blocks(8, 4)),
}


@DTYPES
@IMPLEMENTATIONS
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.sweep(name=None)
def test_block_sparse_keys_that_nobody_sees(name, implementation, dtype):
    """Hold NaN, and queries that see nothing get NaN back."""
    lens, block_size, q_block_size, mask = SPARSE[name]
    check_sparse(lens, block_size, q_block_size, mask, dtype, 16, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [((0, 300), (200, 200)), ((0, 300), (1, 400), (200, 500), (5, 3))], ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (128, 256), (256, 128)], ids=str)
def test_block_sparse_keys_that_nobody_sees_by_cuda(sizes, lens):
    blocks, rows = (512 // size for size in sizes)
    check_sparse(lens, *sizes, random_blocks(rows, blocks), "bfloat16", 128, "cuda")


def check_sparse(lens, block_size, q_block_size, mask, dtype, dim, implementation):
    q_lens, k_lens = zip(*lens, strict=True)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (q_lens, k_lens))
    tokens, keys, heads, spare = cu_q[-1] + 3, cu_k[-1] + 3, 2, 3
    query, key, value, d_out = drawn(dtype, (tokens, heads, dim), *[(keys, 1, dim)] * 2, (tokens, heads, dim))
    (d_lse,) = drawn("float32", (tokens, heads))
    unseen, blind = np.ones(keys, bool), np.ones((tokens, heads), bool)
    for seq, (q_len, k_len) in enumerate(lens):
        for token in range(q_len):
            position = k_len - q_len + token
            for head in range(heads if position >= 0 else 0):
                seen = np.zeros(k_len, bool)
                row = mask[min(head, len(mask) - 1), position // q_block_size]
                seen[: position + 1] = row[np.arange(position + 1) // block_size]
                unseen[cu_k[seq] : cu_k[seq + 1]] &= ~seen
                blind[cu_q[seq] + token, head] = not seen.any()
    assert unseen.sum() > spare
    layout = builders.from_block_mask(mask, block_size=block_size, q_block_size=q_block_size)
    call = functools.partial(
        blocksparse_attention,
        layout=layout,
        cu_q_lens=jnp.asarray(cu_q),
        cu_k_lens=jnp.asarray(cu_k),
        return_lse=True,
        implementation=implementation,
        config=SMALL_BLOCKS if implementation == "interpret" else None,
    )

    @jax.jit
    def both(query, key, value, d_out, d_lse):
        results, pull = jax.vjp(lambda *x: call(*x), query, key, value)
        return results, pull((d_out, d_lse))

    def with_unseen(number: float):
        """In keys and values that nobody sees, and in what comes back to queries that see nothing."""
        gone, nothing = unseen[:, None, None], blind[..., None]
        return (
            query,
            jnp.where(gone, number, key),
            jnp.where(gone, number, value),
            jnp.where(nothing, number, d_out),
            jnp.where(blind, number, d_lse),
        )

    (out, lse), expected = both(*with_unseen(0.0))
    np.testing.assert_array_equal(np.isneginf(lse), blind)
    (again, _), got = both(*with_unseen(np.nan))
    assert_same((again, *got), (out, *expected))
    for gradient in got[1:]:
        assert (np.asarray(gradient, np.float64)[unseen] == 0).all()
