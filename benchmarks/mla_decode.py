"""Times `mla_decode` in JAX over a list of shapes, every result checked against the reference.

    python benchmarks/mla_decode.py --shapes shapes.json --out results.csv [--ids REGEX] [--ways cuda pallas grid]

`shapes.json` holds {"mla_decode": [{"id", "b", "s", "h", "sq", "page", maybe "lens"}, ...]}. Ways: the CUDA kernel and
the Pallas kernel with a schedule made beforehand, and the Pallas kernel without one ("grid"). Times are of calls inside one
jitted loop, page sets in rotation that together are larger than the L2, shuffled tables.
"""

import argparse
import csv
import functools
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import mla_decode, mla_schedule
from pallas_attn._timing import device_seconds, warm_up

DIM, LATENT = 576, 512
ROTATE_BYTES = 1600 << 20
MOST_SETS = 128
BURST_SECONDS = 0.02
LARGEST_ERROR = 5e-3
WAYS = {"cuda": ("cuda", True), "pallas": ("pallas", True), "grid": ("pallas", False)}
COLUMNS = ["device", "jax", "peer", "op", "id", "us", "tflops", "gbs", "method", "err", "note"]


class Shape(NamedTuple):
    id: str
    lengths: tuple[int, ...]
    heads: int
    s_q: int
    page_size: int

    @property
    def pages(self) -> list[int]:
        return [math.ceil(n / self.page_size) for n in self.lengths]

    @property
    def num_sets(self) -> int:
        set_bytes = sum(self.pages) * self.page_size * DIM * 2
        return max(1, min(MOST_SETS, math.ceil(ROTATE_BYTES / set_bytes)))

    @property
    def num_rounds(self) -> int:
        """Of one call a set, to take about BURST_SECONDS."""
        flops, num_bytes = self.work()
        seconds = max(num_bytes / 2.5e12, flops / 4e14, 8e-6)
        return max(1, round(BURST_SECONDS / (seconds * self.num_sets)))

    def work(self) -> tuple[int, int]:
        """FlashMLA's counting: causal not subtracted, query and output once."""
        rows, tokens = len(self.lengths) * self.s_q * self.heads, sum(self.lengths)
        flops = 2 * self.s_q * self.heads * tokens * (DIM + LATENT)
        return flops, 2 * (tokens * DIM + rows * (DIM + LATENT))


class Inputs(NamedTuple):
    query: Any
    cache: Any
    tables: tuple[Any, ...]
    lengths: Any


def shapes_of(path: Path, ids: str) -> list[Shape]:
    found = []
    for s in json.loads(path.read_text())["mla_decode"]:
        if re.search(ids, s["id"]):
            lengths = tuple(s.get("lens") or [s["s"]] * s["b"])
            found.append(Shape(s["id"], lengths, s["h"], s["sq"], s["page"]))
    return found


