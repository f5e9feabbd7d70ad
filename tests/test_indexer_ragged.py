"""The indexer and sparse attention over the ragged form: chunks of prompts among tokens of answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_indexer import FP8, empty_cache

from pallas_attn.models import DeepSeek, DeepSeekConfig
from pallas_attn.nn import IndexerConfig, MLAConfig


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.float32, FP8])
@pytest.mark.sweep(dtype=None)
def test_ragged_and_batched_choose_and_attend_alike(dtype):
    """Chunks of two prompts end to end with padding behind, then a token of one beside a chunk of the other."""
    config = DeepSeekConfig(
        64, 1, 1, 32, 48, 4, 2, 1, MLAConfig(48, 2, q_lora_rank=24), indexer=IndexerConfig(8, 80, 5)
    )
    model = DeepSeek(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 64)

    def new_cache():
        return model.create_cache(
            num_pages=10, page_size=16, block_tables=empty_cache().shared_tables, dtype=dtype
        )

    run = nnx.jit(lambda model, *rest, **more: model(*rest, **more))
    expected, _ = run(model, tokens, jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20)), new_cache())
    cache = new_cache()
    for (first, end), (other, last) in (((0, 12), (0, 7)), ((12, 13), (7, 20))):
        at = np.full(24, -1, np.int32)
        counts = end - first, last - other
        at[: sum(counts)] = [*range(first, end), *range(other, last)]
        rows = np.repeat([0, 1], [counts[0], 24 - counts[0]])
        new = jnp.asarray(np.asarray(tokens)[rows, np.maximum(at, 0)])
        hidden, cache = run(
            model, new, jnp.asarray(at), cache, cu_q_lens=jnp.asarray([0, counts[0], sum(counts)], jnp.int32)
        )
        np.testing.assert_allclose(hidden[: counts[0]], expected[0, first:end], atol=2e-4)
        np.testing.assert_allclose(hidden[counts[0] : sum(counts)], expected[1, other:last], atol=2e-4)
