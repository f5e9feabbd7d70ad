"""An 8-bit KV cache: where its scales come from, and whose they stay; test_smollm2.py says what it costs a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_cache

from pallas_attn import PagedKVCache
from pallas_attn._tile import narrow
from pallas_attn.nn import PagedAttention


@pytest.mark.once
def test_calibration_fits_each_head_of_a_layer():
    tables = jnp.array([[0, 1]], jnp.int32)
    sizes = {"num_layers": 2, "num_pages": 2, "page_size": 8, "num_kv_heads": 2, "head_dim": 4}
    cache = PagedKVCache.create(**sizes, block_tables=tables, dtype=jnp.int8)
    key = jnp.zeros((1, 3, 2, 4)).at[0, 0, 0, 0].set(-12.7).at[0, 1, 1, 2].set(254.0).at[0, 2].set(1e6)
    key = key.at[0, 0, 0, 1].set(jnp.nan).at[0, 1, 1, 0].set(jnp.inf)  # of which none is larger than another
    positions = jnp.array([[0, 1, -1]], jnp.int32)  # the last token is padding
    fitted = cache.calibrate(1, key, jnp.zeros_like(key), positions, margin=1.0)
    np.testing.assert_allclose(fitted.k_scale, [[1, 1], [0.1, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(fitted.v_scale, 1)
    written = fitted.write(1, key, jnp.zeros_like(key), positions)
    assert written.key_cache[2, 0, 0, 0] == -127
    assert written.key_cache[2, 1, 1, 2] == 127


@pytest.mark.once
def test_saturation_is_the_share_that_the_scales_do_not_hold():
    """What a prompt that joins others, whose scales are fixed, would lose; padding does not count."""
    tables = jnp.array([[0], [1]], jnp.int32)
    sizes = {"num_layers": 2, "num_pages": 2, "page_size": 8, "num_kv_heads": 2, "head_dim": 4}
    cache = PagedKVCache.create(**sizes, block_tables=tables, dtype=jnp.int8)
    positions = jnp.array([[0, 1, -1], [0, -1, -1]], jnp.int32)
    key = jnp.ones((2, 3, 2, 4)).at[0, 2].set(1e6)
    cache = cache.calibrate(1, key, key, positions, margin=1.0)
    assert [float(x) for x in cache.saturation(1, key, key, positions)] == [0, 0]
    # Of 3 tokens x 2 heads x 4 elements, a head of one token, and two elements of another.
    larger = key.at[0, 0, 1].set(-9.0)
    share, other = jax.jit(cache.saturation)(1, larger, key.at[1, 0, 0, :2].set(1.1), positions)
    assert float(share) == pytest.approx(4 / 24)
    assert float(other) == pytest.approx(2 / 24)
    assert np.isnan(jax.jit(cache.saturation)(2, key, key, positions)).all()
    written = cache.write(1, larger, key, positions)
    assert float(jnp.mean(jnp.abs(written.key_cache[2, 0].astype(jnp.float32)) == 127)) == 1
    assert cache.saturation(1, key, key, jnp.full_like(positions, -1)) == (0, 0)
    plain = PagedKVCache.create(**sizes, block_tables=tables)
    assert plain.saturation(1, 1e6 * key, key, positions) == (0, 0)


def test_calibration_leaves_other_dtypes_alone():
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 8, "num_kv_heads": 2, "head_dim": 4}
    cache = PagedKVCache.create(**sizes, block_tables=jnp.zeros((1, 1), jnp.int32), dtype=jnp.bfloat16)
    new = jnp.ones((1, 1, 2, 4))
    assert cache.calibrate(0, new, new, jnp.zeros((1, 1), jnp.int32)) is cache
    assert cache.scales(0) == {}


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_prompt_that_joins_others_leaves_their_scales(dtype):
    """Continuous batching: the second row is prefilled while the first one holds tokens."""
    module = PagedAttention(implementation="xla")
    tables = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    cache = small_cache(num_layers=1, block_tables=tables, dtype=dtype)
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 8, 2, 16)) for i in range(3))
    counted, skipped = jnp.arange(8, dtype=jnp.int32), jnp.full(8, -1, jnp.int32)
    _, cache = module(query, key, value, cache, 0, jnp.stack([counted, skipped]))
    cache = cache.replace(seq_lens=jnp.array([8, 0], jnp.int32))
    assert (cache.k_scale != 1).all()

    def next_token(cache):
        at = jnp.array([[8], [-1]], jnp.int32)
        return module(query[:, :1], key[:, :1], value[:, :1], cache, 0, at)[0][0]

    before = next_token(cache)
    _, joined = module(query, 5 * key, 5 * value, cache, 0, jnp.stack([skipped, counted]))
    np.testing.assert_array_equal(joined.k_scale, cache.k_scale)
    np.testing.assert_array_equal(next_token(joined), before)


def test_what_the_module_refuses():
    module = PagedAttention()
    tables = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    cache = small_cache(num_layers=1, block_tables=tables)
    query, new, positions = (
        jnp.ones((2, 4, 4, 16)),
        jnp.ones((2, 4, 2, 16)),
        jnp.arange(8, dtype=jnp.int32).reshape(2, 4),
    )
    for arguments, message in (
        (
            (query, new[:, :2], new, positions),
            r"'key': expected shape \[num_seqs=2 \(as cache\), n=4 \(as query\)",
        ),
        ((query, new, new[..., :1, :], positions), "'value': expected shape"),
        ((query, new, new, positions[0]), "'positions': expected shape"),
        (
            (query[:, :, :3], new, new, positions),
            r"'query': expected a multiple of num_kv_heads \(2\), got 3",
        ),
        (
            (query[:1], new[:1], new[:1], positions[:1]),
            r"'query': expected shape \[num_seqs=2 \(as cache\), n",
        ),
    ):
        query_, key, value, at = arguments
        with pytest.raises(ValueError, match=f"PagedAttention: argument {message}"):
            module(query_, key, value, cache, 0, at)
    short = query.astype(jnp.bfloat16)
    for n in (1, 4):  # a prompt of a dtype that decoding would not take
        with pytest.raises(
            TypeError, match="PagedAttention: argument 'query': expected dtype float32, got bfloat16"
        ):
            module(short[:, :n], new[:, :n], new[:, :n], cache, 0, positions[:, :n])
    with pytest.raises(
        ValueError, match=r"PagedAttention: argument 'scale': expected a finite number above 0"
    ):
        PagedAttention(scale=-1.0)(query, new, new, cache, 0, positions)


def test_dealt_columns_come_back():
    """That they are dealt shows in machine code alone, and that they must come back in every comparison of values."""
    tile = jnp.arange(3 * 64, dtype=jnp.int32).reshape(3, 64)
    dealt = narrow.dealt(tile)
    assert dealt[0, :16].tolist() == [*range(8), *range(16, 24)]
    assert sorted(dealt[1].tolist()) == tile[1].tolist()
    np.testing.assert_array_equal(narrow.in_order(dealt), tile)
