"""A decode step of 60 layers with DeepSeek-V3's attention (128 heads, absorbed MLA): how long the GPU idles a layer.

    python benchmarks/mla_step.py --out step.csv [--batch 64 --tokens 1024] [--scan] [--implementation cuda]

All layers share one schedule and one set of small projections (hidden size 256), so that what is left of a layer is
attention and launches. A step's time is that of many steps queued one after the other; the time its kernels were
running is the union of their intervals in a profiler trace of a few more. The difference, over the layers, is the
time outside kernels. (traced_us, the time of a step while the profiler watched, says how far that is to be trusted.)
The result is checked against the "xla" implementation first.
"""

import argparse
import csv
import functools
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.profiler import ProfileData

from pallas_attn import PagedLatentCache, mla_schedule
from pallas_attn.nn import MLAConfig, MultiHeadLatentAttention

NUM_LAYERS, NUM_HEADS, HIDDEN, Q_LORA, PAGE = 60, 128, 256, 128, 64


def build(batch: int, tokens: int, implementation: str, *, scan: bool):
    """(step, cache, x): `step(cache, x)` decodes one token after `tokens` of each sequence, without keeping it."""
    config = MLAConfig(HIDDEN, NUM_HEADS, q_lora_rank=Q_LORA)
    layer_module = MultiHeadLatentAttention(
        config, dtype=jnp.bfloat16, implementation=implementation, rngs=nnx.Rngs(0)
    )
    graph, weights = nnx.split(layer_module)
    pages = tokens // PAGE + 1
    tables = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    cache = PagedLatentCache.create(
        num_layers=NUM_LAYERS, num_pages=batch * pages, page_size=PAGE, block_tables=jnp.asarray(tables)
    )
    noise = jax.random.normal(jax.random.key(0), cache.latent_cache.shape, jnp.bfloat16)
    cache = cache.replace(latent_cache=noise, seq_lens=jnp.full(batch, tokens, jnp.int32))
    x = jax.random.normal(jax.random.key(1), (batch, 1, HIDDEN), jnp.float32)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights, cache, x):
        attention = nnx.merge(graph, weights)
        schedule = mla_schedule(cache.seq_lens + 1, num_heads=NUM_HEADS)
        positions = cache.seq_lens[:, None]

        def layer(carry, index):
            x, cache = carry
            out, cache = attention(x.astype(jnp.bfloat16), cache, index, positions, schedule=schedule)
            return (x + out, cache), None

        if scan:
            return jax.lax.scan(layer, (x, cache), jnp.arange(NUM_LAYERS))[0]
        carry = (x, cache)
        for index in range(NUM_LAYERS):
            carry, _ = layer(carry, index)
        return carry

    return functools.partial(step, weights), cache, x


def largest_difference(batch: int, tokens: int, implementation: str, scan: bool) -> float:
    """Of what the layers add to x, relative to the largest of that, between an implementation and xla."""
    added = []
    for name, scanned in ((implementation, scan), ("xla", True)):
        step, cache, x = build(batch, tokens, name, scan=scanned)
        out, cache = step(cache, x)
        added.append(np.asarray(out - x))
        del cache
    return float(np.abs(added[0] - added[1]).max() / np.abs(added[1]).max())


def seconds_per_step(step, cache, x, count: int):
    def queue(cache, x):
        out = x
        start = time.perf_counter()
        for _ in range(count):
            out, cache = step(cache, x)
        out.block_until_ready()
        return (time.perf_counter() - start) / count, cache

    _, cache = queue(cache, x)
    times = []
    for _ in range(5):
        seconds, cache = queue(cache, x)
        times.append(seconds)
    return float(np.median(times)), cache


def kernel_times(step, cache, x, count: int) -> tuple[float, float, dict[str, tuple[int, float]]]:
    """Seconds a step in which a kernel ran, seconds of a step, and {kernel: (launches, seconds) of a step}."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            out = x
            for _ in range(count):
                out, cache = step(cache, x)
            out.block_until_ready()
        (path,) = Path(directory).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(path))
    intervals, kernels = [], {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                intervals.append((event.start_ns, event.start_ns + event.duration_ns))
                launches, spent = kernels.get(event.name, (0, 0.0))
                kernels[event.name] = (launches + 1, spent + event.duration_ns * 1e-9)
    intervals.sort()
    busy, reached = 0.0, 0.0
    for begin, end in intervals:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    span = reached - intervals[0][0]
    return (
        busy * 1e-9 / count,
        span * 1e-9 / count,
        {k: (n // count, s / count) for k, (n, s) in kernels.items()},
    )


def measure(batch: int, tokens: int, implementation: str, scan: bool, count: int) -> dict[str, object]:
    difference = largest_difference(batch, tokens, implementation, scan)
    assert difference < 0.02, f"differs from xla by {difference}"
    step, cache, x = build(batch, tokens, implementation, scan=scan)
    seconds, cache = seconds_per_step(step, cache, x, count)
    busy, traced, kernels = kernel_times(step, cache, x, 3)
    print(
        f"batch {batch}, {tokens} tokens, {implementation}, {'scan' if scan else 'unrolled'}: kernels of a step"
    )
    for name, (launches, spent) in sorted(kernels.items(), key=lambda item: -item[1][1])[:14]:
        print(f"  {launches:5d} x {spent * 1e6 / max(launches, 1):7.2f} us  {name[:90]}")
    return dict(
        batch=batch,
        tokens=tokens,
        layers=NUM_LAYERS,
        implementation=implementation,
        form="scan" if scan else "unrolled",
        step_us=round(seconds * 1e6, 1),
        traced_us=round(traced * 1e6, 1),
        kernels_us=round(busy * 1e6, 1),
        kernels_a_layer=round(sum(n for n, _ in kernels.values()) / NUM_LAYERS, 1),
        outside_us_a_layer=round((seconds - busy) * 1e6 / NUM_LAYERS, 2),
        difference=f"{difference:.1e}",
    )


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="CSV to append to")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--scan", action="store_true", help="layers in a loop instead of one after the other")
    parser.add_argument("--steps", type=int, default=20, help="queued at a time")
    parser.add_argument("--commit", default="", help="for the CSV")
    given = parser.parse_args()
    row = dict(
        device=jax.devices()[0].device_kind, driver=driver(), jax=jax.__version__, commit=given.commit
    ) | measure(given.batch, given.tokens, given.implementation, given.scan, given.steps)
    new = not given.out.exists()
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(row)


if __name__ == "__main__":
    main()
