"""`merge_states`: parts of a sequence's keys put together, and a prefix that sequences share."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.ragged_attention_torch import ragged_paged_attention as reference
from support import unchecked

import pallas_attn
from pallas_attn.testing import cases, compare

merge_states = unchecked(pallas_attn.merge_states)


def parts(seed: int = 0, count: int = 3):
    """(keys' logits, values, out and lse) of each part: 5 rows, 2 heads, parts of different sizes, one without keys."""
    rng = np.random.default_rng(seed)
    sizes = (4, 7, 3)[:count]
    logits = [rng.standard_normal((5, 2, n)) * 3 for n in sizes]
    values = [rng.standard_normal((2, n, 8)) for n in sizes]
    logits[1][2] = -np.inf
    for of_part in logits:
        of_part[4] = -np.inf
    return logits, values


def attend(logits: np.ndarray, values: np.ndarray, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(logits)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks))
    empty = np.isneginf(logits).all(-1)
    out = np.einsum("rhk,hkd->rhd", weights, values) / np.where(empty, 1, total)[..., None]
    return out, np.where(empty, -np.inf, np.log(np.where(empty, 1, total)))


@pytest.mark.parametrize("sinks", [None, np.array([1.5, -2.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_the_whole(count, sinks):
    logits, values = parts(count=count)
    states = [attend(*part) for part in zip(logits, values, strict=True)]
    for out, lse in states:
        out[np.isneginf(lse)] = np.nan  # what has no keys may hold anything
    flat = [jnp.asarray(x, jnp.float32) for state in states for x in state]
    got = merge_states(*flat, sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32))
    expected = attend(np.concatenate(logits, -1), np.concatenate(values, 1), sinks)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, np.array([1.5, -2.0])], ids=["plain", "sinks"])
def test_plus_infinity_is_no_keys_too(sinks):
    """As FlashMLA says it; NaN stays NaN."""
    logits, values = parts()
    states = [attend(*part) for part in zip(logits, values, strict=True)]
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    usual = merge_states(*(jnp.asarray(x, jnp.float32) for state in states for x in state), sinks=sinks)
    for out, lse in states:
        out[np.isneginf(lse)], lse[np.isneginf(lse)] = np.nan, np.inf
    flat = [jnp.asarray(x, jnp.float32) for state in states for x in state]
    for got, expected in zip(merge_states(*flat, sinks=sinks), usual, strict=True):
        np.testing.assert_array_equal(got, expected)
    _, pull = jax.vjp(functools.partial(merge_states, sinks=sinks), *flat)
    d_out, d_lse = pull(tuple(map(jnp.ones_like, usual)))[:2]
    assert np.isfinite(d_out).all()
    assert np.isfinite(d_lse).all()
    flat[1] = flat[1].at[0].set(jnp.nan)
    out, lse = merge_states(*flat, sinks=sinks)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert not np.isnan(lse[1:]).any()


def test_parts_by_the_functions_of_flash_mla():
    """Of a token's ids some are in one part, some in the other; of the last token all are in one."""
    rng = np.random.default_rng(0)
    query, pool = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((3, 4, 576), (20, 1, 576)))
    ids = rng.permuted(np.tile(np.arange(20, dtype=np.int32), (3, 1)), axis=1)[:, :8]
    both, first, second = (ids[:, None], ids[:, None, :5].copy(), ids[:, None, 5:].copy())
    second[2], both[2, :, 5:] = -1, -1
    attended = functools.partial(
        pallas_attn.flash_mla_sparse_fwd, query, pool, sm_scale=0.1, implementation="xla"
    )
    (out, _, lse), *states = (attended(jnp.asarray(x)) for x in (both, first, second))
    assert np.isposinf(states[1][2][2]).all()
    merged, merged_lse = merge_states(*(x for part in states for x in (part[0], part[2])))
    np.testing.assert_allclose(np.float32(merged), np.float32(out), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-5)


