"""XLA captures calls of the CUDA kernels in a command buffer, a CUDA graph: many calls, one launch. Needs a GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

import pallas_attn
from pallas_attn._call import ffi

pytestmark = pytest.mark.gpu

NUM_LAYERS = 8
CAPTURED = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
LAUNCHED = {"xla_gpu_enable_command_buffer": ""}


def one_after_the_other(layer, query):
    for _ in range(NUM_LAYERS):
        query = layer(query)
    return query


def in_a_loop(layer, query):
    return jax.lax.fori_loop(0, NUM_LAYERS, lambda _, query: layer(query), query)


def compiled(repeat, options: dict):
    """(executable, arguments) of layers that share a schedule, each attending with the output of the one before."""
    lens = jnp.array([700, 64, 0, 2000], jnp.int32)
    tables = jnp.asarray(np.random.default_rng(0).permutation(4 * 32).reshape(4, 32), jnp.int32)
    cache = jax.random.normal(jax.random.key(0), (4 * 32, 64, 1, 576), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (4, 1, 64, 576), jnp.bfloat16)

    def step(query, cache, tables, lens):
        schedule = pallas_attn.mla_schedule(lens, num_heads=64)

        def layer(query):
            out = pallas_attn.mla_decode(query, cache, tables, lens, schedule=schedule, implementation="cuda")
            return query.at[..., :512].add(out)

        return repeat(layer, query)

    arguments = (query, cache, tables, lens)
    return jax.jit(step).lower(*arguments).compile(compiler_options=options), arguments


def traced(executable, arguments, directory: Path) -> tuple[np.ndarray, list[str], list[str]]:
    """The result, and what the profiler saw: the host's CUDA calls (a launch by its kernel's name), and kernels."""
    for _ in range(2):  # the first call runs as written, the second builds the graph
        executable(*arguments).block_until_ready()
    with jax.profiler.trace(str(directory)):
        out = executable(*arguments).block_until_ready()
    (path,) = directory.rglob("*.xplane.pb")
    host, device = [], []
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            on_stream = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
            (device if on_stream else host).extend(event.name for event in line.events)
    return np.asarray(out.astype(jnp.float32)), host, device


def count(names: list[str], text: str) -> int:
    return sum(text in name for name in names)


@pytest.mark.parametrize(("repeat", "runs_shown"), [(one_after_the_other, NUM_LAYERS), (in_a_loop, 1)])
def test_layers_are_launched_as_one_graph(repeat, runs_shown: int, tmp_path: Path) -> None:
    """Seen on an H100 with jax 0.11.2: one cuGraphLaunch, no other launch of ours, the same bits."""
    if not ffi.is_available()[0]:
        pytest.skip(str(ffi.is_available()[1]))
    launched, host, device = traced(*compiled(repeat, LAUNCHED), tmp_path / "launched")
    assert count(host, "cuGraphLaunch") == 0
    assert (count(host, "schedule_kernel"), count(device, "schedule_kernel")) == (1, 1)
    assert (count(host, "decode_kernel"), count(device, "decode_kernel")) == (NUM_LAYERS, NUM_LAYERS)
    captured, host, device = traced(*compiled(repeat, CAPTURED), tmp_path / "captured")
    assert count(host, "cuGraphLaunch") == 1
    assert (count(host, "schedule_kernel"), count(device, "schedule_kernel")) == (0, 1)
    # Of a node in a graph's loop the profiler shows one run.
    assert (count(host, "decode_kernel"), count(device, "decode_kernel")) == (0, runs_shown)
    np.testing.assert_array_equal(captured, launched)
