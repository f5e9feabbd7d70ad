"""Times `mla_decode` in JAX over a list of shapes, every result checked against a float32 reference.

    python benchmarks/mla_decode.py --out results.csv [--shapes shapes.json] [--ids REGEX] [--ways cuda pallas grid]
        [--max-seconds S]

Without --shapes, those of shapes.py. `shapes.json` holds {"mla_decode": [{"id", "b", "s", "h", "sq", "page", maybe
"lens"}, ...]}. Ways: the CUDA kernel and the Pallas kernel with a schedule made beforehand, the Pallas kernel without
one ("grid"), and plain jnp ("xla"). Times are of calls inside one jitted loop ("loop"), page sets in rotation that
together are larger than the L2, shuffled tables.
"""

import argparse
import csv
import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from shapes import mla_decode as mla_decode_shapes

from pallas_attn import mla_decode, mla_schedule
from pallas_attn.testing.compare import row_errors
from pallas_attn.tuning.timing import REPEATS, device_seconds, tiled, warm_up

DIM, LATENT = 576, 512
ROTATE_BYTES = 1600 << 20
MOST_SETS = 128
BURST_SECONDS = 0.02
BLOCK = 1 << 22  # random elements of which a pool is made
LARGEST_ERROR = 5e-3
# Name -> implementation, with a schedule or not.
WAYS = {"cuda": ("cuda", True), "pallas": ("pallas", True), "grid": ("pallas", False), "xla": ("xla", False)}
COLUMNS = ["device", "jax", "peer", "op", "id", "us", "tflops", "gbs", "method", "err", "note"]


class Shape(NamedTuple):
    id: str
    lengths: tuple[int, ...]
    heads: int
    q_len: int
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

    @property
    def num_calls(self) -> int:
        """Of a run of `looped`."""
        return self.num_rounds * self.num_sets + 2

    def work(self) -> tuple[int, int]:
        """FlashMLA's counting: causal not subtracted, query and output once."""
        rows, tokens = len(self.lengths) * self.q_len * self.heads, sum(self.lengths)
        flops = 2 * self.q_len * self.heads * tokens * (DIM + LATENT)
        return flops, 2 * (tokens * DIM + rows * (DIM + LATENT))


class Inputs(NamedTuple):
    query: Any
    cache: Any
    tables: tuple[Any, ...]
    lengths: Any


def shapes_of(path: Path | None, ids: str) -> list[Shape]:
    found = []
    for s in json.loads(path.read_text())["mla_decode"] if path else mla_decode_shapes():
        if re.search(ids, s["id"]):
            lengths = tuple(s.get("lens") or [s["s"]] * s["b"])
            found.append(Shape(s["id"], lengths, s["h"], s["sq"], s["page"]))
    return found


def input_shapes(shape: Shape) -> Inputs:
    batch, total = len(shape.lengths), sum(shape.pages) * shape.num_sets
    struct = jax.ShapeDtypeStruct
    return Inputs(
        struct((batch, shape.q_len, shape.heads, DIM), jnp.bfloat16),
        struct((total, shape.page_size, 1, DIM), jnp.bfloat16),
        (struct((batch, max(shape.pages)), jnp.int32),) * shape.num_sets,
        struct((batch,), jnp.int32),
    )


def inputs_of(shape: Shape) -> Inputs:
    structs = input_shapes(shape)
    shuffled = np.random.default_rng(0).permutation(structs.cache.shape[0]).astype(np.int32)
    tables = []
    for pages in np.split(shuffled, shape.num_sets):
        table = np.zeros(structs.tables[0].shape, np.int32)
        for i, own in enumerate(np.split(pages, np.cumsum(shape.pages)[:-1])):
            table[i, : len(own)] = own
        tables.append(jnp.asarray(table))
    lengths = jnp.asarray(np.array(shape.lengths, np.int32))
    query = np.random.default_rng(1).standard_normal(structs.query.shape, np.float32)
    block = np.random.default_rng(2).standard_normal(BLOCK, np.float32)
    cache = tiled(jnp.asarray(block, jnp.bfloat16), structs.cache.shape)
    return Inputs(jnp.asarray(query, jnp.bfloat16), cache, tuple(tables), lengths)


def attend(shape: Shape, way: str) -> tuple[Callable[..., Any], Any]:
    """(call(query, cache, table, lengths, schedule), schedule)."""
    implementation, scheduled = WAYS[way]
    schedule = None
    if scheduled:
        lengths = jnp.asarray(np.array(shape.lengths, np.int32))
        make = functools.partial(mla_schedule, num_heads=shape.heads, q_len=shape.q_len)
        schedule = jax.jit(make)(lengths)

    @jax.jit  # so that it is traced once, not once a table
    def call(query, cache, table, lengths, schedule):
        causal = shape.q_len > 1
        return mla_decode(
            *(query, cache, table, lengths),
            schedule=schedule,
            causal=causal,
            return_lse=True,
            implementation=implementation,
        )

    return call, schedule


