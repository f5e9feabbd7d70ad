"""Modules, and methods of caches, inside `jax.set_mesh` with Explicit axes: run as eight_devices.py is.

What works on new tokens brings them to every device that has their heads, and gives back what is sharded as they were.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import OURS_ALONE, POOL, WHOLE, mesh_of
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import PagedKVCache, PagedLatentCache, compat, merge_states, nn

pytestmark = pytest.mark.slow  # what they call is sharded in the other files
SEQS, HEADS, TOKEN_HEADS = P("seq"), P(None, None, "head"), P(None, "head")
TABLES = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
BATCH = jnp.array([[0, 1, 2], [-1, -1, -1], [0, 1, -1], [0, -1, -1]], jnp.int32)
ONE = BATCH[:, :1]
RAGGED, BOUNDS = jnp.array([0, 1, 2, 0, 1, 0, -1, -1], jnp.int32), jnp.array([0, 3, 3, 5, 6], jnp.int32)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def pages(dtype="float32", **options) -> PagedKVCache:
    return PagedKVCache.create(
        num_layers=1,
        num_pages=8,
        page_size=16,
        num_kv_heads=4,
        head_dim=32,
        block_tables=TABLES,
        dtype=dtype,
        **options,
    )


def latents(**options) -> PagedLatentCache:
    sizes = dict(num_layers=1, num_pages=8, page_size=16)
    return PagedLatentCache.create(**sizes, block_tables=TABLES, dtype="float32", **options)


def specs_of(cache: Any, pool: P, rows: P) -> Any:
    """`pool`: of pools of KV heads; latents have none to be sharded."""
    tables = dict(shared_tables=rows, seq_lens=rows)
    if isinstance(cache, PagedLatentCache):
        index_keys = None if cache.index_keys is None else WHOLE
        return dataclasses.replace(cache, latent_cache=WHOLE, index_keys=index_keys, **tables)
    scales = None if cache.k_scale is None else P(*pool[1:]) if pool else WHOLE
    return dataclasses.replace(
        cache, key_cache=pool, value_cache=pool, k_scale=scales, v_scale=scales, **tables
    )


MLA_CONFIG = nn.MLAConfig(hidden_size=48, num_heads=8, q_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16)
FORMS = {
    "one token, by sequence": (ONE, None, (4, 1), SEQS, SEQS),
    "one token, by head": (ONE, None, (4, 1), HEADS, WHOLE),
    "batched, by sequence": (BATCH, None, (4, 3), SEQS, SEQS),
    "batched, by both": (BATCH, None, (4, 3), P("seq", None, "head"), SEQS),
    "ragged, by head": (RAGGED, BOUNDS, (8,), TOKEN_HEADS, WHOLE),
    "ragged, by token": (RAGGED, BOUNDS, (8,), SEQS, SEQS),
}
"""Positions, bounds, what tokens lie in, how query, key and value are sharded, and how positions are."""
INVARIANT: Any = dict(batch_invariant=True, implementation="interpret")
ATTENTION = {
    "pages": (nn.PagedAttention(), pages()),
    "pages of bytes": (nn.PagedAttention(), pages("int8", scale_per_page=True)),
    "latents": (nn.LatentGQA(), latents()),
    "pages, batch-invariant": (nn.PagedAttention(**INVARIANT), pages()),
    "latents, batch-invariant": (nn.LatentGQA(**INVARIANT), latents()),
}


def assert_same(function, arguments, specs, like: int | None = None) -> None:
    """As without a mesh; the first result is sharded as argument `like`."""
    expected = jax.jit(function)(*arguments)
    mesh = mesh_of(AxisType.Explicit)
    placed = jax.device_put(arguments, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    with jax.set_mesh(mesh):
        result = jax.jit(function)(*placed)
    for array, right in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(array, float), np.asarray(right, float), atol=2e-4)
    if like is not None:
        first = jax.tree.leaves(result)[0]
        assert first.sharding.is_equivalent_to(NamedSharding(mesh, specs[like]), first.ndim)


@OURS_ALONE
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_over(kind, form):
    positions, bounds, lead, spec, rows = FORMS[form]
    module, cache = ATTENTION[kind]

    def call(query, key, value, cache, positions):
        return module(query, key, value, cache, 0, positions, cu_q_lens=bounds)

    query, key = normal(*lead, 8, 32), normal(*lead, 4, 32)
    by_sequence = bounds is None and "seq" in spec
    pool = POOL if "head" in str(spec) else WHOLE
    places = specs_of(cache, pool, SEQS if by_sequence else WHOLE)
    assert_same(call, (query, key, key + 1, cache, positions), (spec, spec, spec, places, rows), like=0)


@OURS_ALONE
@pytest.mark.parametrize("chosen", [False, True], ids=["all tokens", "chosen tokens"])
@pytest.mark.parametrize("form", [name for name in FORMS if "head" not in name and "both" not in name])
@pytest.mark.sweep(form=None)
def test_latent_attention_over_hidden_states(form, chosen):
    """And its indexer: over sequences or tokens, since weights are whole."""
    positions, bounds, lead, spec, rows = FORMS[form]
    attention = nn.MultiHeadLatentAttention(MLA_CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)
    sizes = nn.IndexerConfig(num_heads=4, head_dim=128, top_k=5)
    indexer = nn.Indexer(sizes, MLA_CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)

    def call(x, cache, positions):
        indices = None
        if chosen:
            query = attention.compressed_query(x)
            indices, cache = indexer(x, query, cache, 0, positions, cu_q_lens=bounds)
        return attention(x, cache, 0, positions, cu_q_lens=bounds, indices=indices)

    cache = latents(index_dim=128)
    places = specs_of(cache, WHOLE, SEQS if bounds is None else WHOLE)
    assert_same(call, (normal(*lead, 48), cache, positions), (spec, places, rows), like=0)


@OURS_ALONE
@pytest.mark.parametrize("spec", [SEQS, HEADS], ids=["by sequence", "by head"])
def test_methods_of_a_cache(spec):
    def call(cache, key, positions):
        cache = cache.calibrate(0, key, key, positions)
        share = cache.saturation(0, 3 * key, key, positions)
        cache = cache.write(0, key, key, positions).copy_pages([0], [3])
        return cache.key_cache, cache.k_scale, share, cache.slots(0, positions), cache.layer_tables(0)

    cache, by_sequence = pages("int8"), spec == SEQS
    rows = SEQS if by_sequence else WHOLE
    places = specs_of(cache, WHOLE if by_sequence else POOL, rows)
    places = dataclasses.replace(places, k_scale=WHOLE if by_sequence else P(None, "head"))
    places = dataclasses.replace(places, v_scale=places.k_scale)
    assert_same(call, (cache, normal(4, 3, 4, 32), BATCH), (places, spec, rows))


@OURS_ALONE
def test_functions_that_no_other_file_has():
    query, pool = normal(4, 8, 32), normal(4, 8, 16, 32)
    lens = jnp.array([20, 0, 7, 32], jnp.int32)
    specs = (P("seq", "head"), P("head"), P("head"), SEQS, SEQS)
    assert_same(compat.paged_attention, (query, pool, pool, TABLES, lens), specs, like=0)
    states = (query, query[..., 0], query + 1, query[..., 1])
    assert_same(merge_states, states, (P("seq", "head"),) * 4, like=0)
