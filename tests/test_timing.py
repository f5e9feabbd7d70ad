"""The loop of calls that tuning and benchmarks time: nothing of it may be hoisted, dropped or kept."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_attn.tuning import timing

NUM_SEQS, DIM = 3, 40
WEIGHTS = jnp.ones((DIM, DIM))
SETS = [jnp.full(NUM_SEQS, float(i)) for i in range(5)]
LENGTHS = jnp.arange(NUM_SEQS, dtype=jnp.int32)


def call(table: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two products for the output [NUM_SEQS, DIM]; the witness [NUM_SEQS] needs the first only."""
    logits = jnp.sin(table + lengths)[:, None] * WEIGHTS[:NUM_SEQS] @ WEIGHTS
    return jnp.tanh(logits) @ WEIGHTS, logits[:, 0]


@pytest.mark.parametrize("plain", [False, True])
def test_the_loop_gives_the_first_and_the_last_sets_outputs(plain):
    outs = jax.jit(functools.partial(timing.looped, call, 2, plain=plain))(SETS, LENGTHS)
    for out, table in zip(outs, (SETS[0], SETS[-1]), strict=True):
        assert jnp.allclose(out, call(table, LENGTHS)[0], rtol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
def test_the_loop_keeps_no_output(plain):
    jaxpr = jax.make_jaxpr(functools.partial(timing.looped, call, 2, plain=plain))(SETS, LENGTHS)
    (loop,) = [equation for equation in jaxpr.eqns if equation.primitive.name in ("scan", "while")]
    carried = [variable.aval.shape for variable in loop.outvars]
    assert (NUM_SEQS, DIM) not in carried
    assert (NUM_SEQS,) in carried, "but the lengths"


def test_every_call_stays_where_it_is_and_plain_ones_whole():
    def products(plain: bool) -> int:
        loop = jax.jit(functools.partial(timing.looped, call, 7, plain=plain))
        text = loop.lower(SETS, LENGTHS).compile().as_text() or ""
        return text.count(" dot(")

    behind = 2 * timing.CHECKED_CALLS
    assert products(plain=True) == 2 + behind, "one copy for all sets"
    assert products(plain=False) == len(SETS) + behind, "of jnp the second product would be dropped"


def test_calls_without_lengths_stay_too():
    def product(given, _):
        out = jnp.tanh(given[0]) @ given[1]
        return out, out[:1]

    sets = [(WEIGHTS[:2] + i, WEIGHTS) for i in range(3)]
    loop = jax.jit(functools.partial(timing.looped, product, 7, lengths=None))
    compiled = loop.lower(sets=sets).compile()
    text = compiled.as_text() or ""
    assert text.count(" dot(") == len(sets) + timing.CHECKED_CALLS
    name = text.split("body=%")[1].split(",")[0]
    (body,) = [part for part in text.split("\n\n") if part.lstrip().startswith(f"%{name} ")]
    assert body.count("kind=kCustom") + body.count(" dot(") == len(sets), "in every round"
    assert " copy(" not in body
    first, last = compiled(sets=sets)
    assert jnp.allclose(first, product(sets[0], None)[0])
    assert jnp.allclose(last, product(sets[-1], None)[0])


def test_a_set_is_written_to_where_the_compiler_does_not_know():
    """For the GPU it copies the whole array else, in every call."""
    sets = (jnp.ones((1, 5, 2)), jnp.ones(7, jnp.int32))
    text = jax.jit(timing._touched).lower(sets, jnp.array(False)).compile().as_text() or ""
    (update,) = [line for line in text.splitlines() if " dynamic-update-slice(" in line]
    assert re.search(r"\(%[\w.]+, %[\w.]+, %constant[\w.]*, %(?!constant)[\w.]+, %constant", update), update
    for nothing in (False, True):  # the second is never so
        found, whole = timing._touched(sets, jnp.array(nothing))
        assert jnp.sum(found) == 10 + nothing
        assert whole is sets[1]


def test_sets_and_rounds_follow_from_what_a_call_takes():
    assert timing.num_sets(1) == timing.MOST_SETS
    assert timing.num_sets(timing.ROTATE_BYTES // 7) == 8
    assert timing.num_sets(2 * timing.ROTATE_BYTES) == 1
    assert timing.num_rounds(timing.BURST_SECONDS / 12, 4) == 3
    assert timing.num_rounds(1.0, 4) == 1
    assert timing.num_calls(3, 4) == 14
