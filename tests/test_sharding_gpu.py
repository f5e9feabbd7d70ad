"""Sharded calls on the GPUs that are there: as on eight devices of the CPU, with the compiled kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import moved
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import flash_attention, mla_decode, mla_schedule, paged_attention, write_kv

pytestmark = pytest.mark.gpu
SEQS, PAGES, TABLE = 8, 96, 12
POOL = P(None, None, "x")


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(request.param,))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def check(mesh, function, arrays, specs, donate=()):
    """The results are those of one device, and no pool moves. Returns the compiled text."""
    one = jax.device_put(arrays, jax.devices()[0])
    expected = jax.jit(function)(*one)
    spread = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function, donate_argnums=donate).lower(*spread).compile()
    assert max(moved(compiled), default=0) <= SEQS  # lengths, for a schedule
    for out, ref in zip(jax.tree.leaves(compiled(*spread)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(out), np.float32(ref), atol=2e-2)
    return compiled.as_text()


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
@pytest.mark.parametrize("over", ["heads", "seqs"])
def test_paged_attention(mesh, implementation, over):
    tables = jnp.arange(PAGES, dtype=jnp.int32).reshape(SEQS, TABLE)
    lens = jnp.array([190, 1, 0, 192, 100, 64, 17, 150], jnp.int32)
    arrays = (
        normal(0, SEQS, 32, 128),
        normal(1, PAGES, 16, 8, 128),
        normal(2, PAGES, 16, 8, 128),
        tables,
        lens,
    )
    by_heads = (P(None, "x"), POOL, POOL, P(), P())
    by_seqs = (P("x"), P(), P(), P("x"), P("x"))
    check(
        mesh,
        functools.partial(paged_attention, implementation=implementation),
        arrays,
        by_heads if over == "heads" else by_seqs,
    )


@pytest.mark.parametrize("implementation", ["pallas", "triton", "cuda"])
@pytest.mark.parametrize("over", ["heads", "seqs"])
def test_mla_decode(mesh, implementation, over):
    tables = jnp.arange(24, dtype=jnp.int32).reshape(SEQS, 3)
    lens = jnp.array([190, 1, 0, 192, 100, 64, 17, 150], jnp.int32)
    arrays = normal(0, SEQS, 1, 128, 576), normal(1, 24, 64, 1, 576), tables, lens

    def attend(query, cache, tables, lens):
        schedule = mla_schedule(lens, num_heads=128)
        return mla_decode(query, cache, tables, lens, schedule=schedule, implementation=implementation)

    by_heads = (P(None, None, "x"), P(), P(), P())
    check(mesh, attend, arrays, by_heads if over == "heads" else (P("x"), P(), P("x"), P("x")))


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_write_kv_in_place(mesh, implementation):
    slots = jnp.array([3, 77, -1, 15, 16, 383, 10**6, 200], jnp.int32)
    new = P(None, "x")
    arrays = (
        normal(0, SEQS, 8, 128),
        normal(1, SEQS, 8, 128),
        normal(2, 24, 16, 8, 128),
        normal(3, 24, 16, 8, 128),
    )
    write = functools.partial(write_kv, implementation=implementation)
    text = check(mesh, write, (*arrays, slots), (new, new, POOL, POOL, P()), donate=(2, 3))
    share = f"bf16[24,16,{8 // jax.device_count()},128]"
    assert not [line for line in text.splitlines() if f"= {share}" in line and " copy(" in line]


@pytest.mark.parametrize("tokens", [P(None, None, "x"), P("x")], ids=["heads", "seqs"])
def test_flash_attention_by_cuda(mesh, tokens):
    """Gradients too, over documents, whose table each device makes of the ids it has."""
    arrays = [normal(seed, 4, 256, heads, 64) for seed, heads in enumerate((8, 4, 4))]
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (4, 256))), jnp.int32)

    def attend(query, key, value, ids):
        call = functools.partial(flash_attention, segment_ids=ids, causal=True, implementation="cuda")
        out, pull = jax.vjp(call, query, key, value)
        return out, *pull(out)

    check(mesh, attend, (*arrays, ids), (*[tokens] * 3, P(*tokens[:1])))


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
@pytest.mark.parametrize("tokens", [P(None, None, "x"), P("x")], ids=["heads", "seqs"])
def test_gradients_of_flash_attention(mesh, tokens, implementation):
    """A bias that all share has a part of its gradient on each device: those are summed, and nothing larger moves."""
    arrays = [normal(seed, 4, 256, heads, 64) for seed, heads in enumerate((8, 4, 4))]
    arrays.append(normal(3, 1, 1, 256, 256))
    weight = normal(4, 4, 256, 8, 64)

    def loss(query, key, value, bias):
        out = flash_attention(query, key, value, bias=bias, causal=True, implementation=implementation)
        return jnp.sum((out * weight).astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    expected = gradients(*jax.device_put(arrays, jax.devices()[0]))
    specs = (tokens, tokens, tokens, P())
    spread = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    compiled = gradients.lower(*spread).compile()
    assert max(moved(compiled)) <= 256 * 256
    for found, wanted in zip(compiled(*spread), expected, strict=True):
        assert float(jnp.abs(wanted).max()) > 0.1
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), atol=2e-2, rtol=2e-2)
