"""Numerics of `mla_prefill` in both forms, against float64 in numpy; and what it refuses."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import COMPILED, unchecked

import pallas_attn
from pallas_attn.ops.mla_prefill import api, projected

FORMS = ("absorbed", "projected", None)
HEADS, NOPE, VALUE, PAGE_SIZE = 3, 32, 16, 16
# A chunk behind a context, no query, decoding, a prompt, an empty sequence, decoding.
Q_LENS, LENS, PADDING, SPARE = (40, 0, 1, 33, 2, 1), (230, 40, 90, 33, 0, 129), 3, 2
SCALE = (NOPE + 64) ** -0.5


def make(dtype=jnp.float32, *, seed=0):
    """(positional arguments, up-projections), as numpy: poison wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    room, num_tokens = len(LENS) + SPARE, sum(Q_LENS) + PADDING
    used, num_pages = inputs.block_tables(rng, LENS, PAGE_SIZE, 2)
    tables = rng.choice(inputs.GARBAGE_IDS, size=(room, used.shape[1])).astype(np.int32)
    tables[: len(LENS)] = used
    pool = np.full((num_pages, PAGE_SIZE, 1, 576), np.nan)
    for seq, length in enumerate(LENS):
        page, offset = inputs.token_places(used[seq], length, PAGE_SIZE)
        pool[page, offset, 0] = rng.standard_normal((length, 576))
    lens, cu = (rng.choice(inputs.GARBAGE_IDS, size=size).astype(np.int32) for size in (room, room + 1))
    lens[: len(LENS)] = LENS
    cu[: len(LENS) + 1] = np.cumsum([0, *Q_LENS])
    query = rng.standard_normal((num_tokens, HEADS, NOPE + 64))
    query[cu[len(LENS)] :] = np.nan
    up = {
        "key_up": rng.standard_normal((HEADS, NOPE, 512)) * 512**-0.5,
        "value_up": rng.standard_normal((HEADS, VALUE, 512)) * 512**-0.5,
    }
    cast = functools.partial(np.asarray, dtype=jnp.dtype(dtype))
    return [cast(query), cast(pool), tables, lens, cu, np.int32(len(LENS))], {
        k: cast(v) for k, v in up.items()
    }


def expected(arguments, up):
    """(out, lse) in float64, one token and head at a time."""
    query, pool, tables, lens, cu, num_seqs = arguments
    query, pool = query.astype(np.float64), pool.astype(np.float64)
    out, lse = np.zeros((*query.shape[:2], VALUE)), np.full(query.shape[:2], -np.inf)
    for seq in range(num_seqs):
        page, offset = inputs.token_places(tables[seq], int(lens[seq]), PAGE_SIZE)
        token = pool[page, offset, 0]
        for row in range(cu[seq], cu[seq + 1]) if lens[seq] else ():
            seen = token[: lens[seq] - (cu[seq + 1] - row) + 1]
            for head in range(HEADS):
                keys = np.concatenate(
                    [seen[:, :512] @ up["key_up"][head].astype(np.float64).T, seen[:, 512:]], 1
                )
                logits = keys @ query[row, head] * SCALE
                lse[row, head] = np.logaddexp.reduce(logits)
                values = seen[:, :512] @ up["value_up"][head].astype(np.float64).T
                out[row, head] = np.exp(logits - lse[row, head]) @ values
    return out, lse


def run(arguments, up, implementation="xla", **options):
    call = functools.partial(
        unchecked(pallas_attn.mla_prefill), return_lse=True, implementation=implementation, **options
    )
    return jax.jit(call)(*map(jnp.asarray, arguments), **jax.tree.map(jnp.asarray, up))


@pytest.fixture
def small_workspace(monkeypatch):
    """Contexts fill it more than once, and share it."""
    monkeypatch.setattr(projected, "WORKSPACE_TOKENS", 128)


@pytest.mark.parametrize(
    ("form", "implementation"),
    [
        *((form, "xla") for form in FORMS),
        pytest.param(None, "interpret", marks=pytest.mark.once),  # some sequences in each form
        *(pytest.param(form, name, marks=pytest.mark.gpu) for form in FORMS for name in COMPILED),
    ],
)
def test_matches_reference(form, implementation, monkeypatch, small_workspace):
    monkeypatch.setattr(api, "least_projected", lambda *_: 20)  # some sequences each
    dtype = "bfloat16" if implementation in COMPILED else "float32"
    arguments, up = make(dtype)
    out, lse = run(arguments, up, implementation, form=form)
    right, right_lse = expected(arguments, up)
    # In bf16 latents' queries and outputs, or keys and values, are rounded once more than in a plain kernel.
    limit = {"float32": 1e-5, "bfloat16": 1.6e-2}[dtype]
    error = np.linalg.norm(np.float64(out) - right, axis=-1) / np.maximum(
        np.linalg.norm(right, axis=-1), 1e-9
    )
    empty = np.isneginf(right_lse)
    assert not np.asarray(out, np.float32)[empty].any()
    assert error[~empty].max() < limit
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_allclose(np.asarray(lse)[~empty], right_lse[~empty], atol=50 * limit * 1e-1)


