"""The indexer of sparse attention, and latent attention over fp8 latents and over chosen tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn import PagedLatentCache, dequantize_latents, mla_schedule
from pallas_attn.models import DeepSeek, DeepSeekConfig
from pallas_attn.nn import Indexer, IndexerConfig, MLAConfig, MultiHeadLatentAttention
from pallas_attn.nn.indexer import best_tokens

once = pytest.mark.once  # its ops are tested on both
FP8 = jnp.float8_e4m3fn


def empty_cache(dtype=jnp.float32, **options) -> PagedLatentCache:
    """Of two sequences with 5 pages of 16 each."""
    tables = np.random.default_rng(0).permutation(10).reshape(2, 5).astype(np.int32)
    sizes = dict(num_layers=1, num_pages=10, page_size=16) | options
    return PagedLatentCache.create(**sizes, block_tables=jnp.asarray(tables), dtype=dtype)


@functools.cache
def chosen(top_k: int):
    """(what `best_tokens` names, the scores written out, positions) of 3 sequences with 4 tokens each over 15 pages of
    2 slots; slots 6 to 9 of the last lie in pages outside the pool, and what comes after a query holds NaN."""
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((3, 4, 5, 8)), rng.standard_normal((3, 30, 8))
    weights = rng.standard_normal((3, 4, 5))
    positions = np.array([[20, 21, 22, 23], [0, 1, 2, -1], [4, 5, 6, 7]])
    scores = np.full((3, 4, 30), -np.inf)
    for seq, i in np.ndindex(3, 4):
        for t in range(positions[seq, i] + 1):
            scores[seq, i, t] = sum(
                weights[seq, i, h] * max(queries[seq, i, h] @ keys[seq, t], 0) for h in range(5)
            )
    keys[[0, 1, 2], positions.max(axis=1) + 1] = np.nan
    tables = rng.permutation(45).reshape(3, 15)
    pool = np.empty((45, 2, 1, 8))
    pool[tables] = keys.reshape(3, 15, 2, 1, 8)
    tables[2, 3:5] = -1, 45
    floats = (jnp.asarray(x, jnp.float32) for x in (queries, weights, pool))
    ids = (jnp.asarray(x, jnp.int32) for x in (tables, positions))
    found = jax.jit(functools.partial(best_tokens, top_k=top_k))(*floats, *ids)
    return np.asarray(found), scores, positions


@once
@pytest.mark.parametrize("top_k", [4, 100])
def test_the_best_tokens_up_to_the_querys_own_are_named(top_k):
    found, scores, positions = chosen(top_k)
    assert found.shape == (3, 4, min(top_k, 30))
    for seq, i in np.ndindex(2, 4):
        held = min(top_k, positions[seq, i] + 1)
        best = np.argsort(-scores[seq, i])[:held]
        np.testing.assert_array_equal(found[seq, i], [*best, *[-1] * (found.shape[2] - held)])


@once
def test_tokens_of_a_page_outside_the_pool_come_first():
    found, _, _ = chosen(4)
    assert set(found[2, 2:, 0]) == {6}
    assert found[2, 3, 1] == 7
    assert (found[2, :2] < 6).all()


@once
def test_few_scores_at_once_give_the_same_choice(monkeypatch):
    found, *_ = chosen(4)
    monkeypatch.setattr("pallas_attn.nn.indexer.MOST_BYTES", 4 * 5 * 30 * 3)
    again, *_ = chosen.__wrapped__(4)
    np.testing.assert_array_equal(found, again)


# ---- fp8 latents


@functools.cache
def layer_of(**options) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        MLAConfig(hidden_size=64, num_heads=3, q_lora_rank=40), rngs=nnx.Rngs(0), **options
    )


@once
@pytest.mark.slow
def test_a_layer_reads_fp8_latents_as_they_were_rounded():
    """Held against the same layer over a plain cache of what the bytes stand for, which errs by the query's rounding
    alone; the latents' own is many times that."""
    layer = layer_of()
    x = jax.random.normal(jax.random.key(0), (2, 6, 64)) * 3
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    plain, quantized = empty_cache(), empty_cache(FP8)

    @functools.partial(nnx.jit, static_argnames="absorbed")
    def call(layer, x, cache, positions, indices=None, absorbed=None):
        return layer(x, cache, 0, positions, indices=indices, absorbed=absorbed)

    (_, written), (_, held) = (call(layer, x, cache, positions) for cache in (quantized, plain))
    assert written.latent_cache.dtype == jnp.uint8
    rounded = plain.replace(latent_cache=dequantize_latents(written.latent_cache, dtype=jnp.float32))
    again = jnp.full((2, 1), 5, jnp.int32)

    def sparse(cache, *listed):
        return call(layer, x[:, 5:], cache, again, jnp.broadcast_to(jnp.array(listed, jnp.int32), (2, 1, 6)))

    # The newest token would be written unrounded into the cache of rounded ones: it is not among those listed.
    got, same, other = (sparse(cache, 0, 3, -1, 1, 4, 4)[0] for cache in (written, rounded, held))
    size, error, of_latents = (np.abs(np.asarray(y)).max() for y in (got, same - got, other - got))
    assert error < 4e-3 * size
    assert of_latents > 3 * error
    dense, stepped = call(layer, x[:, 5:], quantized.replace(latent_cache=written.latent_cache), again)
    np.testing.assert_allclose(sparse(written, 5, 4, 3, 2, 1, 0)[0], dense, atol=4e-3 * size)
    np.testing.assert_array_equal(stepped.latent_cache, written.latent_cache, "the token's bytes as before")


# ---- what is refused


