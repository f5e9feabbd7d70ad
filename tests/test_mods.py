"""Score and mask functions by themselves: traced, evaluated, refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import mods
from pallas_attn.mods.derivative import slope
from pallas_attn.mods.evaluate import evaluate
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY, VARIABLES
from pallas_attn.mods.simplify import in_floats, within
from pallas_attn.mods.trace import trace

TOKENS, HEADS, BATCHES = 64, 8, 2
SLOPES = jnp.arange(8.0) / 8
IDS = jnp.arange(TOKENS, dtype=jnp.int32) // 7
TABLE = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128) / 64
FLAGS = IDS % 2 == 0
WIDE = jnp.zeros(64, jnp.complex64)
WEIGHT = jnp.float32(0.3)

SCORES = {
    "nothing": lambda s, b, h, q, k: s,
    "slopes": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "take": lambda s, b, h, q, k: s + jnp.take(TABLE[h], k - q + 64),
    "rows of rows": lambda s, b, h, q, k: s + TABLE[h][k - q + 64] * WEIGHT**0.5,
    "soft cap": lambda s, b, h, q, k: 5 * jnp.tanh(s / 5),
    "minus infinity": lambda s, b, h, q, k: jnp.where(IDS[k] > 3, s, -jnp.inf),
    "outside filled": lambda s, b, h, q, k: s + TABLE.at[h, k * 3].get(mode="fill", fill_value=0.5),
    "outside clipped": lambda s, b, h, q, k: s + TABLE[h, q * k],
    "from the end": lambda s, b, h, q, k: s + TABLE[h, -1 - k],
    "worked out outside": lambda s, b, h, q, k: s + jnp.cumsum(SLOPES)[3] + jnp.arange(8.0)[h],
    "a row that is fixed": lambda s, b, h, q, k: s * TABLE.at[1, k].get(mode="fill"),
    "branches": lambda s, b, h, q, k: jax.lax.cond(q > k, lambda x: x * 2, lambda x: x**3, s),
    "functions": lambda s, b, h, q, k: jax.nn.silu(s) + jnp.clip(s, -1, 1) + 2.0 ** (-h.astype(jnp.float32)),
    "a bucket": lambda s, b, h, q, k: s + TABLE[h, jnp.where(q - k < 16, jnp.maximum(q - k, 0), 16)],
}
MASKS = {
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k) | FLAGS[q],
    "whole numbers": lambda b, h, q, k: (q // 16 == k // 16) & (q % 3 == 0) | ((q - k) % 5 == 1),
    "everything": lambda b, h, q, k: True,
    "bits": lambda b, h, q, k: ((q ^ k) & 4 == 0) | ((q << 2) > (k >> 1)),
    "a captured mask": lambda b, h, q, k: (TABLE > 3)[h, q + k],
}


def _cases():
    return [("score_mod", name) for name in SCORES] + [("mask_mod", name) for name in MASKS]


@pytest.mark.parametrize(("argument", "name"), _cases())
def test_evaluates_as_the_function(argument, name):
    mod = (SCORES if argument == "score_mod" else MASKS)[name]
    rng = np.random.default_rng(0)
    score = rng.normal(size=400).astype(np.float32)
    places = [jnp.asarray(rng.integers(0, most, 400), jnp.int32) for most in (BATCHES, HEADS, TOKENS, TOKENS)]
    known = dict(zip(VARIABLES, (score, *places), strict=True))
    want = jnp.broadcast_to(jax.vmap(mod)(*(known[i] for i in VARIABLES[argument == "mask_mod" :])), 400)
    program, arrays = trace("f", argument, mod)
    lengths = tuple(zip((BATCH, HEAD, QUERY, KEY), (BATCHES, HEADS, TOKENS, TOKENS), strict=True))
    for one in (program, within(program, lengths)):
        (got,) = evaluate(one, arrays, known)
        np.testing.assert_allclose(jnp.broadcast_to(got, 400), want, rtol=1e-6, atol=1e-6)


def test_is_known_again():
    """What is compiled hangs on what a function does, not on which function or which arrays it is."""

    def mod(slopes):
        return lambda s, b, h, q, k: s + slopes[h] * (k - q)

    one, other = (trace("f", "score_mod", mod(jnp.arange(8.0) + i)).program for i in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != trace("f", "score_mod", mod(jnp.arange(9.0))).program
    assert one != trace("f", "score_mod", lambda s, b, h, q, k: s + SLOPES[h] * (q - k)).program


def test_lengths_leave_out_what_follows_from_them():
    def steps(argument, mod):
        lengths = ((BATCH, BATCHES), (HEAD, HEADS), (QUERY, TOKENS), (KEY, TOKENS))
        return [step.name for step in within(trace("f", argument, mod).program, lengths).steps]

    assert steps("score_mod", SCORES["slopes"]) == ["read", "sub", "convert", "mul", "add"]
    assert steps("score_mod", SCORES["take"]) == ["sub", "add", "read", "add"]
    assert steps("mask_mod", lambda b, h, q, k: (k < TOKENS) & (q >= k)) == ["ge"]


def test_a_score_that_is_shifted_has_no_slope():
    """The sum that corrects gradients of queries is then of their logits' alone."""
    heads = jnp.ones(4)
    for mod, results in ((mods.alibi(heads), 1), (mods.gate(heads), 2), (mods.soft_cap(5.0), 2)):
        assert len(slope(trace("f", "score_mod", mod).program).results) == results


