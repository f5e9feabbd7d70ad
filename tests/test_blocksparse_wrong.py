"""Layouts and lengths that cannot be right, or hold nothing, in `blocksparse_attention` and its gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import SMALL_TILES
from support import ON_GPU

from pallas_attn import SparseLayout, blocksparse_attention
from pallas_attn.ops.blocksparse_attention import builders

pytestmark = pytest.mark.once
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
TOKENS, BLOCK = 80, 16


@functools.cache
def arrays(queries: int = TOKENS) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = (queries, 2, 16), (TOKENS, 1, 16), (TOKENS, 1, 16)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def attend(query, key, value, layout, implementation: str, **lengths):
    lengths = {name: jnp.asarray(ends, jnp.int32) for name, ends in lengths.items()}
    config = SMALL_TILES if implementation == "interpret" else None
    return blocksparse_attention(
        query, key, value, layout, return_lse=True, implementation=implementation, config=config, **lengths
    )


def changed(array: str, place: int, value: int) -> SparseLayout:
    """Dense and causal, but for one element; of one head for both."""
    layout = builders.dense_causal(TOKENS, block_size=BLOCK)
    these = np.array(getattr(layout, array))
    these[0, place] = value
    return dataclasses.replace(layout, **{array: these})


@functools.cache
def decode(implementation: str):
    return jax.jit(
        functools.partial(attend, *arrays(1), implementation=implementation, cu_k_lens=[0, TOKENS])
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [-1, 5, 2**27, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("place", [10, 12, 14])
def test_decode_with_a_column_outside_is_nan(place, value, implementation):
    """The last query's row has entries 10 to 14."""
    call = decode(implementation)
    out, lse = call(builders.dense_causal(TOKENS, block_size=BLOCK))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    out, lse = call(changed("columns", place, value))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@IMPLEMENTATIONS
def test_the_first_sequence_begins_with_the_first_token(implementation):
    """Whatever cu_q_lens[0] is: nothing is left unwritten."""
    layout = builders.dense_causal(TOKENS, block_size=BLOCK)
    call = functools.partial(attend, *arrays(40), layout, implementation, cu_k_lens=[0, 45, TOKENS])
    # Traced: 30 would be refused where it is known to stand in front of 25.
    traced = jax.jit(lambda ends: call(cu_q_lens=ends))
    right = traced(np.int32([0, 25, 40]))
    for first in (3, 24, 30, -7):
        for got, expected in zip(traced(np.int32([first, 25, 40])), right, strict=True):
            np.testing.assert_array_equal(got, expected)
    # One query, if it began there: it is not decode's.
    for got, expected in zip(traced(np.int32([2, 3, 40])), traced(np.int32([0, 3, 40])), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert np.isfinite(right[0]).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("traced", [False, True])
def test_a_layout_without_entries(traced, implementation):
    layout = SparseLayout(np.zeros((1, 6), np.int32), np.zeros((1, 0), np.int32), BLOCK, BLOCK)
    call = functools.partial(attend, *arrays(), implementation=implementation, cu_k_lens=[0, TOKENS])
    out, lse = jax.jit(call)(layout) if traced else call(layout)
    assert not np.any(out)
    assert np.isneginf(lse).all()


WRONG = {
    "a column below 0": ("columns", 5, -1, [2]),
    "a column far outside": ("columns", 5, 2**28, [2]),
    "a pointer that is too small": ("row_pointers", 3, 1, [2, 3]),
    "a pointer far outside": ("row_pointers", 3, 2**31 - 1, [2, 3]),
    "a pointer below 0": ("row_pointers", 2, -5, [1, 2]),
    "a pointer into a later row": ("row_pointers", 1, 9, [0, 1]),
    "the last pointer": ("row_pointers", 5, 99, [4]),
}


@functools.cache
def gradients(implementation: str):
    """Of query, key and value by a layout, towards an array like the output."""

    @jax.jit
    def call(layout, towards):
        out = functools.partial(attend, layout=layout, implementation=implementation, cu_k_lens=[0, TOKENS])
        return jax.vjp(lambda *floats: out(*floats)[0], *arrays())[1](towards)

    return call


@IMPLEMENTATIONS
@pytest.mark.parametrize("which", WRONG)
@pytest.mark.control
def test_no_gradient_of_a_wrong_layout_looks_right(which, implementation):
    """Of queries of wrong rows it is NaN. All else is NaN or what the right rows give alone."""
    array, place, value, rows = WRONG[which]
    call, layout = gradients(implementation), changed(array, place, value)
    towards = jnp.asarray(np.random.default_rng(1).standard_normal(arrays()[0].shape), jnp.float32)
    seen = np.tri(TOKENS // BLOCK, dtype=bool)
    seen[rows] = False
    right = call(builders.from_block_mask(seen[None], block_size=BLOCK, nnz=layout.columns.shape[1]), towards)
    d_query, d_key, d_value = map(np.asarray, call(layout, towards))
    wrong = np.isin(np.arange(TOKENS) // BLOCK, rows)
    np.testing.assert_array_equal(np.isnan(d_query).all(axis=(1, 2)), wrong)
    np.testing.assert_allclose(d_query[~wrong], right[0][~wrong], atol=2e-5)
    for got, expected in ((d_key, right[1]), (d_value, right[2])):
        known = ~np.isnan(got)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got[known], expected[known], atol=2e-5)


def test_what_might_be_decoding_or_prompts_is_asked_for():
    """As many queries as sequences and as keys: two tokens of one sequence beside an empty one, or one of each."""
    arrays = [jnp.ones((2, 1, 16))] * 3
    layout = builders.dense_causal(16, block_size=16)

    def call(arrays, lengths):
        return blocksparse_attention(*arrays, layout, cu_k_lens=lengths, implementation="xla")

    asked = (
        "'cu_q_lens': expected an array where there are as many queries as sequences and as keys, got None"
    )
    with pytest.raises(ValueError, match=asked):
        call(arrays, jnp.array([0, 2, 2]))
    with pytest.raises(ValueError, match=asked):
        jax.jit(call)(arrays, jnp.array([0, 1, 2]))
    np.testing.assert_array_equal(call(arrays, jnp.array([0, 1, 2])), 1.0)
    np.testing.assert_array_equal(jax.jit(call)([x[:1] for x in arrays], jnp.array([0, 1])), 1.0)
