"""Times jax's own paged attention for GPUs, which is deprecated, as `paged_attention.py` times ours.

    python benchmarks/paged_attention_deprecated.py --out results.csv [--shapes shapes.json] [--ids REGEX ...]
        [--max-seconds S]

The same loop, counted the same way, over pools in the layout that it wants. Each cell's time is that of the better
of two variants, which the note names; of up to four that were tried in 16 cells, these are the kinds that won.
"""

import argparse
import csv
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import paged_attention as ours
from pallas_attn._timing import device_seconds, warm_up

from pallas_attn._call.device import current_device
from pallas_attn.tuning import points
from pallas_attn.tuning.points import Inputs, Point

LARGEST_ERROR = 2e-2  # its partial results are bf16
CELLS_A_BATCH = 8


def variants(point: Point) -> list[dict[str, int]]:
    """Splits for 2 programs a multiprocessor, as near as it allows, and beside them 8 programs, or larger blocks."""
    allowed = [k for k in (2**i for i in range(8)) if point.max_pages % (4 * k) == 0]
    cores = current_device().num_cores
    few, many = (
        min(allowed, key=lambda k: abs(math.log2(k * point.streams / (programs * cores))))
        for programs in (2, 8)
    )
    second = (many, 4) if point.max_len >= 4096 and many != few else (few, 8)
    names = ("k_splits", "pages_per_compute_block", "num_warps")
    return [dict(zip(names, (*choice, 4), strict=True)) for choice in ((few, 4), second)]


def as_pool(point: Point, cache: jax.Array) -> jax.Array:
    """A random pool's bytes in the order [num_kv_heads, num_pages, page_size, head_dim]."""
    return cache.reshape(point.num_kv_heads, -1, point.page_size, point.head_dim)


def attend(point: Point, variant: dict[str, int], interpret: bool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as deprecated

    def call(query, key_cache, value_cache, table, lengths):
        pools = as_pool(point, key_cache), as_pool(point, value_cache)
        return deprecated.paged_attention(query, *pools, table, lengths, interpret=interpret, **variant)

    return call


def build(point: Point, variant: dict[str, int], interpret: bool) -> Callable[..., tuple[jax.Array, ...]]:
    loop = functools.partial(points.looped, attend(point, variant, interpret), points.rounds_of(point))
    return jax.jit(loop).lower(points.input_shapes(point)).compile()


def scaled(inputs: Inputs) -> Inputs:
    """The kernel does not scale the logits."""
    query = inputs.query * inputs.query.shape[-1] ** -0.5
    return inputs._replace(query=query.astype(inputs.query.dtype))


def expected(point: Point, query, key_cache, value_cache, pages) -> jax.Array:
    """float32 [num_heads, head_dim] of one sequence, from its query and its row of the table."""
    keys, values = (
        as_pool(point, cache)[:, pages].reshape(point.num_kv_heads, -1, point.head_dim).astype(jnp.float32)
        for cache in (key_cache, value_cache)
    )
    grouped = query.astype(jnp.float32).reshape(point.num_kv_heads, -1, point.head_dim)
    logits = jnp.einsum("hgd,hkd->hgk", grouped, keys[:, : point.max_len], precision="highest")
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("hgk,hkd->hgd", weights, values[:, : point.max_len], precision="highest")
    return out.reshape(query.shape)


def reference_of(point: Point) -> Callable[..., jax.Array]:
    """`expected`, compiled."""
    query, *pools, tables, _ = points.input_shapes(point)
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (query, tables[0])]
    return jax.jit(functools.partial(expected, point)).lower(one[0], *pools, one[1]).compile()


def measure(
    cell: ours.Cell,
    reference: Callable[..., jax.Array],
    builds: Sequence[tuple[dict[str, int], Any]],
    warm: bool,
) -> dict[str, str]:
    point = cell.point
    inputs = scaled(points.inputs_of(point))
    checked = list(itertools.product((0, -1), (0, point.num_seqs - 1)))  # calls x sequences
    references = [reference(inputs.query[j], *inputs[1:3], inputs.tables[call][j]) for call, j in checked]
    found = []
    for variant, built in builds:
        run = functools.partial(built, inputs)
        outs = run()
        pairs = zip(checked, references, strict=True)
        error = max(points.worst_error(outs[call][j], wanted) for (call, j), wanted in pairs)
        del outs
        if not warm:
            warm_up(run)
            warm = True
        calls = points.rounds_of(point) * len(inputs.tables)
        found.append((device_seconds(run, repeats=3) / calls, error, variant))
    right = [timing for timing in found if timing[1] <= LARGEST_ERROR]
    seconds, error, variant = min(right or found, key=lambda timing: timing[0])
    note = " ".join(f"{name}={value}" for name, value in variant.items())
    return ours.result(cell, "jax-deprecated", seconds, error, note if right else "WRONG")


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ours.add_arguments(parser)
    parser.add_argument("--interpret", action="store_true", help="anywhere, slowly")
    arguments = parser.parse_args(command_line)
    start = time.time()

    cells = ours.shape_cells(arguments.shapes, arguments.ids)
    with ThreadPoolExecutor() as pool, arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, ours.COLUMNS)
        writer.writeheader()
        for first in range(0, len(cells), CELLS_A_BATCH):
            batch = cells[first : first + CELLS_A_BATCH]
            if time.time() - start > arguments.max_seconds:
                print("out of time before", batch[0].id)
                return
            # Compiling beside a measurement would disturb it.
            futures = [
                (
                    pool.submit(reference_of, cell.point),
                    [
                        (variant, pool.submit(build, cell.point, variant, arguments.interpret))
                        for variant in variants(cell.point)
                    ],
                )
                for cell in batch
            ]
            builds = [
                (reference.result(), [(variant, future.result()) for variant, future in row])
                for reference, row in futures
            ]
            for cell, (reference, row) in zip(batch, builds, strict=True):
                writer.writerow(measure(cell, reference, row, warm=cell is not cells[0]))
                file.flush()


if __name__ == "__main__":
    main()
