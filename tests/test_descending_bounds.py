"""Bounds of sequences that descend: refused where their values are known; where they are traced no token is anyone's,
by every op and implementation alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, small_cache, unchecked

import pallas_attn
from pallas_attn import nn
from pallas_attn.nn.layers import advanced
from pallas_attn.ops.blocksparse_attention import builders

BOUNDS = np.array([0, 9, 5, 16], np.int32)
RIGHT = np.array([0, 9, 9, 16], np.int32)
OFTEN = np.array([0, 16, 1, 16], np.int32)  # two claim nearly all tokens
TOKENS = 16
DESCENDS = r"argument 'cu_q_lens': expected bounds that do not descend, got 5 behind 9"


def rows(seed: int, heads: int = 2, width: int = 16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (TOKENS, heads, width))


def pages(bounds) -> tuple[jax.Array, jax.Array]:
    """A page of sixteen tokens for each sequence, and their lengths."""
    num_seqs = len(bounds) - 1
    return jnp.arange(num_seqs, dtype=jnp.int32)[:, None], jnp.full(num_seqs, 16, jnp.int32)


def flash(bounds, **options):
    query, key, value = (rows(seed)[None] for seed in range(3))
    call = unchecked(pallas_attn.flash_attention)
    return call(query, key, value, cu_q_lens=bounds, sinks=jnp.ones(2), return_lse=True, **options)


def ragged(bounds, **options):
    pool = jnp.ones((len(bounds) - 1, 16, 2, 16))
    call = unchecked(pallas_attn.ragged_paged_attention)
    return call(rows(0), pool, pool, *pages(bounds), bounds, sinks=jnp.ones(2), return_lse=True, **options)


def prefix(bounds, **options):
    pool = jnp.ones((len(bounds) - 1, 16, 2, 16))
    call = unchecked(pallas_attn.prefix_prefill)
    return call(rows(0), rows(1), rows(2), pool, pool, *pages(bounds), bounds, return_lse=True, **options)


def latent(bounds, **options):
    pool = jnp.ones((len(bounds) - 1, 16, 1, 576))
    ups = dict(key_up=jnp.ones((2, 32, 512)), value_up=jnp.ones((2, 32, 512)))
    call = unchecked(pallas_attn.mla_prefill)
    return call(rows(0, width=96), pool, *pages(bounds), bounds, **ups, return_lse=True, **options)


def v3(bounds, **options):
    """Which writes the new tokens first."""
    del options  # it has one way
    pool = jnp.zeros((3, 16, 4, 1, 128))
    tables, lens = pages(bounds)
    call = unchecked(pallas_attn.compat.ragged_paged_attention_v3)
    return call(rows(0), rows(1), rows(2), pool, lens, tables[:, 0], bounds, jnp.array([0, 0, 3], jnp.int32))


def blocksparse(bounds, **options):
    pool = jnp.ones((TOKENS * 2, 2, 16))
    dense = builders.dense_causal(32, block_size=16, q_block_size=16)
    ends = jnp.array([0, 9, 20, 32], jnp.int32)
    call = unchecked(pallas_attn.blocksparse_attention)
    return call(rows(0), pool, pool, dense, cu_q_lens=bounds, cu_k_lens=ends, return_lse=True, **options)


def blocksparse_pages(bounds, **options):
    pool = jnp.ones((len(bounds) - 1, 16, 2, 16))
    tables, lens = pages(bounds)
    dense = builders.dense_causal(16, block_size=16, q_block_size=16)
    call = unchecked(pallas_attn.blocksparse_attention)
    places = dict(block_tables=tables, seq_lens=lens, cu_q_lens=bounds)
    return call(rows(0), pool, pool, dense, **places, return_lse=True, **options)


def prompts(bounds, **options):
    """Whose queries are all their keys."""
    dense = builders.dense_causal(16, block_size=16, q_block_size=16)
    call = unchecked(pallas_attn.blocksparse_attention)
    return call(rows(0), rows(1), rows(2), dense, cu_k_lens=bounds, return_lse=True, **options)


OPS = [flash, ragged, prefix, latent, blocksparse, blocksparse_pages, prompts]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("call", OPS)
def test_known_ones_are_refused(call, array):
    message = DESCENDS.replace("cu_q_lens", "cu_k_lens") if call is prompts else DESCENDS
    with pytest.raises(ValueError, match=message):
        call(array(BOUNDS), implementation="xla")


def test_what_stands_behind_the_last_sequence_is_not_looked_at():
    bounds = np.array([0, 4, 16, 3], np.int32)
    for num_seqs in (2, jnp.int32(2)):
        ragged(bounds, num_seqs=num_seqs, implementation="xla")
    for implementation in ("xla", "interpret"):
        out, _ = jax.jit(functools.partial(ragged, num_seqs=2, implementation=implementation))(bounds)
        assert np.asarray(out).any(axis=(1, 2)).all()


@pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
@pytest.mark.parametrize("call", OPS)
def test_traced_ones_leave_sequences_without_tokens(call, implementation):
    attend = jax.jit(functools.partial(call, implementation=implementation))
    out, lse = attend(RIGHT)
    assert np.isfinite(np.asarray(out)).all()
    assert np.asarray(out).any(axis=-1).all(), "of bounds that ascend every row has some"
    for bounds in (BOUNDS, OFTEN):
        out, lse = attend(bounds)
        assert not np.asarray(out).any()
        assert np.isneginf(lse).all()


def by_cuda(op: str, query: jax.Array, bounds: jax.Array):
    """Calls that these kernels serve: (out, lse) of 512 tokens."""
    key, value = (jax.random.normal(jax.random.key(seed), (512, 2, 128), jnp.bfloat16) for seed in (1, 2))
    pools = [jnp.tile(x.reshape(8, 64, 2, 128), (3, 1, 1, 1)) for x in (key, value)]
    places = jnp.arange(24, dtype=jnp.int32).reshape(3, 8), jnp.full(3, 512, jnp.int32), bounds
    dense = builders.dense_causal(512, block_size=128, q_block_size=128)
    whole = jnp.array([0, 288, 288, 512], jnp.int32)
    call = functools.partial(
        unchecked(getattr(pallas_attn, op)), return_lse=True, implementation="cuda"
    )  # fmt: skip
    match op:
        case "flash_attention":
            out, lse = call(query[None], key[None], value[None], cu_q_lens=bounds, sinks=jnp.ones(4))
            return out[0], lse[0]
        case "ragged_paged_attention":
            return call(query, *pools, *places, sinks=jnp.ones(4))
        case "prefix_prefill":
            return call(query, key, value, *pools, *places, sinks=jnp.ones(4))
    return call(query, key, value, dense, cu_q_lens=bounds, cu_k_lens=whole)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", ["flash_attention", "ragged_paged_attention", "prefix_prefill", "blocksparse_attention"]
)
def test_traced_ones_by_cuda(op):
    query = jax.random.normal(jax.random.key(0), (512, 4, 128), jnp.bfloat16)

    @jax.jit
    def both(query, bounds):
        attend = functools.partial(by_cuda, op, bounds=bounds)
        if op in ("ragged_paged_attention", "prefix_prefill"):
            return attend(query), ()
        results, pull = jax.vjp(attend, query)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    (out, lse), gradients = both(query, 32 * RIGHT)
    assert np.isfinite(np.asarray(lse)).all()
    assert np.asarray(out).any(axis=-1).all()
    assert all(np.asarray(gradient).any() for gradient in gradients)
    for bounds in (BOUNDS, OFTEN):
        (out, lse), gradients = both(query, 32 * bounds)
        assert not np.asarray(out).any()
        assert np.isneginf(lse).all()
        assert not any(np.asarray(gradient).any() for gradient in gradients)


@pytest.mark.parametrize("call", [flash, blocksparse, prompts])
def test_gradients_of_traced_ones_are_0(call):
    def total(query, bounds):
        by_bounds = functools.partial(call, implementation="xla")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "rows", lambda *_: query)
            return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0)) for x in by_bounds(bounds))

    gradient = jax.jit(jax.grad(total))
    assert np.asarray(gradient(rows(0), RIGHT)).any()
    assert not np.asarray(gradient(rows(0), BOUNDS)).any()


def test_nothing_is_written_by_v3():
    attend = jax.jit(v3)
    assert all(np.asarray(x).any() for x in attend(RIGHT))
    assert not any(np.asarray(x).any() for x in attend(BOUNDS))
    with pytest.raises(ValueError, match=DESCENDS):
        v3(BOUNDS)


def test_keys_that_end_before_they_begin_spoil_their_own_rows_alone():
    pool, dense = rows(1), builders.dense_causal(16, block_size=16, q_block_size=16)
    call = functools.partial(unchecked(pallas_attn.blocksparse_attention), cu_q_lens=jnp.asarray(RIGHT))
    for implementation in ("xla", "interpret"):
        attend = jax.jit(functools.partial(call, implementation=implementation))
        right = attend(rows(0), pool, pool, dense, cu_k_lens=jnp.array([0, 9, 9, 16], jnp.int32))
        out = attend(rows(0), pool, pool, dense, cu_k_lens=jnp.array([0, 9, 16, 4], jnp.int32))
        np.testing.assert_array_equal(out[:9], right[:9])
        assert np.isnan(out[9:]).all()


@pytest.mark.parametrize("batched_cache", [False, True], ids=["paged", "latent"])
def test_modules_write_nothing(batched_cache):
    """Whose pages a token would go to, nobody knows either."""
    tables = jnp.arange(3, dtype=jnp.int32)[:, None]
    if batched_cache:
        module = nn.LatentGQA(implementation="xla")
        cache = pallas_attn.PagedLatentCache.create(
            num_layers=1, num_pages=3, page_size=16, block_tables=tables, dtype="float32"
        )
    else:
        module = nn.PagedAttention(implementation="xla")
        cache = small_cache(num_layers=1, num_pages=3, page_size=16, block_tables=tables)
    positions = jnp.concatenate([jnp.arange(9), jnp.arange(7)]).astype(jnp.int32)
    call = unchecked(type(module).__call__)

    def step(cache, bounds):
        out, cache = call(module, rows(0), rows(1), rows(2), cache, 0, positions, cu_q_lens=bounds)
        return out, cache, advanced(cache.seq_lens, positions, bounds)

    step = jax.jit(step)
    _, written, lens = step(cache, RIGHT)
    assert np.asarray(lens).tolist() == [9, 0, 7]
    assert any(np.asarray(pool).any() for pool in jax.tree.leaves(written) if pool.ndim == 4)
    out, written, lens = step(cache, BOUNDS)
    assert not np.asarray(out).any()
    assert not np.asarray(lens).any()
    assert not any(np.asarray(pool).any() for pool in jax.tree.leaves(written) if pool.ndim == 4)
    with pytest.raises(ValueError, match=DESCENDS):
        call(module, rows(0), rows(1), rows(2), cache, 0, positions, cu_q_lens=jnp.asarray(BOUNDS))
