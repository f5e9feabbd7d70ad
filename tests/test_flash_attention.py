"""Numerics of `flash_attention` and of its gradients against float64 torch: xla, and the kernels in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flash_inputs import FLASH_CASES, SMALL_TILES, make
from jax.test_util import check_grads
from references.flash_attention_torch import GRADIENTS
from references.flash_attention_torch import flash_attention as reference
from support import ON_GPU

from pallas_attn import flash_attention
from pallas_attn.ops.flash_attention import reference as by_xla
from pallas_attn.testing import compare
from pallas_attn.testing.flash_attention import FlashCase

IMPLEMENTATIONS = ["xla", "interpret", *ON_GPU]
# The newest jax has the case that has everything.
MARKS = pytest.mark.once
CASES = [*(pytest.param(case, marks=MARKS) for case in FLASH_CASES[:-1]), FLASH_CASES[-1]]
# A row's error over the root mean square of its array's rows; ten to twenty times what rounding alone leaves.
GRADIENT_CAP = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


def run(case: FlashCase, data: dict[str, np.ndarray], implementation: str) -> dict[str, jax.Array]:
    """What the reference returns, under the same names."""
    arrays = {name: jnp.asarray(array) for name, array in data.items()}
    d_out, d_lse = arrays.pop("d_out").astype(jnp.float32), arrays.pop("d_lse")
    if "q_ids" in arrays:
        arrays["segment_ids"] = arrays.pop("q_ids"), arrays.pop("kv_ids")
    floats = {name: arrays.pop(name) for name in GRADIENTS if name in arrays}
    config = SMALL_TILES if implementation == "interpret" else None

    @jax.jit
    def both(floats, arrays):
        def loss(floats):
            others = {
                name: array
                for name, array in (floats | arrays).items()
                if name not in ("query", "key", "value")
            }
            out, lse = flash_attention(
                *(floats[name] for name in ("query", "key", "value")),
                **others,
                **case.options,
                return_lse=True,
                implementation=implementation,
                config=config,
            )
            finite = jnp.where(jnp.isneginf(lse), 0.0, lse)
            return jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(finite * d_lse), (out, lse)

        return jax.grad(loss, has_aux=True)(floats)

    gradients, (out, lse) = both(floats, arrays)
    assert {name: g.dtype for name, g in gradients.items()} == {name: x.dtype for name, x in floats.items()}
    assert (out.dtype, lse.dtype) == (jnp.dtype(case.dtype), jnp.float32)
    return {"out": out, "lse": lse} | {f"d_{name}": gradient for name, gradient in gradients.items()}


def assert_gradient_close(name: str, got, expected: dict[str, np.ndarray], case: FlashCase) -> None:
    got, right = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (got, expected[name]))
    # A sink's gradient is one sum over all rows. Its terms may cancel to a thousandth of their size, but their rounding
    # does not: it is measured by what the sum of as many independent terms would be.
    terms = expected["d_sinks_by_row"].reshape(1, -1) if name == "d_sinks" else right
    typical = np.sqrt(np.mean(np.sum(terms**2, axis=-1)))
    worst = np.linalg.norm(got - right, axis=-1).max() / typical
    assert worst <= GRADIENT_CAP[case.dtype], f"{case.id}: {name} is off by {worst:.1e}"


def check(case: FlashCase, data: dict[str, np.ndarray], results: dict[str, jax.Array]) -> None:
    expected = reference(case, data)
    rounded = reference(case, data, rounding=getattr(torch, case.dtype))
    compare.assert_rows_close(
        results["out"], expected["out"], dtype=case.dtype, case_id=case.id, rounded_reference=rounded["out"]
    )
    compare.assert_lse_close(results["lse"], expected["lse"], dtype=case.dtype, case_id=case.id)
    for name in results.keys() - {"out", "lse"}:
        assert_gradient_close(name, results[name], expected, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(case, implementation):
    data = make(case)
    check(case, data, run(case, data, implementation))


EVERYTHING = FLASH_CASES[-1]


@pytest.mark.once
@pytest.mark.parametrize(
    "option", ["causal", "sliding_window", "q_offset", "softcap", "sinks", "bias", "mask", "segments"]
)
@pytest.mark.control
def test_a_feature_that_is_ignored_is_caught(option):
    """Negative control: of the comparison above, each of whose parts must object alone."""
    ignored = EVERYTHING.without(option)
    data = make(EVERYTHING)
    kept = {"sinks": ["sinks"], "bias": ["bias"], "mask": ["mask"], "segments": ["q_ids", "kv_ids"]}.get(
        option, []
    )
    wrong = reference(ignored, {name: array for name, array in data.items() if name not in kept})
    right = reference(EVERYTHING, data)
    with pytest.raises(AssertionError):
        compare.assert_rows_close(wrong["out"], right["out"], dtype="bfloat16", case_id=EVERYTHING.id)
    for name in ("d_query", "d_key", "d_value"):
        with pytest.raises(AssertionError):
            assert_gradient_close(name, wrong[name], right, dataclasses.replace(EVERYTHING, dtype="bfloat16"))


@pytest.mark.once
@pytest.mark.parametrize("name", ["d_query", "d_key", "d_value", "d_sinks", "d_bias"])
@pytest.mark.control
def test_gradients_of_zero_or_of_half_the_heads_are_caught(name):
    expected = reference(EVERYTHING, make(EVERYTHING))
    for wrong in (np.zeros_like(expected[name]), expected[name] / 2):
        with pytest.raises(AssertionError):
            assert_gradient_close(name, wrong, expected, dataclasses.replace(EVERYTHING, dtype="bfloat16"))


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_derivatives_agree_with_differences(implementation):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in
                         ((1, 9, 2, 16), (1, 11, 1, 16), (1, 11, 1, 16)))  # fmt: skip
    bias, sinks = jnp.asarray(rng.standard_normal((1, 2, 9, 11)), jnp.float32), jnp.ones(2)

    @jax.jit
    def call(query, key, value, bias, sinks):
        out, lse = flash_attention(query, key, value, bias=bias, sinks=sinks, causal=True, q_offset=2, softcap=2.0,
                                   return_lse=True, implementation=implementation)  # fmt: skip
        return out, lse

    check_grads(call, (query, key, value, bias, sinks), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def packed(length: int, *documents: int) -> jnp.ndarray:
    """Ids [1, length] of documents of these lengths; what is left is one more."""
    ids = np.searchsorted(np.cumsum(documents), np.arange(length), side="right")
    return jnp.asarray(ids[None], jnp.int32)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_do_not_touch_each_other(implementation, causal):
    """Outputs and gradients of a document are the same to the last bit, whatever its neighbours hold: numbers or NaN.

    They meet within tiles, on both sides of the one that is looked at. A soft cap's derivative must not bring NaN back.
    """
    length, begin, end = 150, 37, 101
    ids = packed(length, begin, end - begin)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, length, heads, 32)).astype(np.float32) for heads in (4, 2, 2, 4)]
    config = SMALL_TILES if implementation == "interpret" else None
    softcap = 3.0 if causal else None

    @jax.jit
    def both(query, key, value, d_out):
        call = functools.partial(flash_attention, segment_ids=ids, causal=causal, return_lse=True, softcap=softcap,
                                 implementation=implementation, config=config)  # fmt: skip
        (out, lse), pull = jax.vjp(call, query, key, value)
        return out, lse, *pull((d_out, jnp.ones_like(lse)))

    def mine(arrays) -> list[np.ndarray]:
        return [np.asarray(x)[:, begin:end] for x in both(*arrays)]

    expected = mine(arrays)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in expected)
    for other in (7.0, np.nan, np.inf):
        for array in arrays:
            array[:, :begin] = array[:, end:] = other
        for got, wanted in zip(mine(arrays), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_that_no_query_sees_may_hold_anything(implementation):
    """Before the window of the first query and behind the last query, in tiles of which others are seen."""
    rng = np.random.default_rng(0)
    shapes = [(1, length, heads, 32) for length, heads in ((12, 4), (40, 2), (40, 2), (12, 4))]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    config = SMALL_TILES if implementation == "interpret" else None

    @jax.jit
    def both(query, key, value, d_out):
        call = functools.partial(flash_attention, causal=True, sliding_window=7, q_offset=14, softcap=3.0,
                                 implementation=implementation, config=config)  # fmt: skip
        out, pull = jax.vjp(call, query, key, value)
        return out, *pull(d_out)

    expected = both(*arrays)
    unseen = np.r_[:8, 26:40]
    assert np.abs(expected[2][:, 8:26]).min(axis=(2, 3)).all()
    assert (expected[2][:, unseen] == 0).all()
    for nothing in (np.nan, np.inf):
        for array in arrays[1:3]:
            array[:, unseen] = nothing
        for got, wanted in zip(both(*arrays), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.once
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_lies_behind_cu_q_lens_is_padding(implementation):
    data = {name: jnp.asarray(x) for name, x in make(FlashCase(50, 50, 2, 1, 16, batch=1)).items()}
    lens = jnp.array([0, 0, 17, 40, 40], jnp.int32)
    config = SMALL_TILES if implementation == "interpret" else None

    @jax.jit
    def call(query, key, value, **packing):
        return flash_attention(query, key, value, causal=True, return_lse=True, implementation=implementation,
                               config=config, **packing)  # fmt: skip

    arrays = [data[name] for name in ("query", "key", "value")]
    out, lse = call(*(x.at[:, 40:].set(jnp.nan) for x in arrays), cu_q_lens=lens)
    expected, expected_lse = call(*arrays, segment_ids=packed(50, 17, 23))
    # Not bit for bit: the tables are made in other ways, and the CPU's compiler fuses that with what is interpreted.
    np.testing.assert_allclose(out[:, :40], expected[:, :40], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse[:, :40], expected_lse[:, :40], rtol=1e-6, atol=1e-6)
    assert (out[:, 40:] == 0).all()
    assert (lse[:, 40:] == -jnp.inf).all()


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("offset", [2**30, 2**30 - 4, 2**30 - 8, 0, -(2**30)])
def test_bounds_beyond_all_tokens(offset, implementation):
    """A query sees every key, however far its window would reach, and has their mean."""
    query, key = jnp.ones((1, 8, 2, 16)), jnp.ones((1, 8, 1, 16))
    options = dict(sliding_window=(2**31 - 1, 2**31 - 1), q_offset=offset, implementation=implementation)
    config = SMALL_TILES if implementation == "interpret" else None

    def total(value):
        return flash_attention(query, key, value, **options, config=config).sum()

    value = jnp.arange(8.0)[None, :, None, None] * key
    found, gradient = jax.value_and_grad(total)(value)
    np.testing.assert_allclose(found, 8 * 2 * 16 * 3.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2.0, rtol=1e-6)


def test_ranks_may_not_be_promoted():
    with jax.numpy_rank_promotion("raise"):
        query, key = jnp.ones((1, 8, 2, 16)), jnp.ones((1, 8, 1, 16))
        out = flash_attention(query, key, key, causal=True, implementation="xla")
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


def test_a_call_outside_jit_is_compiled_once(monkeypatch):
    """By xla too, the derivative's passes included."""
    made = []
    chunks = by_xla.KeyTiles
    monkeypatch.setattr(by_xla, "KeyTiles", lambda *args: made.append(args) or chunks(*args))
    query, bias = jnp.ones((1, 9, 3, 16)), jnp.ones((1, 3, 9, 9))  # a shape of no other test
    for compiled in (3, 0):
        made.clear()
        jax.grad(lambda *x: flash_attention(x[0], x[0], x[0], bias=x[1], implementation="xla").sum(), (0, 1))(
            query, bias
        )
        assert len(made) == compiled


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_bias_of_one_column_has_a_gradient_that_is_rounded_once(implementation):
    """It moves log-sum-exps alone; what its row of keys adds up to would be off by some roundings."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 128, 4, 16)), jnp.bfloat16) for _ in range(3))
    weight = jnp.asarray(rng.standard_normal((1, 128, 4)), jnp.float32)
    config = SMALL_TILES if implementation == "interpret" else None

    def loss(bias):
        options = dict(bias=bias, return_lse=True, implementation=implementation, config=config)
        return jnp.sum(weight * flash_attention(query, key, value, **options)[1])

    found = jax.grad(loss)(jnp.zeros((1, 4, 1, 1), jnp.bfloat16))
    expected = weight.sum(axis=1).reshape(1, 4, 1, 1)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8)
