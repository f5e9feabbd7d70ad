"""DeepSeek-V3.2: its indexer, sparse attention of whole models, and fp8 latents in module and decoder."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from test_checkpoint import write_tokenizer
from test_deepseek import empty_cache, ours, step, theirs

from pallas_attn import PagedLatentCache, dequantize_latents, mla_schedule
from pallas_attn.models import DeepSeekConfig, generate, load_checkpoint
from pallas_attn.nn import Indexer, IndexerConfig, MLAConfig, MultiHeadLatentAttention
from pallas_attn.nn.indexer import best_tokens

pytestmark = pytest.mark.once  # its ops are tested on both

LENGTHS = (21, 13)
FP8 = jnp.float8_e4m3fn


@pytest.fixture(scope="module")
def reference():
    return theirs("v3.2-yarn")


@pytest.fixture(scope="module")
def decoder(reference):
    return ours(reference)


def prompts() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (2, 40))


def columns(first: int, count: int, lengths=LENGTHS) -> jax.Array:
    """Positions [2, count] from `first` on, negative behind a prompt's end."""
    positions = np.broadcast_to(first + np.arange(count), (2, count))
    return jnp.asarray(np.where(positions < np.array(lengths)[:, None], positions, -1), jnp.int32)


def test_chunks_and_decoding_equal_transformers(reference, decoder):
    """Two chunks of prompts of different length, then 16 steps; 8 of up to 37 tokens are attended to."""
    tokens = prompts()
    graph, weights = nnx.split(decoder)
    cache = decoder.create_cache(num_pages=10, page_size=16, block_tables=empty_cache(3, 2).block_tables)
    with torch.no_grad():
        expected = [
            reference(torch.as_tensor(row[None, : n + 16])).logits[0].numpy()
            for row, n in zip(tokens, LENGTHS, strict=True)
        ]
    assert np.abs(expected[0]).max() > 1, "logits that differ"
    for first, count in ((0, 12), (12, 12)):
        positions = columns(first, count)
        new = jnp.asarray(tokens[:, first : first + count], jnp.int32)
        logits, cache = step(graph, weights, new, positions, cache)
        for row, at, want in zip(logits, np.asarray(positions), expected, strict=True):
            np.testing.assert_allclose(row[at >= 0], want[at[at >= 0]], atol=2e-3)
    assert cache.seq_lens.tolist() == list(LENGTHS)
    for _ in range(16):
        at = np.asarray(cache.seq_lens)
        new = jnp.asarray(tokens[np.arange(2), at][:, None], jnp.int32)
        logits, cache = step(graph, weights, new, jnp.asarray(at)[:, None], cache)
        want = [rows[i] for rows, i in zip(expected, at, strict=True)]
        np.testing.assert_allclose(logits[:, 0], np.stack(want), atol=2e-3)


def first_chunk(model, **options) -> jax.Array:
    """Logits [2, 12, vocab] of prompts, by the function that the test above has compiled."""
    graph, weights = nnx.split(model)
    tables = empty_cache(3, 2).block_tables
    cache = model.create_cache(num_pages=10, page_size=16, block_tables=tables, **options)
    return step(graph, weights, jnp.asarray(prompts()[:, :12], jnp.int32), columns(0, 12), cache)[0]


def test_without_the_indexer_the_logits_are_others(decoder):
    """The choice of 8 tokens matters, but not to the 8th: else the test above would not see the indexer."""
    dense = type(decoder)(dataclasses.replace(decoder.config, indexer=None), rngs=nnx.Rngs(0))
    kept = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(decoder)) if "indexer" not in path]
    nnx.update(dense, nnx.from_flat_state(kept))
    sparse, full = first_chunk(decoder), first_chunk(dense)
    np.testing.assert_allclose(sparse[:, :8], full[:, :8], atol=2e-3)
    assert np.abs(sparse[:, 8:] - full[:, 8:]).max() > 0.05


def test_a_decoder_takes_fp8_latents(decoder):
    plain, quantized = first_chunk(decoder), first_chunk(decoder, dtype=FP8)
    assert 1e-4 < np.linalg.norm(plain - quantized) / np.linalg.norm(plain) < 0.2
    with pytest.raises(
        ValueError, match=r"create_cache: argument 'dtype': expected float32 \(the model's\) or float8"
    ):
        generate(decoder, [[1, 2]], cache_dtype="int8")


