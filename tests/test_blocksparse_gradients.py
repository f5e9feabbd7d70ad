"""Gradients of `blocksparse_attention` against float64 torch, on the CPU: xla, and the kernels in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import make
from references.blocksparse_torch import gradients as reference
from support import ON_GPU

import pallas_attn
from pallas_attn import LocalStride
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig, builders
from pallas_attn.testing.blocksparse import BlockSparseCase, layout_of

KERNELS = ["interpret", *ON_GPU]
# A row's error over the root mean square of its array's rows; ten to twenty times what rounding alone leaves.
CAP = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}
# Each kernel's tiles are others, and smaller than blocks, so that walks have beginnings, middles and ends.
SMALL = dict(dq_block_q=16, dq_block_kv=16, dkv_block_q=16, dkv_block_kv=32)

CASES = [
    BlockSparseCase(
        ((70, 70), (1, 50), (20, 90), (0, 0), (33, 33)), 4, 2, 32, 0.5, dtype="float32", padding=3
    ),
    BlockSparseCase(((1, 61), (1, 1), (1, 0), (1, 40)), 4, 1, 16, 0.6, 16, 16, dtype="float32", softcap=2.0),
    BlockSparseCase(((97, 97),), 2, 2, 40, LocalStride(32, 1, 3, 1), 32, 16, dtype="bfloat16"),
    BlockSparseCase(((50, 80), (40, 40)), 2, 1, 32, "window", 16, 32, dtype="float16"),
    BlockSparseCase(((90, 90),), 3, 1, 64, "dense", dtype="float32"),
]


@functools.cache
def inputs(case):
    data = make(case)
    # What no query sees has no gradient; here it need not be outrageous.
    data.value[np.abs(data.value.astype(np.float32)) > 100] = 0.5
    rng = np.random.default_rng(1)
    shape = data.query.shape
    return (
        data,
        rng.standard_normal(shape).astype(data.query.dtype),
        rng.standard_normal(shape[:2], np.float32),
    )


@functools.cache
def gradient(case, implementation):
    """A function of (query, key, value, d_out, d_lse, layout) -> ((out, lse), gradients)."""
    data, *_ = inputs(case)
    lengths = data.lengths()
    config = BlockSparseConfig(block_q=16, block_kv=16, decode_block_kv=16, **SMALL)
    call = functools.partial(
        pallas_attn.blocksparse_attention,
        softcap=case.softcap,
        return_lse=True,
        implementation=implementation,
        config=config if implementation == "interpret" else None,
        **lengths,
    )

    @jax.jit
    def both(floats, d_out, d_lse, layout):
        results, vjp = jax.vjp(lambda floats: call(*floats, layout), floats)
        empty = jnp.isneginf(results[1])
        return results, vjp((d_out, jnp.where(empty, 0.0, d_lse)))[0]

    return both


def check(case, got, expected):
    for name, ours in zip(("query", "key", "value"), got, strict=True):
        theirs = expected[name]
        assert ours.dtype == jnp.dtype(case.dtype)
        ours = np.asarray(ours, np.float64)
        scale = np.sqrt(np.mean(np.sum(theirs**2, axis=-1)))
        assert scale > 0.1, name
        error = np.max(np.linalg.norm(ours - theirs, axis=-1)) / scale
        assert error < CAP[case.dtype], f"{case.id}: d_{name}: {error:.1e}"


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_match_float64(case, implementation):
    data, d_out, d_lse = inputs(case)
    _, got = gradient(case, implementation)(data.arguments(), d_out, d_lse, layout_of(case))
    expected = reference(case, data, d_out, d_lse)
    check(case, got, expected)
    if case.pattern != "dense":
        # The negative control: gradients of dense attention are others.
        dense = reference(dataclasses.replace(case, pattern="dense"), data, d_out, d_lse)
        with pytest.raises(AssertionError):
            check(case, got, dense)


@pytest.mark.once
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_sequences_gradients_do_not_change_in_a_bit_with_its_neighbours(implementation):
    case = CASES[0]
    data, d_out, d_lse = inputs(case)
    both, layout = gradient(case, implementation), layout_of(case)
    results, got = both(data.arguments(), d_out, d_lse, layout)
    own_q, own_k = np.arange(len(data.query)), np.arange(len(data.key))
    for seq in (0, 2, 4):
        changed = {name: np.array(getattr(data, name)) for name in ("query", "key", "value")}
        other_q = (own_q < data.cu_q_lens[seq]) | (own_q >= data.cu_q_lens[seq + 1])
        other_k = (own_k < data.cu_k_lens[seq]) | (own_k >= data.cu_k_lens[seq + 1])
        changed["query"][other_q] = changed["key"][other_k] = changed["value"][other_k] = np.nan
        towards = np.where(other_q[:, None, None], np.nan, d_out)
        again, other = both(tuple(map(jnp.asarray, changed.values())), towards, d_lse, layout)
        for one, two in zip((*results, got[0]), (*again, other[0]), strict=True):
            np.testing.assert_array_equal(one[~other_q], two[~other_q])
        for one, two in zip(got[1:], other[1:], strict=True):
            assert np.abs(one[~other_k]).max() > 0.1
            np.testing.assert_array_equal(one[~other_k], two[~other_k])


@pytest.mark.parametrize("implementation", KERNELS)
def test_gradients_of_rows_that_cannot_be_right_are_nan(implementation):
    case = CASES[4]
    data, d_out, d_lse = inputs(case)
    layout = layout_of(case)
    both = gradient(case, implementation)
    _, good = both(data.arguments(), d_out, d_lse, layout)
    columns = np.array(layout.columns)
    columns[0, layout.row_pointers[0, 2]] = -5  # of row 2, what was block 0
    _, (d_query, d_key, d_value) = both(
        data.arguments(), d_out, d_lse, dataclasses.replace(layout, columns=columns)
    )
    np.testing.assert_array_equal(np.isnan(d_query).all(axis=(1, 2)), np.arange(90) >= 64)
    np.testing.assert_array_equal(d_query[:64], good[0][:64])
    # Blocks that the row still lists; block 0 has lost it.
    for spoiled in (d_key, d_value):
        np.testing.assert_array_equal(np.isnan(spoiled).all(axis=(1, 2)), np.arange(90) >= 32)


@pytest.mark.once
def test_gradients_in_pages_are_refused_by_the_kernels():
    case = BlockSparseCase(((20, 40),), 2, 1, 32, 0.6, dtype="float32", page_size=16)
    data = make(case)
    query, key, value = data.arguments()

    def loss(query, implementation):
        call = pallas_attn.blocksparse_attention
        return call(query, key, value, layout_of(case), **data.lengths(), implementation=implementation).sum()

    with pytest.raises(NotImplementedError, match=r"^blocksparse_attention with keys in pages: .*'xla' has"):
        jax.grad(loss)(query, "interpret")
    assert np.abs(jax.grad(loss)(query, "xla")).max() > 0.01


@pytest.mark.once
@pytest.mark.slow
def test_checkpoint_scan_and_vmap_of_gradients():
    """Each layer's query is the one before's output; of two batches at once; as xla has it."""
    case = BlockSparseCase(((24, 24), (9, 20)), 2, 1, 16, 0.7, 16, 16, dtype="float32")
    data, *_ = inputs(case)
    layout, lengths = layout_of(case), data.lengths()
    query, key, value = (jnp.stack([x, x[::-1]]) for x in data.arguments())

    def loss(query, key, value, implementation):
        @jax.checkpoint
        def layer(x, kv):
            out = pallas_attn.blocksparse_attention(x, *kv, layout, **lengths, implementation=implementation)
            return x + out, None

        kv = tuple(jnp.stack([x, 2 * x]) for x in (key, value))
        return jnp.sum(jnp.sin(jax.lax.scan(layer, query, kv)[0]))

    got, expected = (
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, implementation=name), argnums=(0, 1, 2))))(
            query, key, value
        )
        for name in ("interpret", "xla")
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("implementation", [*KERNELS, "xla"])
@pytest.mark.parametrize("queries", [24, 1])
def test_keys_that_no_query_sees_may_hold_anything(queries, implementation):
    """A tile's end that has no queries stands in a later row, which sees them."""
    mask = np.zeros((1, 4, 4), bool)
    mask[0, :, 0] = mask[0, 2, 1] = True
    layout = builders.from_block_mask(mask, block_size=16)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((n, 1, 16)).astype(np.float32) for n in (queries, 32, 32)]
    lengths = dict(cu_q_lens=jnp.array([0, queries]), cu_k_lens=jnp.array([0, 32]))

    def gradients(*arrays):
        def loss(*arrays):
            options = dict(lengths, implementation=implementation)
            return jnp.sum(jnp.sin(pallas_attn.blocksparse_attention(*arrays, layout, **options)))

        return jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, arrays))

    expected = gradients(*arrays)
    assert min(float(jnp.abs(x).max()) for x in expected) > 1e-3
    for array in arrays[1:]:
        array[16:] = np.nan
    for got, wanted in zip(gradients(*arrays), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