def test_distances_may_be_floats_from_the_beginning():
    """Where they are float32's exactly, and nothing else hangs on them."""

    def steps(mod, tokens=TOKENS):
        lengths = ((BATCH, BATCHES), (HEAD, HEADS), (QUERY, tokens), (KEY, tokens))
        traced = trace("f", "score_mod", mod)
        whole = within(traced.program, lengths)
        floats = in_floats(whole, lengths)
        at = jnp.arange(TOKENS)
        known = dict(zip(VARIABLES, (jnp.ones(()), jnp.int32(1), jnp.int32(2), at[:, None], at), strict=True))
        results = [evaluate(one, traced.arrays, known)[0] for one in (whole, floats)]
        np.testing.assert_array_equal(*results)
        return None if floats == whole else [(step.name, step.dtype) for step in floats.steps]

    def clipped(s, b, h, q, k):
        return s - SLOPES[h] * jnp.minimum(jnp.abs(q - k), 20)

    found = steps(clipped)
    assert found is not None
    assert found.count(("convert", "float32")) == 2
    assert ("sub", "int32") not in found
    assert ("min", "float32") in found
    assert steps(clipped, tokens=2**24 + 1) is not None
    assert steps(clipped, tokens=2**24 + 2) is None
    assert steps(SCORES["a bucket"]) is None
    assert steps(lambda s, b, h, q, k: s + TABLE[h, q - k + 64] * (q - k)) is None
    assert steps(lambda s, b, h, q, k: s * jnp.float32(k)) is None


def test_tracers_are_captured():
    def loss(slopes):
        program, arrays = trace("f", "score_mod", lambda s, b, h, q, k: s + jnp.exp(slopes)[h])
        known = dict(zip(VARIABLES, (jnp.float32(1), *jnp.arange(4)), strict=True))
        return evaluate(program, arrays, known)[0]

    gradient = jax.jit(jax.grad(loss))(SLOPES)
    np.testing.assert_allclose(gradient, np.where(np.arange(8) == 1, np.exp(SLOPES), 0), rtol=1e-6)


REFUSED = {
    "no function": (
        "score_mod",
        3,
        r"a function of \(score, batch, head, q_idx, kv_idx\), got 3 of type int",
    ),
    "too few": ("mask_mod", lambda q, k: q > k, r"of \(batch, head, q_idx, kv_idx\), got one of \(q, k\)"),
    "not bool": ("mask_mod", lambda b, h, q, k: q - k, "that returns a bool scalar, got int32"),
    "not float32": (
        "score_mod",
        lambda s, b, h, q, k: s.astype(jnp.bfloat16),
        "a float32 scalar, got bfloat16",
    ),
    "two": ("score_mod", lambda s, b, h, q, k: (s, s), "scalar, got float32.* and float32"),
    "a sum": (
        "score_mod",
        lambda s, b, h, q, k: s + TABLE[h].sum(),
        "elementwise .* got the primitive 'reduce_sum'",
    ),
    "a slice": (
        "score_mod",
        lambda s, b, h, q, k: s + (TABLE[h] * s)[k],
        "single elements of captured arrays",
    ),
    "all of it": ("mask_mod", lambda b, h, q, k: jnp.any(q == IDS), "single elements .* shape .64"),
    "a loop": (
        "score_mod",
        lambda s, b, h, q, k: s + jax.lax.fori_loop(0, q, lambda i, x: x + 1, 0.0),
        "got the primitive 'while'",
    ),
    "erf": ("score_mod", lambda s, b, h, q, k: jax.lax.erf(s), "got the primitive 'erf'"),
    "a wide array": (
        "mask_mod",
        lambda b, h, q, k: WIDE[k].real > 0,
        "captured arrays of bool, .* got complex64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_words(name):
    argument, mod, words = REFUSED[name]
    with pytest.raises(
        (TypeError, ValueError), match=f"flash_attention: argument '{argument}': expected .*{words}"
    ):
        trace("flash_attention", argument, mod)