def test_a_folder_of_v32_loads(reference, decoder, tmp_path):
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    np.testing.assert_array_equal(first_chunk(load_checkpoint(tmp_path).model), first_chunk(decoder))
    settings = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="argument 'index_topk': expected a value, got none"):
        DeepSeekConfig.from_transformers(settings | {"index_topk": None})


@functools.cache
def chosen(top_k: int):
    """(what `best_tokens` names, the scores written out) of 3 sequences with 4 tokens each over 30 slots; slots 6 to 9
    of the last sequence lie in no page, and what comes after a query holds NaN."""
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
    usable = np.ones((3, 30), bool)
    usable[2, 6:10] = False
    floats = (jnp.asarray(x, jnp.float32) for x in (queries, weights, keys))
    found = jax.jit(functools.partial(best_tokens, top_k=top_k))(
        *floats, jnp.asarray(positions), jnp.asarray(usable)
    )
    return np.asarray(found), scores, positions


@pytest.mark.parametrize("top_k", [4, 100])
def test_the_best_tokens_up_to_the_querys_own_are_named(top_k):
    found, scores, positions = chosen(top_k)
    assert found.shape == (3, 4, min(top_k, 30))
    for seq, i in np.ndindex(2, 4):
        held = min(top_k, positions[seq, i] + 1)
        best = np.argsort(-scores[seq, i])[:held]
        np.testing.assert_array_equal(found[seq, i], [*best, *[-1] * (found.shape[2] - held)])


def test_tokens_of_a_page_outside_the_pool_come_first():
    found, _, _ = chosen(4)
    assert set(found[2, 2:, 0]) == {6}
    assert found[2, 3, 1] == 7
    assert (found[2, :2] < 6).all()


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


def test_a_layer_reads_fp8_latents_as_they_were_rounded():
    """Held against the same layer over a plain cache of what the bytes stand for, which errs by the query's rounding
    alone; the latents' own is many times that."""
    layer = layer_of()
    x = jax.random.normal(jax.random.key(0), (2, 6, 64)) * 3
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    plain = empty_cache(1, 2)
    quantized = PagedLatentCache.create(
        num_layers=1, num_pages=10, page_size=16, block_tables=plain.block_tables, dtype=FP8
    )

    @functools.partial(nnx.jit, static_argnames="absorbed")
    def call(layer, x, cache, positions, indices=None, absorbed=None):
        return layer(x, cache, 0, positions, indices=indices, absorbed=absorbed)

    naive, written = call(layer, x, quantized, positions)
    assert written.latent_cache.dtype == jnp.uint8
    unrounded, held = call(layer, x, plain, positions)
    np.testing.assert_array_equal(naive, unrounded)
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


def test_indices_exclude_schedules_and_the_naive_form():
    layer, cache = layer_of(), empty_cache(1, 2)
    x, positions = jnp.zeros((2, 1, 64)), jnp.zeros((2, 1), jnp.int32)
    indices = jnp.zeros((2, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="argument 'schedule': expected None with indices"):
        layer(
            x, cache, 0, positions, indices=indices, schedule=mla_schedule(positions[:, 0] + 1, num_heads=3)
        )
    with pytest.raises(
        ValueError, match="argument 'absorbed': expected None or True with indices, got False"
    ):
        layer(x, cache, 0, positions, indices=indices, absorbed=False)
    with pytest.raises(
        ValueError, match=r"argument 'indices': expected shape \[num_seqs=2.*, n=1.*, top_k\]"
    ):
        layer(x, cache, 0, positions, indices=indices[:, 0])
    with pytest.raises(ValueError, match="argument 'config': expected a q_lora_rank, got None"):
        traced(lambda: MultiHeadLatentAttention(MLAConfig(64, 3), rngs=nnx.Rngs(0)).compressed_query(x))


def traced(call):
    """What is refused is refused before anything is computed."""
    return nnx.eval_shape(call)


def test_what_an_indexer_cannot_use_is_named():
    attention = MLAConfig(hidden_size=64, num_heads=3, q_lora_rank=40)
    make = functools.partial(Indexer, dtype=jnp.float32, rngs=nnx.Rngs(0))
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
        (empty_cache(1, 2), query, r"write_index_keys: argument 'cache': expected one with index keys"),
        (of_72, query, r"write_index_keys: argument 'keys': expected shape .*72.*, got \[2, 1, 80\]"),
        (of_72, query[:, :, 1:], r"Indexer: argument 'compressed_query': expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            traced(
                lambda c=cache, q=query_used: make(IndexerConfig(2, 80, 4), attention)(x, q, c, 0, positions)[
                    0
                ]
            )


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
