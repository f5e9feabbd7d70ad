"""The ops on more than one device: on eight of the CPU's, and lowered for GPUs that are not there; and vmap."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn
from pallas_attn._call import ffi

HEADS = (P(None, "x"), P(None, None, "x"), P(None, None, "x"), P(), P())
BATCH = (P("x"), P(), P(), P("x"), P("x"))


def arguments(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 8, 64)), dtype)
    key, value = (jnp.asarray(rng.standard_normal((24, 16, 2, 64)), dtype) for _ in range(2))
    tables = jnp.asarray(rng.permutation(24)[:20].reshape(4, 5), jnp.int32)
    return query, key, value, tables, jnp.array([70, 0, 33, 80], jnp.int32)


def test_on_eight_devices(pytestconfig):
    """The number of devices is settled when JAX starts: these tests have a process of their own, all of them one, and
    of them the same are left out as here."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTEST_ADDOPTS": "",
    }
    folder = Path(__file__).parent
    tests = [
        str(folder / name)
        for name in (
            "eight_devices.py",
            "plain_eight_devices.py",
            "steps_eight_devices.py",
            "flash_eight_devices.py",
            "modules_eight_devices.py",
            "blocksparse_eight_devices.py",
        )
    ]
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cases = ["--sample"] if pytestconfig.option.sample else []
    run = subprocess.run(
        [*pytest_here, *cases, "-m", pytestconfig.option.markexpr, *tests],
        env=environment,
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.parametrize("specs", [HEADS, BATCH], ids=["heads", "batch"])
def test_shard_map_lowers_for_a_gpu(specs):
    """With the check of what varies, which is the default."""
    out = P("x") if specs is BATCH else P(None, "x")

    def attend(*arguments):
        mesh = jax.sharding.get_abstract_mesh()
        config = pallas_attn.PagedAttentionConfig(16, 16, min_split_tokens=32)  # cuts, and merges
        op = functools.partial(pallas_attn.paged_attention, implementation="pallas", config=config)
        return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=out)(*arguments)

    lowered = lowering.lower_for_gpu(attend, *arguments(jnp.bfloat16), num_devices=2)
    names = [k[0] for k in lowering.triton_kernels(lowered)]
    assert names == ["pallas_attn_paged_attention", "pallas_attn_paged_attention_combine"]


def scheduled(query, cache, tables, lens, implementation):
    schedule = pallas_attn.mla_schedule(lens, num_heads=128, q_len=2)
    return pallas_attn.mla_decode(
        query, cache, tables, lens, schedule=schedule, implementation=implementation
    )


POOL = ((64, 16, 8, 128), "bfloat16", P(None, None, "head"))
TABLES = [((8, 5), "int32", P("seq")), ((8,), "int32", P("seq"))]
NEW = ((8, 8, 128), "bfloat16", P("seq", "head"))
LATENT = [
    ((8, 2, 128, 576), "bfloat16", P("seq", None, "head")),
    ((64, 64, 1, 576), "bfloat16", P()),
    *TABLES,
]
SPLIT = "64x16x8x128xbf16", '[{}, {}, {"head"}, {}]', "64x16x2x128xbf16"
UNSPLIT = "64x64x1x576xbf16", "[{}, {}, {}, {}]", "64x64x1x576xbf16"
FLAT = *UNSPLIT[:2], "64x36864xbf16"  # as the kernel that turns products takes a pool
# The call and its arguments; the pools' shape, how they are sharded, and the shape of a device's share.
EXPLICIT = {
    "paged": (
        functools.partial(pallas_attn.paged_attention, implementation="pallas"),
        [((8, 32, 128), "bfloat16", P("seq", "head")), POOL, POOL, *TABLES],
        SPLIT,
    ),
    "write": (
        functools.partial(pallas_attn.write_kv, implementation="pallas"),
        [NEW, NEW, POOL, POOL, ((8,), "int32", P("seq"))],
        SPLIT,
    ),
    "mla-pallas": (functools.partial(scheduled, implementation="pallas"), LATENT, FLAT),
    "mla-cuda": (functools.partial(scheduled, implementation="cuda"), LATENT, UNSPLIT),
}


@pytest.mark.parametrize("case", EXPLICIT)
def test_explicit_axes_lower_for_eight_gpus(case):
    """Outside shard_map: each device's kernel gets its share of the pool, where it is."""
    if case == "mla-cuda" and not ffi.is_available()[0]:
        pytest.skip(str(ffi.is_available()[1]))
    function, arguments, (whole, where, share) = EXPLICIT[case]
    gpu = AbstractDevice(platform="gpu", device_kind=lowering.H100[0], num_cores=lowering.H100[1])
    mesh = AbstractMesh((2, 4), ("seq", "head"), axis_types=(AxisType.Explicit,) * 2, abstract_device=gpu)
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arguments
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    kernels = [
        line
        for line in text.splitlines()
        if "xla.gpu.triton" in line or "pallas_attn_mla_decode_sm90" in line
    ]
    assert kernels
    assert share in kernels[0]
    stays = re.findall(rf"sharding_constraint .*<@mesh, (.*)> : tensor<{whole}>", text)
    assert set(stays) == {where}


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_vmap(implementation):
    query, *rest = arguments()
    attend = functools.partial(pallas_attn.paged_attention, implementation=implementation)
    batched = jax.vmap(attend, in_axes=(0, None, None, None, None))(jnp.stack([query, 2 * query]), *rest)
    for out, q in zip(batched, (query, 2 * query), strict=True):
        np.testing.assert_allclose(out, pallas_attn.paged_attention(q, *rest), atol=1e-5)
