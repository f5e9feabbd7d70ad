"""`flash_attention` on more than one device: on eight of the CPU's, and lowered for GPUs that are not there."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import lowering
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_attn import flash_attention

pytestmark = pytest.mark.once  # the other ops are sharded on both jax


def test_on_eight_devices():
    """The number of devices is settled when JAX starts: these tests have a process of their own."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTEST_ADDOPTS": "",
    }
    tests = Path(__file__).with_name("flash_eight_devices.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=environment,
        cwd=tests.parents[1],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


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