def input_shapes(shape: Shape) -> Inputs:
    batch, total = len(shape.lengths), sum(shape.pages) * shape.num_sets
    struct = jax.ShapeDtypeStruct
    return Inputs(
        struct((batch, shape.s_q, shape.heads, DIM), jnp.bfloat16),
        struct((total, shape.page_size, 1, DIM), jnp.bfloat16),
        (struct((batch, max(shape.pages)), jnp.int32),) * shape.num_sets,
        struct((batch,), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _random(shape: tuple[int, ...]) -> jax.Array:
    """Normal values; a block of them repeated, so that drawing them takes neither long nor much memory."""
    size = math.prod(shape)
    block = jax.random.normal(jax.random.key(size % 997), (min(size, 1 << 26),), jnp.bfloat16)
    return jnp.tile(block, math.ceil(size / len(block)))[:size].reshape(shape)


def inputs_of(shape: Shape) -> Inputs:
    structs = input_shapes(shape)
    shuffled = np.random.default_rng(0).permutation(structs.cache.shape[0]).astype(np.int32)
    tables = []
    for pages in np.split(shuffled, shape.num_sets):
        table = np.zeros(structs.tables[0].shape, np.int32)
        for row, own in zip(table, np.split(pages, np.cumsum(shape.pages)[:-1]), strict=True):
            row[: len(own)] = own
        tables.append(jnp.asarray(table))
    lengths = jnp.asarray(np.array(shape.lengths, np.int32))
    return Inputs(_random(structs.query.shape), _random(structs.cache.shape), tuple(tables), lengths)


def attend(shape: Shape, way: str) -> tuple[Callable[..., jax.Array], Any]:
    """(call(query, cache, table, lengths, schedule), schedule)."""
    implementation, scheduled = WAYS.get(way, (way, False))
    schedule = None
    if scheduled:
        lengths = jnp.asarray(np.array(shape.lengths, np.int32))
        schedule = mla_schedule(lengths, num_heads=shape.heads, s_q=shape.s_q)

    def call(query, cache, table, lengths, schedule):
        options = dict(causal=shape.s_q > 1, implementation=implementation, schedule=schedule)
        return mla_decode(query, cache, table, lengths, **options)

    return call, schedule


def looped(
    call: Callable[..., jax.Array], rounds: int, inputs: Inputs, schedule: Any
) -> tuple[jax.Array, ...]:
    """Lengths depend on the round before, so that no call can be hoisted or dropped."""

    def body(_, carry):
        lengths, _ = carry
        outs = tuple(call(inputs.query, inputs.cache, table, lengths, schedule) for table in inputs.tables)
        probe = sum(out[0, 0, 0, 0].astype(jnp.float32) for out in outs)
        return lengths + jnp.isnan(probe).astype(lengths.dtype), outs

    outs = tuple(jnp.zeros((*inputs.query.shape[:3], LATENT), inputs.query.dtype) for _ in inputs.tables)
    return jax.lax.fori_loop(0, rounds, body, (inputs.lengths, outs))[1]


def error(shape: Shape, inputs: Inputs, out: jax.Array, table: jax.Array) -> float:
    """Worst row of the first and the last request, ||out - reference|| / ||reference||."""
    worst = 0.0
    reference, _ = attend(shape, "xla")
    for request in (0, len(shape.lengths) - 1):
        at = slice(request, request + 1)
        expected = reference(
            inputs.query[at].astype(jnp.float32),
            inputs.cache[table[request, : shape.pages[request]]].astype(jnp.float32),
            jnp.arange(shape.pages[request], dtype=jnp.int32)[None],
            inputs.lengths[at],
            None,
        )
        difference = np.asarray(out[at], np.float32) - np.asarray(expected)
        norms = np.linalg.norm(difference, axis=-1) / np.linalg.norm(np.asarray(expected), axis=-1)
        worst = max(worst, float(norms.max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ids", default="", help="regular expression")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--max-seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    start = time.time()

    def build(shape: Shape, way: str):
        call, schedule = attend(shape, way)
        run = jax.jit(functools.partial(looped, call, shape.num_rounds))
        return run.lower(input_shapes(shape), schedule).compile(), schedule

    shapes = shapes_of(arguments.shapes, arguments.ids)
    with ThreadPoolExecutor() as pool, arguments.out.open("w", newline="") as file:
        # Compiling beside a measurement would disturb it.
        futures = [[pool.submit(build, shape, way) for way in arguments.ways] for shape in shapes]
        builds = [[future.result() for future in row] for row in futures]
        print(f"compiled {len(shapes)} x {len(arguments.ways)} in {time.time() - start:.0f} s", flush=True)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, (shape, row) in enumerate(zip(shapes, builds, strict=True)):
            if time.time() - start > arguments.max_seconds:
                print("out of time before", shape.id)
                break
            inputs = inputs_of(shape)
            flops, num_bytes = shape.work()
            for way, (built, schedule) in zip(arguments.ways, row, strict=True):
                run = functools.partial(built, inputs, schedule)
                outs = run()
                pairs = ((outs[0], inputs.tables[0]), (outs[-1], inputs.tables[-1]))
                err = max(error(shape, inputs, out, table) for out, table in pairs)
                del outs, pairs
                if number == 0:
                    warm_up(run)
                us = device_seconds(run) / (shape.num_rounds * shape.num_sets) * 1e6
                result = dict(
                    device=jax.devices()[0].device_kind,
                    jax=jax.__version__,
                    peer=f"pallas_attn-{way}",
                    op="mla_decode",
                    id=shape.id,
                    us=f"{us:.2f}",
                    tflops=f"{flops / us / 1e6:.0f}",
                    gbs=f"{num_bytes / us / 1e3:.0f}",
                    method="loop",
                    err=f"{err:.1e}",
                    note="" if err <= LARGEST_ERROR else "WRONG",
                )
                writer.writerow(result)
                file.flush()
                print(shape.id, way, result["us"], "us", result["err"], result["note"], flush=True)
            del inputs


if __name__ == "__main__":
    main()