@once
def test_indices_exclude_schedules_and_the_naive_form():
    layer, cache = layer_of(), empty_cache()
    x, positions = jnp.zeros((2, 1, 64)), jnp.zeros((2, 1), jnp.int32)
    indices = jnp.zeros((2, 1, 3), jnp.int32)
    schedule = mla_schedule(positions[:, 0] + 1, num_heads=3, num_parts=132)
    with pytest.raises(
        ValueError, match=r"argument 'schedule': expected None with indices, got MLASchedule$"
    ):
        layer(x, cache, 0, positions, indices=indices, schedule=schedule)
    with pytest.raises(ValueError, match="argument 'absorbed': expected None with indices, got False"):
        layer(x, cache, 0, positions, indices=indices, absorbed=False)
    with pytest.raises(
        ValueError, match=r"argument 'indices': expected shape \[num_seqs=2.*, n=1.*, top_k\]"
    ):
        layer(x, cache, 0, positions, indices=indices[:, 0])
    with pytest.raises(
        ValueError, match=r"MultiHeadLatentAttention: argument 'indices': expected no empty dimension"
    ):
        layer(x, cache, 0, positions, indices=indices[:, :, :0])
    with pytest.raises(ValueError, match="argument 'config': expected a q_lora_rank, got None"):
        traced(lambda: MultiHeadLatentAttention(MLAConfig(64, 3), rngs=nnx.Rngs(0)).compressed_query(x))


def traced(call):
    """What is refused is refused before anything is computed."""
    return nnx.eval_shape(call)


@once
def test_what_an_indexer_cannot_use_is_named():
    attention = MLAConfig(hidden_size=64, num_heads=3, q_lora_rank=40)

    def make(*sizes, dtype=jnp.float32) -> Indexer:
        return Indexer(*sizes, dtype=dtype, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match="IndexerConfig: argument 'top_k': expected at least 1, got 0"):
        IndexerConfig(top_k=0)
    with pytest.raises(ValueError, match="Indexer: argument 'config': expected head_dim of at least 64"):
        traced(lambda: make(IndexerConfig(2, 32, 4), attention))
    with pytest.raises(ValueError, match=r"argument 'attention': expected one with compressed queries"):
        traced(lambda: make(IndexerConfig(2, 80, 4), dataclasses.replace(attention, q_lora_rank=None)))
    with pytest.raises(ValueError, match=r"Indexer: argument 'dtype': expected one of"):
        traced(lambda: make(IndexerConfig(2, 80, 4), attention, dtype=jnp.int8))
    x, query, positions = jnp.zeros((2, 1, 64)), jnp.zeros((2, 1, 40)), jnp.zeros((2, 1), jnp.int32)
    of_72 = PagedLatentCache.create(
        num_layers=1, num_pages=4, page_size=4, block_tables=jnp.zeros((2, 2), jnp.int32), index_dim=72
    )
    for cache, query_used, message in (
        (empty_cache(), query, r"write_index_keys: argument 'cache': expected one with index keys"),
        (of_72, query, r"write_index_keys: argument 'keys': expected shape .*72.*, got \[2, 1, 80\]"),
        (of_72, query[:, :, 1:], r"Indexer: argument 'compressed_query': expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            traced(
                lambda c=cache, q=query_used: make(IndexerConfig(2, 80, 4), attention)(x, q, c, 0, positions)[
                    0
                ]
            )


@once
def test_index_keys_move_with_their_pages():
    cache = PagedLatentCache.create(
        num_layers=2,
        num_pages=3,
        page_size=4,
        block_tables=jnp.array([[0, 2]], jnp.int32),
        dtype=FP8,
        index_dim=5,
    )
    assert (cache.index_keys.shape, cache.index_keys.dtype) == ((6, 4, 1, 5), jnp.bfloat16)
    keys = jnp.arange(1, 11.0).reshape(1, 2, 5)
    cache = cache.write_index_keys(1, keys, jnp.array([[5, -1]], jnp.int32)).copy_pages([2], [1])
    expected = np.zeros((6, 4, 5))
    expected[[3 + 2, 3 + 1], 1] = np.arange(1, 6)
    np.testing.assert_array_equal(cache.index_keys[:, :, 0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("indexer", [None, IndexerConfig(num_heads=8, head_dim=96, top_k=24)])
def test_kernels_serve_the_decoder(indexer, cache_dtype):
    """A random decoder in bf16 on a GPU, by what it takes there and by plain jnp: a chunk, then a token."""
    attention = MLAConfig(hidden_size=128, num_heads=16, q_lora_rank=64)
    config = DeepSeekConfig(64, 2, 2, 160, 48, 4, 2, 1, attention, indexer=indexer)
    tokens = jax.random.randint(jax.random.key(1), (2, 41), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(41, dtype=jnp.int32), (2, 41))
    found = []
    for implementation in (None, "xla"):
        model = DeepSeek(config, dtype=jnp.bfloat16, implementation=implementation, rngs=nnx.Rngs(0))
        cache = model.create_cache(
            num_pages=10, page_size=16, block_tables=empty_cache().shared_tables, dtype=cache_dtype
        )
        hidden, cache = nnx.jit(lambda m, *rest: m(*rest))(model, tokens[:, :40], positions[:, :40], cache)
        last, _ = nnx.jit(lambda m, *rest: m(*rest))(model, tokens[:, 40:], positions[:, 40:], cache)
        found.append(np.asarray(jnp.concatenate([hidden, last], axis=1), np.float32))
    kernels, plain = found
    assert np.isfinite(kernels).all()
    # bf16 decides which of two tokens of nearly the same score is chosen, so a few rows may be others.
    error = np.linalg.norm(kernels - plain, axis=-1) / np.linalg.norm(plain, axis=-1)
    assert np.median(error) < 0.02
    assert np.quantile(error, 0.9) < (0.2 if indexer else 0.04)