def looped(
    call: Callable[..., Any], rounds: int, plain: bool, inputs: Inputs, schedule: Any
) -> tuple[jax.Array, jax.Array]:
    """The outputs for the first and for the last table, by two calls behind `rounds` rounds of a call for each table.

    A round waits for the lse of each call of the one before, so that none can be hoisted or dropped, and keeps nothing
    else: outputs are dead at once and share a buffer, which stays in the L2, as they do in a model and in the graphs
    that other kernels are timed by. Kept from round to round they would lie in several. `plain` says that a call is
    jnp, of which XLA would drop what only the output needs, and compile a copy for every table.
    """

    def results(table, lengths) -> tuple[jax.Array, jax.Array]:
        return call(inputs.query, inputs.cache, table, lengths, schedule)

    def probe(table, lengths) -> jax.Array:
        out, lse = results(table, lengths)
        return lse[0, 0, 0] + out[0, 0, 0, 0].astype(lse.dtype) if plain else lse[0, 0, 0]

    def after(number: jax.Array, lengths: jax.Array) -> jax.Array:
        """The lengths as they are, which only `number` can tell."""
        return lengths + jnp.isnan(number).astype(lengths.dtype)

    def body(_, lengths):
        if plain:
            probes = jax.lax.map(lambda table: probe(table, lengths), jnp.stack(inputs.tables))
        else:
            probes = jnp.stack([probe(table, lengths) for table in inputs.tables])
        return after(jnp.sum(probes), lengths)

    lengths = jax.lax.fori_loop(0, rounds, body, inputs.lengths)
    first, lse = results(inputs.tables[0], lengths)
    last, _ = results(inputs.tables[-1], after(lse[0, 0, 0], lengths))
    return first, last


def build(shape: Shape, way: str) -> tuple[Callable[..., tuple[jax.Array, ...]], Any]:
    """(run(inputs, schedule), schedule)."""
    call, schedule = attend(shape, way)
    plain = WAYS[way][0] == "xla"
    run = jax.jit(functools.partial(looped, call, shape.num_rounds, plain))
    return run.lower(input_shapes(shape), schedule).compile(), schedule


@jax.jit
def ends(out: jax.Array) -> jax.Array:
    """What is checked: the first and the last request's rows."""
    return out[jnp.array([0, -1])]


@jax.jit
def _pages(cache: jax.Array, pages: jax.Array) -> jax.Array:
    return cache[pages]


def expected_ends(shape: Shape, inputs: Inputs) -> list[np.ndarray]:
    """`ends` of the right outputs for the first and for the last table."""
    return [_expected_ends(shape, inputs, table) for table in (inputs.tables[0], inputs.tables[-1])]


def _expected_ends(shape: Shape, inputs: Inputs, table: jax.Array) -> np.ndarray:
    """`ends` of the right output, by numpy in float32: [2, q_len, heads, LATENT]."""
    rows = []
    table_on_host = np.asarray(table)
    queries = np.asarray(ends(inputs.query), np.float32)
    for request, query in zip((0, len(shape.lengths) - 1), queries, strict=True):
        length = shape.lengths[request]
        pages = _pages(inputs.cache, table_on_host[request, : shape.pages[request]])
        keys = np.asarray(pages).reshape(-1, DIM)[:length].astype(np.float32)
        logits = query @ keys.T * DIM**-0.5  # [q_len, heads, length]
        # Query i is the token length - q_len + i and sees what is up to itself.
        last_seen = length - shape.q_len + np.arange(shape.q_len)[:, None, None]
        logits = np.where(np.arange(length) <= last_seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        rows.append(weights @ keys[:, :LATENT] / weights.sum(-1, keepdims=True))
    return np.stack(rows)


def worst_error(ends_of_outs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest relative error of a row of any of these outputs; NaN where one holds it."""
    return float(row_errors(np.stack(ends_of_outs), np.stack(expected)).max())


def microseconds(shape: Shape, run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Of one call in `run`, which is what `build` gives on its inputs."""
    return device_seconds(run, repeats) / shape.num_calls * 1e6


def measure(shape: Shape, builds: dict[str, tuple[Callable[..., Any], Any]], warm: bool):
    """Yields one row of the table for each way; each is printed too."""
    inputs = inputs_of(shape)
    expected = expected_ends(shape, inputs)
    flops, num_bytes = shape.work()
    for way, (built, schedule) in builds.items():
        run = functools.partial(built, inputs, schedule)
        outs = run()
        checked = [np.asarray(ends(out)) for out in outs]
        del outs
        error = worst_error(checked, expected)
        if not warm:
            warm_up(run)
            warm = True
        us = microseconds(shape, run)
        row = dict(
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            peer=f"pallas_attn-{way}",
            op="mla_decode",
            id=shape.id,
            us=f"{us:.2f}",
            tflops=f"{flops / us / 1e6:.0f}",
            gbs=f"{num_bytes / us / 1e3:.0f}",
            method="loop",
            err=f"{error:.1e}",
            note="" if error <= LARGEST_ERROR else "WRONG",
        )
        print(shape.id, way, row["us"], "us", row["err"], row["note"], flush=True)
        yield row


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=Path, help="JSON file; default: the README's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ids", default="", help="regular expression")
    parser.add_argument("--ways", nargs="+", default=["cuda", "pallas", "grid"], choices=list(WAYS))
    parser.add_argument("--max-seconds", type=float, default=1e9)
    arguments = parser.parse_args(command_line)
    start = time.time()

    shapes = shapes_of(arguments.shapes, arguments.ids)
    with ThreadPoolExecutor() as pool, arguments.out.open("w", newline="") as file:
        # Compiling beside a measurement would disturb it.
        builds = list(pool.map(build, *zip(*itertools.product(shapes, arguments.ways), strict=True)))
        print(f"compiled {len(builds)} in {time.time() - start:.0f} s", flush=True)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, shape in enumerate(shapes):
            if time.time() - start > arguments.max_seconds:
                print("out of time before", shape.id)
                break
            own = builds[number * len(arguments.ways) : (number + 1) * len(arguments.ways)]
            ways = dict(zip(arguments.ways, own, strict=True))
            for row in measure(shape, ways, warm=number > 0):
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