@pytest.mark.once
def test_bf16_is_rounded_once_a_product():
    """Also on a CPU, where XLA adds up some products of bf16 in bf16."""
    arguments, up = make("bfloat16")
    right, _ = expected(arguments, up)
    out, _ = run(arguments, up, form="absorbed")
    error = np.linalg.norm(np.float64(out) - right, axis=-1)
    assert (error <= 8e-3 * np.linalg.norm(right, axis=-1)).all()


@pytest.mark.once
@pytest.mark.parametrize("form", ["absorbed", "projected", None])
def test_bad_pages_and_lengths_poison_only_their_sequence(form, monkeypatch, small_workspace):
    monkeypatch.setattr(api, "least_projected", lambda *_: 20)
    arguments, up = make()
    good, _ = run(arguments, up, form=form)
    arguments[2][0, 3] = -1
    arguments[2][2, 5] = arguments[1].shape[0]
    arguments[3][3] = arguments[2].shape[1] * PAGE_SIZE + 1
    out, lse = run(arguments, up, form=form)
    cu = arguments[4]
    for seq in range(len(LENS)):
        mine = slice(cu[seq], cu[seq + 1])
        if seq in (0, 2, 3):
            assert np.isnan(out[mine]).any(axis=-1).all()
            assert np.isnan(lse[mine]).all()
        else:
            np.testing.assert_allclose(out[mine], good[mine], atol=1e-6)
    assert not np.asarray(out[cu[len(LENS)] :]).any()


def test_latents_of_656_bytes():
    """As rounded: the reference gets what they are read back as."""
    arguments, up = make("bfloat16")
    nothing = np.isnan(arguments[1].astype(np.float32))
    tokens = pallas_attn.quantize_latents(jnp.asarray(np.where(nothing, 0, arguments[1])))
    arguments[1] = np.asarray(pallas_attn.dequantize_latents(tokens))
    right, _ = expected(arguments, up)
    stored = np.array(tokens)
    stored[nothing[..., 0]] = 0x7F
    arguments[1] = stored
    out, _ = run(arguments, up)
    error = np.linalg.norm(np.float64(out) - right, axis=-1)
    assert (error <= 1.6e-2 * np.linalg.norm(right, axis=-1)).all()


@pytest.mark.once
def test_the_form_follows_from_costs():
    assert api.least_projected(128, 128) == 83
    assert api.least_projected(2048, 2048) is None
    # With n new tokens both forms cost the same for a token of the context, but for rounding up.
    n, saved = api.least_projected(64, 128), api.ABSORBED_COST * (576 + 512) - (64 + 64 + 128)
    assert (n - 1) * saved < 512 * (64 + 128) <= n * saved


REFUSED = {
    "query": (dict(query=np.zeros((4, 2, 64), np.float32)), ValueError, "'query': expected more than 64 elements"),
    "cache": (dict(latent_cache=np.zeros((3, 16, 1, 512), np.float32)), ValueError, "'latent_cache': expected shape"),
    "bytes": (
        dict(latent_cache=np.zeros((3, 16, 1, 656), np.uint8)), TypeError, "'latent_cache': expected dtype float32, got"
    ),
    "key_up": (dict(key_up=np.zeros((2, 16, 512), np.float32)), ValueError, "'key_up': expected shape"),
    "value_up": (dict(value_up=np.zeros((2, 16, 256), np.float32)), ValueError, "'value_up': expected shape"),
    "form": (dict(form="naive"), ValueError, "'form': expected one of 'absorbed', 'projected', got 'naive'"),
    "scale": (dict(scale=-1.0), ValueError, "'scale': expected a finite number above 0"),
    "tables": (dict(block_tables=np.zeros((2, 3), np.float32)), TypeError, "'block_tables': expected dtype int32"),
    "return_lse": (dict(return_lse=1), TypeError, "'return_lse': expected True or False, got 1"),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(changes, error, message):
    given = dict(
        query=np.zeros((4, 2, 96), np.float32),
        latent_cache=np.zeros((3, 16, 1, 576), np.float32),
        block_tables=np.zeros((2, 3), np.int32),
        seq_lens=np.zeros(2, np.int32),
        cu_q_lens=np.zeros(3, np.int32),
        key_up=np.zeros((2, 32, 512), np.float32),
        value_up=np.zeros((2, 16, 512), np.float32),
    )
    with pytest.raises(error, match=f"^mla_prefill: argument {message}"):
        unchecked(pallas_attn.mla_prefill)(**given | changes)


@pytest.mark.once
def test_a_form_or_implementation_that_cannot_serve():
    arguments, up = make("bfloat16")
    arguments[1] = np.zeros((*arguments[1].shape[:3], 656), np.uint8)
    with pytest.raises(ValueError, match="'form': expected 'projected' or None for latents of 656 bytes"):
        run(arguments, up, form="absorbed")
    with pytest.raises(
        ValueError, match="mla_prefill: implementation 'pallas' cannot serve this call: needs an"
    ):
        run(arguments, up, "pallas")


@pytest.mark.parametrize("form", FORMS[:2])
def test_derivatives_are_refused_in_words(form):
    arguments, up = make()
    call = functools.partial(run, up=up, form=form, implementation="xla")

    def total(query):
        return call([query, *arguments[1:]])[0].sum()

    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(
            NotImplementedError, match=r"^mla_prefill: there are no gradients; flash_attention over"
        ):
            jax.eval_shape(derivative(total), jnp.asarray(arguments[0]))
