"""XLA captures calls of our kernels in a command buffer, a CUDA graph: many calls, one launch. Needs a GPU."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

import pallas_attn
from pallas_attn._call import ffi
from pallas_attn.ops.blocksparse_attention import builders

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


def normal(seed: int, *shape: int) -> jax.Array:
    """Made by the host: a loop's graph should hold kernels, not what makes numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


LENS, TABLES = jnp.array([200, 64, 0, 256], jnp.int32), jnp.arange(64, dtype=jnp.int32).reshape(4, 16)


def written_and_attended(query, implementation):
    pool, new = normal(0, 64, 16, 8, 128), query[:, :8]
    pools = pallas_attn.write_kv(new, new, pool, 2 * pool, LENS, implementation=implementation)
    return pallas_attn.paged_attention(query, *pools, TABLES, LENS, implementation=implementation)


def ragged(query, implementation):
    pool, ends = normal(0, 64, 16, 8, 128), jnp.array([0, 60, 64, 64, 128], jnp.int32)
    return pallas_attn.ragged_paged_attention(
        query, pool, 2 * pool, TABLES, LENS, ends, implementation=implementation
    )


def flash_gradients(query, implementation):
    def loss(query):
        keys = normal(0, 1, 256, 2, 64)
        out = pallas_attn.flash_attention(query, keys, 2 * keys, causal=True, implementation=implementation)
        return out.astype(jnp.float32).sum()

    return jax.grad(loss)(query)


def blocksparse(query, implementation):
    keys, layout = normal(0, 256, 2, 64), builders.sliding_window(100, 256, block_size=64)
    return pallas_attn.blocksparse_attention(
        query, keys, 2 * keys, layout, cu_k_lens=jnp.array([0, 256]), implementation=implementation
    )


def latents(query, implementation):
    pool, new = jnp.zeros((4, 64, 1, 656), jnp.uint8), query[:, 0, 0]
    pool = pallas_attn.write_latents(new, pool, LENS, implementation=implementation)
    chosen = jnp.arange(4 * 64, dtype=jnp.int32).reshape(4, 1, 64)
    out = pallas_attn.mla_decode(query, pool, TABLES[:, :4] % 4, LENS, implementation=implementation)
    out += pallas_attn.sparse_mla_decode(query, pool, chosen, implementation=implementation)
    return query.at[..., :512].add(out)


@pytest.mark.parametrize(
    ("attend", "sizes"),
    [
        (written_and_attended, (4, 32, 128)),
        (ragged, (128, 32, 128)),
        (flash_gradients, (1, 256, 4, 64)),
        (blocksparse, (256, 4, 64)),
        (latents, (4, 1, 16, 576)),
    ],
)
def test_triton_is_launched_as_often_as_pallas(attend: Callable, sizes: tuple[int, ...], tmp_path: Path):
    """One by one and in a loop's graph, by XLA's own settings and with the whole loop captured."""
    pytest.importorskip("jax.experimental.pallas.triton")
    for name, options in (("default", {}), ("captured", CAPTURED)):
        launches = {}
        for implementation in ("pallas", "triton"):
            layer = functools.partial(attend, implementation=implementation)
            step = jax.jit(functools.partial(in_a_loop, layer))
            query = normal(1, *sizes)
            executable = step.lower(query).compile(compiler_options=options)
            _, host, device = traced(executable, (query,), tmp_path / name / implementation)
            assert count(device, "pallas_attn") > 0
            launches[implementation] = count(host, "cuGraphLaunch"), count(host, "LaunchKernel")
        assert launches["triton"] == launches["pallas"], name
    assert launches["triton"][0] >= 1, "nothing is captured"
