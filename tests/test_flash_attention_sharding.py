"""`flash_attention` lowered for GPUs that are not there; flash_eight_devices.py has it on eight of the CPU's."""

import functools

import jax
import jax.numpy as jnp
import lowering
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_attn import flash_attention

pytestmark = pytest.mark.once  # the other ops are sharded on both jax


def test_gradients_in_shard_map_lower_for_a_gpu():
    """With the check of what varies, which is the default."""
    kind, cores = lowering.H100
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Explicit,),
                        abstract_device=AbstractDevice(platform="gpu", device_kind=kind, num_cores=cores))  # fmt: skip
    tokens = jax.ShapeDtypeStruct((8, 256, 8, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):

        @functools.partial(jax.shard_map, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P())
        def loss(query, key, value, sinks):
            out = flash_attention(query, key, value, sinks=sinks, causal=True, implementation="pallas")
            return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), "x")

        placed = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=jax.NamedSharding(mesh, P("x")))
        sinks = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, P()))
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(placed, placed, placed, sinks)
        lowered = traced.lower(lowering_platforms=("cuda",))
    names = {
        name.removeprefix("pallas_attn_flash_attention") for name, *_ in lowering.triton_kernels(lowered)
    }
    assert names == {"", "_dq", "_dkv"}
