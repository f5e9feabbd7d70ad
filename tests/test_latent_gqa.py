"""Grouped-query attention through the MLA kernel gives what grouped-query attention gives."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_support import TINY, tiny_llama
from support import COMPILED, ON_GPU

from pallas_attn import PagedKVCache, PagedLatentCache, record_implementations
from pallas_attn.models import Llama, LlamaConfig, generate
from pallas_attn.nn import LatentGQA, PagedAttention


@pytest.mark.parametrize("implementation", ["xla", "interpret", *ON_GPU])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        (9, 3, 64),
        *(pytest.param(*sizes, marks=pytest.mark.once) for sizes in ((4, 4, 8), (5, 1, 256))),
    ],
)
def test_equals_paged_attention(num_heads, num_kv_heads, head_dim, implementation):
    sizes = num_heads, num_kv_heads, head_dim
    dtype = jnp.bfloat16 if implementation in COMPILED else jnp.float32
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    expected = steps_of("paged", "xla", sizes, dtype)
    for out, right in zip(steps_of("latent", implementation, sizes, dtype), expected, strict=True):
        np.testing.assert_allclose(out, right, atol=tolerance)


@functools.cache
def steps_of(kind: str, implementation: str, sizes: tuple[int, int, int], dtype) -> list[np.ndarray]:
    """Outputs for a prompt, then two tokens, of sequences of different lengths, one of them finished."""
    num_heads, num_kv_heads, head_dim = sizes
    tables = jnp.asarray([[3, 0, 5], [1, 4, 2]], jnp.int32)
    options = dict(num_layers=1, num_pages=6, page_size=16, block_tables=tables, dtype=dtype)
    if kind == "paged":
        cache = PagedKVCache.create(num_kv_heads=num_kv_heads, head_dim=head_dim, **options)
        module = PagedAttention(implementation=implementation)
    else:
        cache, module = PagedLatentCache.create(**options), LatentGQA(implementation=implementation)
    call, outs = jax.jit(module.__call__, static_argnums=4), []
    steps = [
        jnp.asarray([[*range(20)], [*range(13), *[-1] * 7]], jnp.int32),
        jnp.asarray([[20], [13]], jnp.int32),
        jnp.asarray([[21], [-1]], jnp.int32),
    ]
    for i, positions in enumerate(steps):
        keys = jax.random.split(jax.random.key(i), 3)
        heads = (num_heads, num_kv_heads, num_kv_heads)
        new = [
            jax.random.normal(key, (*positions.shape, n, head_dim), dtype)
            for key, n in zip(keys, heads, strict=True)
        ]
        out, cache = call(*new, cache, 0, positions)
        outs.append(np.where(np.asarray(positions >= 0)[..., None, None], np.float32(out), 0))
    return outs


@pytest.mark.once
@pytest.mark.parametrize("served", ["xla", *ON_GPU])
@pytest.mark.slow
def test_a_model_gives_the_same_tokens(served):
    """Random weights, SmolLM2's heads, bfloat16: prompts of different lengths, then decoding."""
    config = dataclasses.replace(TINY, num_heads=9, num_kv_heads=3, head_dim=64, context_length=128)
    runs = []
    for attention, op in (("gqa", "paged_attention"), ("mla", "mla_decode")):
        model = tiny_llama(jnp.bfloat16, served, config=config, attention=attention)
        with record_implementations() as by:
            runs.append(generate(model, [[*range(1, 40)], [5, 6, 7]], max_new_tokens=24, return_logits=True))
        assert by[op] == served
    np.testing.assert_array_equal(runs[0].tokens, runs[1].tokens)
    first, second = (run.logits for run in runs)
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first, second, atol=0.1)  # logits reach 3


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        ((5, 64), (2, 64), (2, 64), "'query': expected a multiple of num_kv_heads"),
        ((4, 64), (2, 64), (1, 64), "'value': expected shape"),
        ((4, 64), (2, 64), (2, 128), "'value': expected shape"),
        ((4, 32), (2, 64), (2, 64), "'key': expected shape"),
        ((4, 200), (2, 200), (2, 200), "'key': expected 2 * num_kv_heads * head_dim of at most 512"),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(tokens, query, key, value, message):
    cache = PagedLatentCache.create(
        num_layers=1, num_pages=4, page_size=16, block_tables=jnp.zeros((1, 4), jnp.int32), dtype=jnp.float32
    )
    arrays = [jnp.ones((1, tokens, *shape)) for shape in (query, key, value)]
    with pytest.raises(ValueError, match="LatentGQA: argument " + re.escape(message)):
        LatentGQA()(*arrays, cache, 0, jnp.arange(tokens, dtype=jnp.int32)[None])


def test_a_model_whose_heads_do_not_fit_is_refused():
    wide = LlamaConfig(8, 16, 16, 1, 8, 8, 64)
    with pytest.raises(
        ValueError, match="Llama: argument 'attention': expected 'gqa' for a model whose keys"
    ):
        Llama(wide, attention="mla", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Llama: argument 'attention': expected 'gqa' or 'mla', got 'mqa'"):
        getattr(Llama.__init__, "__wrapped__", Llama.__init__)(
            object.__new__(Llama), TINY, attention="mqa", rngs=nnx.Rngs(0)
        )
