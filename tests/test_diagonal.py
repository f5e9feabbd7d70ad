"""Masks that are a band along the diagonal: which they are, and that kernels serve them as the call's own options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import block_mask, flash_attention, mods, paged_attention, ragged_paged_attention
from pallas_attn._tile.band import Band
from pallas_attn.mods.diagonal import band_of, holds_diagonal
from pallas_attn.mods.program import BATCH, HEAD, KEY, QUERY
from pallas_attn.mods.simplify import within
from pallas_attn.mods.trace import trace

Q_LEN, KV_LEN = 40, 70
IDS = jnp.arange(KV_LEN, dtype=jnp.int32) // 9

BANDS = {
    "causal": mods.causal(),
    "from an offset on": mods.causal(30),
    "strictly before": lambda b, h, q, k: q > k,
    "far before": mods.causal(-3),
    "a window": mods.sliding_window(7),
    "to both sides": mods.sliding_window(7, 3),
    "ahead": lambda b, h, q, k: (k > q + 2) & (k - q <= 9),
    "behind": lambda b, h, q, k: (q - k >= 4) & (q - k < 8),
    "by the negative": lambda b, h, q, k: -(k - q) >= 5 - 3,
    "everything": mods.and_masks(),
    "beyond all": lambda b, h, q, k: (k <= q) & (q - k < 1024),
    "of three": mods.and_masks(mods.causal(20), mods.sliding_window(30, 40), mods.causal(3)),
}
OTHERS = {
    "documents": mods.documents(IDS),
    "a prefix": mods.prefix_lm(IDS),
    "sinks": mods.sinks_and_window(4, 9),
    "every second": mods.dilated(2, 9),
    "by head": lambda b, h, q, k: k <= q + h,
    "along the other diagonal": lambda b, h, q, k: q + k <= 50,
    "twice as steep": lambda b, h, q, k: k + k <= q,
    "a bound of keys": lambda b, h, q, k: (k <= q) & (k >= 5),
    "nothing": mods.and_masks(mods.causal(-10), mods.sliding_window(3)),
    "where sums overflow": lambda b, h, q, k: k + (2**31 - 10) <= q,
}


def found(mask) -> Band | None:
    lengths = (BATCH, 2), (HEAD, 2), (QUERY, Q_LEN), (KEY, KV_LEN)
    return band_of(within(trace("f", "mask_mod", mask).program, lengths))


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_known(name):
    band, query, key = found(BANDS[name]), jnp.arange(Q_LEN)[:, None], jnp.arange(KV_LEN)[None, :]
    assert band is not None
    assert min(band.left or 0, band.right or 0) >= 0
    want = np.broadcast_to(BANDS[name](jnp.int32(0), jnp.int32(0), query, key), (Q_LEN, KV_LEN))
    got = functools.reduce(np.logical_and, band.visible(query, key), np.ones_like(want))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_none(name):
    assert found(OTHERS[name]) is None


DIAGONAL = {
    "documents of bytes": mods.documents(IDS.astype(jnp.int8)),
    "documents, causal": mods.and_masks(mods.causal(), mods.documents(IDS)),
    "block diffusion's": lambda b, h, q, k: (q // 4 == k // 4) | (k < IDS[q]),
}
OFF_IT = {
    "by floats": lambda b, h, q, k: q / (k - 3) == k / (k - 3),
    "others' bits": lambda b, h, q, k: IDS[k] == q,
}


@pytest.mark.parametrize("name", [*BANDS, *OTHERS, *DIAGONAL, *OFF_IT])
def test_whether_queries_see_their_own_keys(name):
    mask, at = (BANDS | OTHERS | DIAGONAL | OFF_IT)[name], jnp.arange(Q_LEN)
    lengths = (BATCH, 2), (HEAD, 2), (QUERY, Q_LEN), (KEY, KV_LEN)
    known = holds_diagonal(within(trace("f", "mask_mod", mask).program, lengths))
    assert not known or np.all(mask(jnp.int32(0), jnp.int32(0), at, at))
    assert known == (name not in (*OFF_IT, *NOT_KNOWN))


NOT_KNOWN = {
    *("strictly before", "far before", "ahead", "behind", "by the negative", "by head"),
    *("along the other diagonal", "twice as steep", "a bound of keys", "nothing", "where sums overflow"),
}


@pytest.mark.parametrize("score_mod", [None, mods.soft_cap(3.0)])
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (mods.causal(), dict(causal=True)),
        (mods.sliding_window(20), dict(causal=True, sliding_window=21)),
        (mods.sliding_window(20, 5), dict(sliding_window=(20, 5))),
        (mods.and_masks(), {}),
    ],
)
def test_is_served_as_the_option(mask, options, score_mod):
    """The same program, forward and backward: no lists are walked, and nobody is asked."""
    floats = [jnp.ones((1, 256, 2, 16), jnp.bfloat16)] * 3
    blocks = block_mask(mask, q_len=256, kv_len=256)

    def program(**options) -> str:
        def loss(*floats):
            return flash_attention(*floats, score_mod=score_mod, implementation="interpret", **options).sum()

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*floats))

    plain = program(**options)
    assert program(mask_mod=mask) == program(block_mask=blocks) == plain
    assert program(mask_mod=mods.documents(jnp.zeros(256, jnp.int32)), **options) != plain
    if options.get("causal"):
        assert program(mask_mod=mask, causal=True) == plain


@pytest.mark.parametrize("op", ["ragged", "paged"])
def test_over_pages_it_is_a_window(op):
    """The same program as with the option, the smaller of two, unless something tells tokens' places anew."""
    cache, tables = jnp.ones((8, 16, 2, 16), jnp.bfloat16), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    lens, bounds = jnp.array([50, 61], jnp.int32), jnp.array([0, 30, 40], jnp.int32)

    def program(**options) -> str:
        if op == "ragged":
            call, arrays = ragged_paged_attention, (jnp.ones((40, 4, 16), jnp.bfloat16), bounds)
        else:
            call, arrays = paged_attention, (jnp.ones((2, 3, 4, 16), jnp.bfloat16),)
        query, *rest = arrays
        attend = functools.partial(call, implementation="interpret", **options)
        return str(jax.make_jaxpr(attend)(query, cache, cache, tables, lens, *rest))

    plain, window = program(), program(sliding_window=16)
    assert program(mask_mod=mods.causal()) == plain
    assert program(mask_mod=mods.sliding_window(15)) == window
    assert program(mask_mod=mods.sliding_window(15), sliding_window=20) == window
    assert program(mask_mod=mods.sliding_window(30, 2), sliding_window=16) == window
    score = mods.soft_cap(2.0)
    scored = program(mask_mod=mods.sliding_window(15), score_mod=score)
    assert scored == program(sliding_window=16, score_mod=score)
    for other in (mods.causal(-1), lambda b, h, q, k: k > q, mods.sinks_and_window(2, 15)):
        assert program(mask_mod=other) not in (plain, window)
    apart = {"sliding_window": jnp.int32(16)}
    assert program(mask_mod=mods.sliding_window(15), **apart) != program(**apart)
