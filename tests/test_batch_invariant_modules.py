"""`batch_invariant` of the attention modules: a token's output has the same bits however its sequence came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn import PagedKVCache, PagedLatentCache, mla_schedule
from pallas_attn.nn import LatentGQA, MLAConfig, MultiHeadLatentAttention, PagedAttention, linen
from pallas_attn.ops.paged_attention.config import Candidate

TOKENS, PAGE = 24, 8
TABLES = jnp.array([[5, 3, 0], [1, 4, 2]], jnp.int32)
HEADS = (4, 2, 2)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """So that these texts are cut up and merged, as long ones are."""
    for op in ("paged_attention", "mla_decode"):
        monkeypatch.setattr(f"pallas_attn.ops.{op}.config.INVARIANT_TOKENS", 16)
    monkeypatch.setattr("pallas_attn.ops.paged_attention.config.CANDIDATES", (Candidate(16, 4, 1),))


def tokens() -> list[jax.Array]:
    """Queries, keys and values of two texts."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (2, TOKENS, h, 16)) for k, h in zip(keys, HEADS, strict=True)]


def paged_cache(tables=TABLES, dtype=jnp.float32, **options) -> PagedKVCache:
    sizes = dict(num_layers=1, num_pages=6, page_size=PAGE, num_kv_heads=2, head_dim=16)
    return PagedKVCache.create(**sizes, block_tables=tables, dtype=dtype, **options)


def latent_cache(tables=TABLES) -> PagedLatentCache:
    sizes = dict(num_layers=1, num_pages=6, page_size=PAGE)
    return PagedLatentCache.create(**sizes, block_tables=tables, dtype=jnp.float32)


KINDS = {
    "PagedAttention": (PagedAttention, dict(sliding_window=20, softcap=5.0), paged_cache),
    "LatentGQA": (LatentGQA, {}, latent_cache),
}


def whole(call, cache) -> np.ndarray:
    """The first text's outputs [TOKENS, ...]."""
    at = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (2, TOKENS))
    return np.asarray(call(*tokens(), cache, 0, at)[0])[0]


def forms(call, empty) -> dict[str, np.ndarray]:
    """The same, by how it came."""
    new, at = tokens(), jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (2, TOKENS))
    cache, single = empty(), []
    for i in range(TOKENS):
        out, cache = call(*[x[:, i : i + 1] for x in new], cache, 0, at[:, i : i + 1])
        single.append(np.asarray(out)[0, 0])

    # In two chunks, beside a part of the other text and under a wider table.
    wide, chunks = empty(jnp.pad(TABLES, ((0, 0), (0, 4)), constant_values=-1)), []
    for start, end, beside in ((0, 13, 7), (13, TOKENS, 2)):
        count = end - start
        ragged = [jnp.concatenate([x[0, start:end], x[1, start : start + beside]]) for x in new]
        places = jnp.concatenate([at[0, start:end], at[1, start : start + beside]])
        bounds = jnp.array([0, count, count + beside], jnp.int32)
        # The other's begins at 13 in the second chunk, of which 7 were there: what it sees means nothing.
        out, wide = call(*ragged, wide, 0, places, cu_q_lens=bounds)
        chunks.append(np.asarray(out)[:count])
    return {
        "one by one": np.stack(single),
        "whole": whole(call, empty()),
        "in chunks": np.concatenate(chunks),
    }


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sweep(name=None)
def test_bits_do_not_depend_on_the_form(name):
    make, options, empty = KINDS[name]
    module = make(**options, implementation="interpret", batch_invariant=True)
    found = forms(jax.jit(module), empty)
    expected = found["one by one"]
    assert np.abs(expected[5:]).max() > 0.1
    assert {form for form, out in found.items() if out.tobytes() != expected.tobytes()} == set()
    # So that this could fail.
    usual = whole(jax.jit(make(**options, implementation="interpret")), empty())
    assert usual.tobytes() != expected.tobytes()
    np.testing.assert_allclose(usual, expected, atol=1e-5)


@pytest.mark.once
def test_mla_gives_what_it_gives_without():
    config = MLAConfig(hidden_size=12, num_heads=2, qk_nope_head_dim=8, v_head_dim=8)
    x = jax.random.normal(jax.random.key(1), (2, 6, 12))
    at = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))

    def outs(**options) -> np.ndarray:
        layer = MultiHeadLatentAttention(config, **options, rngs=nnx.Rngs(0))
        return np.asarray(
            jax.jit(lambda x, cache: layer(x, cache, 0, at, absorbed=True))(x, latent_cache())[0]
        )

    expected = outs(implementation="xla")
    assert np.abs(expected).max() > 0.01
    out = outs(implementation="interpret", batch_invariant=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_linen_has_it():
    new, at = [x[:, :3] for x in tokens()], jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))
    call = (*new, paged_cache(), 0, at)
    options = dict(implementation="interpret", batch_invariant=True)
    out, _ = linen.PagedAttention(**options).apply({}, *call)
    expected, _ = PagedAttention(**options)(*call)
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match="'xla' cannot serve this call: is not batch_invariant"):
        linen.PagedAttention(implementation="xla", batch_invariant=True).apply({}, *call)


def mla() -> MultiHeadLatentAttention:
    config = MLAConfig(hidden_size=12, num_heads=2, qk_nope_head_dim=8, v_head_dim=8)
    return MultiHeadLatentAttention(config, batch_invariant=True, rngs=nnx.Rngs(0))


AT = jnp.zeros((2, 1), jnp.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PagedAttention(batch_invariant=True)(
                *[x[:, :1] for x in tokens()], paged_cache(dtype=jnp.int8, scale_per_page=True), 0, AT
            ),
            "PagedAttention: argument 'cache': expected one without scale_per_page, with batch_invariant, "
            "got one with scales of each page",
        ),
        (
            lambda: mla()(
                jnp.ones((2, 1, 12)), latent_cache(), 0, AT, schedule=mla_schedule(AT[:, 0] + 1, num_heads=2)
            ),
            "MultiHeadLatentAttention: argument 'schedule': expected None with batch_invariant, "
            "got an MLASchedule",
        ),
        (
            lambda: mla()(
                jnp.ones((2, 1, 12)), latent_cache(), 0, AT, indices=jnp.zeros((2, 1, 4), jnp.int32)
            ),
            "MultiHeadLatentAttention: argument 'indices': expected None with batch_invariant, got an array",
        ),
        *(
            (make, f"{name}: argument 'batch_invariant': expected True or False, got None of type NoneType")
            for name, make in {
                "PagedAttention": lambda: PagedAttention(batch_invariant=None),
                "LatentGQA": lambda: LatentGQA(batch_invariant=None),
                "MultiHeadLatentAttention": lambda: MultiHeadLatentAttention(
                    MLAConfig(12, 2), batch_invariant=None, rngs=nnx.Rngs(0)
                ),
            }.items()
        ),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    assert str(refused.value) == message