def test_order_does_not_matter_and_neither_does_magnitude():
    logits, values = parts()
    logits[0] += 80.0
    logits[2] -= 80.0
    states = [
        tuple(jnp.asarray(x, jnp.float32) for x in attend(*part)) for part in zip(logits, values, strict=True)
    ]
    one = merge_states(*states[0], *states[1], *states[2])
    other = merge_states(*states[2], *states[1], *states[0])
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[0][:4], states[0][0][:4], rtol=1e-5, atol=1e-6)


def test_gradients_are_finite_and_right():
    logits, values = parts(count=2)
    (out_a, lse_a), (out_b, lse_b) = (
        tuple(jnp.asarray(x, jnp.float32) for x in attend(*part)) for part in zip(logits, values, strict=True)
    )
    out_a, out_b = (jnp.where(jnp.isneginf(lse)[..., None], jnp.nan, out)
                    for out, lse in ((out_a, lse_a), (out_b, lse_b)))  # fmt: skip

    def loss(lse_a):
        out, lse = merge_states(out_a, lse_a, out_b, lse_b)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.cos(lse)))

    grad = jax.grad(loss)(lse_a)
    step = 1e-2 * jnp.asarray(np.random.default_rng(1).standard_normal(lse_a.shape), jnp.float32)
    difference = (loss(lse_a + step) - loss(lse_a - step)) / 2
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(jnp.vdot(grad, step), difference, rtol=2e-2)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_shared_prefix_is_read_once(implementation):
    """The recipe of the docstring against sequences that hold the prefix in their own tables."""
    prefix, page = 96, 16
    case = cases.RaggedCase(
        (prefix + 1, prefix + 40, prefix + 17), 4, 2, 64, page, "float32", q_lens=(1, 20, 1), spare_pages=0
    )
    data = inputs.make_ragged(case)
    columns = prefix // page
    data.block_tables[:, :columns] = data.block_tables[0, :columns]
    query, keys, values, tables, lens, cu, num_seqs = data.arguments()
    attention = functools.partial(
        pallas_attn.ragged_paged_attention, return_lse=True, implementation=implementation
    )

    @jax.jit
    def in_two(query, tables, lens, cu, num_seqs):
        one = jnp.stack([cu[0], cu[num_seqs]])
        shared = attention(query, keys, values, tables[:1], jnp.array([prefix]), one, causal=False)
        own = attention(query, keys, values, tables[:, columns:], lens - prefix, cu, num_seqs)
        return merge_states(*shared, *own)

    out, lse = in_two(query, tables, lens, cu, num_seqs)
    expected, expected_lse = reference(case, data)
    compare.assert_rows_close(out, expected, dtype="float32", case_id=case.id)
    compare.assert_lse_close(lse, expected_lse, dtype="float32", case_id=case.id)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: jnp.zeros((5, 2, 8), jnp.int32)}, TypeError, "'out_a': expected dtype bfloat16 or float16 or float32"),
        ({0: jnp.zeros(8)}, ValueError, r"'out_a': expected shape \[..., num_heads, head_dim\], got \[8\]"),
        ({1: jnp.zeros((5, 3))}, ValueError, r"'lse_a': expected shape \[5, 2\], got \[5, 3\]"),
        ({2: jnp.zeros((5, 2, 8), jnp.bfloat16)}, TypeError, "'out_b': expected dtype float32, got bfloat16"),
        ({3: jnp.zeros((5, 2), jnp.bfloat16)}, TypeError, "'lse_b': expected dtype float32, got bfloat16"),
        ({4: jnp.zeros((5, 2, 8))}, ValueError, "'others': expected out and lse of every further part, got 1 arrays"),
        ({0: [1.0]}, TypeError, "'out_a': expected an array, got list"),
    ],
)  # fmt: skip
def test_refusals(change, error, message):
    arguments = dict(enumerate([jnp.zeros((5, 2, 8)), jnp.zeros((5, 2))] * 2)) | change
    with pytest.raises(error, match=f"^merge_states: argument {message}"):
        merge_states(*arguments.values())


def test_sinks_are_checked():
    with pytest.raises(ValueError, match=r"'sinks': expected shape \[2\], got \[3\]"):
        merge_states(*[jnp.zeros((5, 2, 8)), jnp.zeros((5, 2))] * 2, sinks=jnp.zeros(3))
