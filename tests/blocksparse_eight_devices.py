"""`blocksparse_attention` and its gradients over eight devices, in a process that has them (test_sharding.py)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocksparse_inputs import SMALL_TILES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import SparseLayout, blocksparse_attention
from pallas_attn.ops.blocksparse_attention import builders

pytestmark = pytest.mark.once  # the other ops are sharded on both jax
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "interpret"])
SIZES = dict(block_size=16, q_block_size=16)
FLOATS, LAYOUT = ("query", "key", "value"), ("row_pointers", "columns")
HEADS = P(None, "heads")
BY_HEADS = dict.fromkeys(FLOATS, HEADS) | dict.fromkeys(LAYOUT, P("heads"))
CU_Q, CU_K = (jnp.array(ends, jnp.int32) for ends in ([0, 40, 41, 70], [0, 40, 90, 130]))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("heads", "other"), axis_types=(kind, kind))


@functools.cache
def arguments() -> dict[str, jax.Array]:
    """Of 8 heads over 4, whose patterns differ."""
    rng = np.random.default_rng(0)
    shapes = {"query": (70, 8, 16), "key": (130, 4, 16), "value": (130, 4, 16)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    layout = builders.from_block_mask(rng.random((8, 4, 4)) < 0.6, **SIZES)
    return arrays | {n: jnp.asarray(getattr(layout, n)) for n in LAYOUT}


def attend(query, key, value, row_pointers, columns, *, implementation: str):
    return blocksparse_attention(
        query,
        key,
        value,
        SparseLayout(row_pointers, columns, **SIZES),
        cu_q_lens=CU_Q,
        cu_k_lens=CU_K,
        return_lse=True,
        implementation=implementation,
        config=SMALL_TILES if implementation == "interpret" else None,
    )


def gradients(implementation: str):
    """(value, gradients) of query, key and value."""

    def loss(floats, layout):
        out, lse = attend(**floats, **layout, implementation=implementation)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    return jax.jit(jax.value_and_grad(loss))


def parted(arrays: dict[str, Any]):
    return tuple({n: arrays[n] for n in names} for names in (FLOATS, LAYOUT))


@functools.cache
def expected():
    return gradients("xla")(*parted(arguments()))


def check(got) -> None:
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected())) > 1e-3
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), got, expected())


def placed(mesh: jax.sharding.Mesh, specs: dict[str, P]) -> dict[str, jax.Array]:
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arguments().items()}


@KINDS
@IMPLEMENTATIONS
@pytest.mark.sweep(implementation=None)
def test_heads(kind, implementation):
    """Each device has some KV heads, their query heads and these heads' rows of the layout."""
    mesh = mesh_of(kind)
    value, got = gradients(implementation)(*parted(placed(mesh, BY_HEADS)))
    check((value, got))
    for gradient in got.values():
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, HEADS), 3)


def test_shard_map():
    mesh = mesh_of(AxisType.Explicit)

    @functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False, in_specs=parted(BY_HEADS))
    def loss(floats, layout):
        out, lse = attend(**floats, **layout, implementation="interpret")
        return jax.lax.psum(jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse)), "heads")

    floats, layout = parted(placed(mesh, BY_HEADS))
    value, _ = expected()
    np.testing.assert_allclose(jax.jit(loss)(floats, layout), value, rtol=1e-5)


@KINDS
def test_tokens_on_several_devices_are_refused(kind):
    arrays = placed(mesh_of(kind), {"key": P("other"), "value": P("other")})
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with pytest.raises(
        error, match="blocksparse_attention: argument 'key': expected all tokens on every device"
    ):
        jax.jit(functools.partial(attend, implementation="interpret"))(**arrays)
