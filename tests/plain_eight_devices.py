"""What is jnp around kernels, or no more than jnp, on eight devices: run as eight_devices.py is."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import (
    IMPLEMENTATIONS,
    KINDS,
    OURS_ALONE,
    POOL,
    WHOLE,
    assert_equal,
    latent,
    mesh_of,
    new_tokens,
    placed,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_attn


@KINDS
@IMPLEMENTATIONS
@pytest.mark.sweep(kind=None, implementation=None)
def test_mla_prefill(kind, implementation):
    """Over heads: of a device are its query's, and its part of the up-projections."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((12, 8, 96)), jnp.float32)
    key_up, value_up = (jnp.asarray(rng.standard_normal((8, 32, 512)), jnp.float32) / 20 for _ in range(2))
    _, cache, tables, lens = latent()
    lens, bounds = lens.at[1].set(0), jnp.array([0, 9, 9, 10, 12], jnp.int32)
    arrays = (query, cache, tables, lens, bounds, key_up, value_up)

    def attend(*arrays, implementation):
        *places, key_up, value_up = arrays
        ups = dict(key_up=key_up, value_up=value_up, return_lse=True)
        return pallas_attn.mla_prefill(*places, **ups, form="absorbed", implementation=implementation)

    heads = P(None, "head")
    specs = (heads, WHOLE, WHOLE, P("seq"), WHOLE, P("head"), P("head"))
    given = placed(mesh_of(kind), arrays, specs)
    expected = attend(*arrays, implementation="xla")
    call = functools.partial(attend, implementation=implementation)
    # Plain jnp that is left to XLA may bring rows together; the pool stays.
    left_to_xla = implementation == "xla" and kind == AxisType.Auto
    moves = cache.size - 1 if left_to_xla else len(lens)
    assert_equal(call, given, expected, moves=moves, out=None if left_to_xla else heads)


@OURS_ALONE
def test_plain_functions_over_explicit_axes():
    """What is no more than jnp: heads may be sharded, and pages may not."""
    key, value, pool, *_, slots = new_tokens()
    scales = jnp.ones((24, 4))
    mesh, heads = mesh_of(AxisType.Explicit), P(None, "head")
    arrays = (key, value, scales, scales, slots)
    find = functools.partial(pallas_attn.page_scales, page_size=16, dtype=jnp.int8)
    expected = find(*arrays)
    given = placed(mesh, arrays, (heads, P("seq"), heads, heads, P("seq")))
    assert_equal(find, given, expected, moves=key.size, out=heads)
    copied = pallas_attn.copy_pages(*placed(mesh, [pool], [POOL]), [0, 3], [5, -1])
    np.testing.assert_array_equal(copied, pool.at[5].set(pool[0]))
    with pytest.raises(ValueError, match="copy_pages: argument 'cache': expected all pages on every device"):
        pallas_attn.copy_pages(*placed(mesh, [pool], [P("seq")]), [0], [5])
    whole = placed(mesh, arrays, (WHOLE, WHOLE, P("seq"), P("seq"), WHOLE))
    with pytest.raises(ValueError, match="page_scales: argument 'k_scale': expected all pages on every"):
        find(*whole)
