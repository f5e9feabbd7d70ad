"""The ops inside shard_map, heads or batch over a mesh, and under vmap."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_attn

HEADS = (P(None, "x"), P(None, None, "x"), P(None, None, "x"), P(), P())
BATCH = (P("x"), P(), P(), P("x"), P("x"))


def arguments(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 8, 64)), dtype)
    key, value = (jnp.asarray(rng.standard_normal((24, 16, 2, 64)), dtype) for _ in range(2))
    tables = jnp.asarray(rng.permutation(24)[:20].reshape(4, 5), jnp.int32)
    return query, key, value, tables, jnp.array([70, 0, 33, 80], jnp.int32)


def sharded_equals_whole() -> None:
    """Run by a process of its own that has two devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    expected = pallas_attn.paged_attention(*arguments())
    # Interpreted kernels cannot be checked for what varies: their loads lose it.
    for implementation, check_vma in (("xla", True), ("xla", False), ("interpret", False)):
        attend = functools.partial(pallas_attn.paged_attention, implementation=implementation)
        for specs, out in ((HEADS, P(None, "x")), (BATCH, P("x"))):
            sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
            np.testing.assert_allclose(jax.jit(sharded)(*arguments()), expected, atol=1e-5)


def test_shard_map():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    folder = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(
        [environment.get("PYTHONPATH", ""), str(folder.parent), str(folder)]
    )
    code = "import test_sharding; test_sharding.sharded_equals_whole(); print('sharded')"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip() == "sharded", run.stderr[-2000:]


@pytest.mark.parametrize("specs", [HEADS, BATCH], ids=["heads", "batch"])
def test_shard_map_lowers_for_a_gpu(specs):
    """With the check of what varies, which is the default."""
    out = P("x") if specs is BATCH else P(None, "x")

    def attend(*arguments):
        mesh = jax.sharding.get_abstract_mesh()
        op = functools.partial(pallas_attn.paged_attention, implementation="pallas")
        return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=out)(*arguments)

    lowered = lowering.lower_for_gpu(attend, *arguments(jnp.bfloat16), num_devices=2)
    assert [k[0] for k in lowering.triton_kernels(lowered)] == ["pallas_attn_paged_attention"]


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_vmap(implementation):
    query, *rest = arguments()
    attend = functools.partial(pallas_attn.paged_attention, implementation=implementation)
    batched = jax.vmap(attend, in_axes=(0, None, None, None, None))(jnp.stack([query, 2 * query]), *rest)
    for out, q in zip(batched, (query, 2 * query), strict=True):
        np.testing.assert_allclose(out, pallas_attn.paged_attention(q, *rest), atol=1e-5)
