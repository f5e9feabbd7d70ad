"""DeepSeek-V3.2: its indexer, sparse attention of whole models, and fp8 latents in module and decoder."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models_support import write_tokenizer
from test_deepseek import empty_cache, ours, step, theirs

from pallas_attn.models import DeepSeekConfig, generate, load_checkpoint

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
    cache = decoder.create_cache(num_pages=10, page_size=16, block_tables=empty_cache(3, 2).shared_tables)
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
    tables = empty_cache(3, 2).shared_tables
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


@pytest.mark.slow
def test_the_scales_of_fp8_latents_are_chosen(decoder):
    by_default, powers, exact = (
        first_chunk(decoder, dtype=FP8, **options)
        for options in ({}, {"scales": "power_of_two"}, {"scales": "exact"})
    )
    np.testing.assert_array_equal(by_default, powers)
    assert np.abs(by_default - exact).max() > 1e-4


@pytest.mark.slow
def test_a_folder_of_v32_loads(reference, decoder, tmp_path):
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 97)
    np.testing.assert_array_equal(first_chunk(load_checkpoint(tmp_path).model), first_chunk(decoder))
    settings = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="argument 'index_topk': expected a value, got none"):
        DeepSeekConfig.from_transformers(settings | {"index_topk": None})
