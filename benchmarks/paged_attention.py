"""Times `paged_attention` with its default configs over a list of shapes, each result checked against the reference.

    python benchmarks/paged_attention.py --out results.csv [--shapes shapes.json] [--ids REGEX ...] [--max-seconds S]

Without --shapes, those of shapes.py. `shapes.json` holds {"gqa_decode": [{"id", "b", "s", "hq", "hkv", "d", "page"},
...]}; every sequence has s tokens. What matches the first expression of --ids is done first. Times are of calls inside
one jitted loop ("loop"), caches larger than L2, shuffled tables. With --options it times 8-bit caches, a window and
block sparsity instead, each beside the dense bf16 call to compare it with.
"""

import argparse
import csv
import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from pallas_attn._timing import device_seconds, warm_up
from shapes import gqa_decode

from pallas_attn import LocalStride
from pallas_attn.tuning import points
from pallas_attn.tuning.points import Point

COLUMNS = ["device", "jax", "peer", "op", "id", "us", "gbs", "method", "err", "note"]


class Cell(NamedTuple):
    id: str
    point: Point
    options: dict[str, Any]


class Built(NamedTuple):
    run: Callable[[points.Inputs], tuple[jax.Array, ...]]
    reference: Callable[..., jax.Array]
    calls: int
    """That one run makes."""


def shape_cells(path: Path | None, ids: Sequence[str]) -> list[Cell]:
    shapes = json.loads(path.read_text())["gqa_decode"] if path else gqa_decode()
    found = {}
    for s in [s for pattern in ids for s in shapes if re.search(pattern, s["id"])]:
        point = Point(s["b"], s["s"], s["hq"], s["hkv"], s["d"], s["page"], "bfloat16", "bfloat16")
        found[s["id"]] = Cell(s["id"], point, {})
    return list(found.values())


def option_cells() -> list[Cell]:
    def point(b: int, s: int, cache_dtype: str = "bfloat16", **options: int) -> Point:
        return Point(b, s, 32, 8, 128, 16, "bfloat16", cache_dtype, **options)

    pattern, window = LocalStride(64, 1, 8), 1024
    cells = []
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"):
        cells.append(Cell(f"{dtype} b64 s8192", point(64, 8192, dtype), {}))
    for b in (16, 1):
        sparse = point(b, 32768, tokens_read=32768 // pattern.vert_stride + pattern.block_size)
        cells.append(Cell(f"dense b{b} s32768", point(b, 32768), {}))
        cells.append(Cell(f"1/8 of blocks b{b} s32768", sparse, {"block_sparse": pattern}))
    for b in (16, 1):
        windowed = point(b, 32768, tokens_read=window)
        cells.append(Cell(f"dense b{b} s1024", point(b, 1024), {}))
        cells.append(Cell(f"window 1024 b{b} s32768", windowed, {"sliding_window": window}))
    return cells


def build(cell: Cell, implementation: str) -> Built:
    shapes = points.input_shapes(cell.point)
    attend = points.attend(shapes, implementation=implementation, **cell.options)
    rounds = points.rounds_of(cell.point)
    run = jax.jit(functools.partial(points.looped, attend, rounds)).lower(shapes).compile()
    return Built(run, points.reference_of(shapes, **cell.options), rounds * len(shapes.tables))


def measure(cell: Cell, built: Built, warm: bool) -> dict[str, str]:
    inputs = points.inputs_of(cell.point)
    outs = built.run(inputs)
    reference = points.first_and_last(built.reference, inputs)
    error = max(points.worst_error(*pair) for pair in zip((outs[0], outs[-1]), reference, strict=True))
    del outs, reference
    run = functools.partial(built.run, inputs)
    if not warm:
        warm_up(run)
    seconds = device_seconds(run) / built.calls
    note = "" if error <= points.LARGEST_ERROR[cell.point.dtype] else "WRONG"
    return result(cell, "pallas-attn", seconds, error, note)


def result(cell: Cell, peer: str, seconds: float, error: float, note: str) -> dict[str, str]:
    """A row of the table; printed too."""
    us = seconds * 1e6
    row = dict(
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        peer=peer,
        op="gqa_decode",
        id=cell.id,
        us=f"{us:.2f}",
        gbs=f"{cell.point.kv_bytes / us / 1e3:.0f}",
        method="loop",
        err=f"{error:.1e}",
        note=note,
    )
    print(cell.id, row["us"], "us", row["gbs"], "GB/s", row["err"], note, flush=True)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=Path, help="JSON file; default: the README's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ids", nargs="+", default=[""], help="regular expressions")
    parser.add_argument("--max-seconds", type=float, default=1e9)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--implementation", default="pallas")
    arguments = parser.parse_args(command_line)
    cells = option_cells() if arguments.options else shape_cells(arguments.shapes, arguments.ids)
    start = time.time()
    with ThreadPoolExecutor() as pool, arguments.out.open("w", newline="") as file:
        # Compiling beside a measurement would disturb it.
        builds = list(pool.map(lambda cell: build(cell, arguments.implementation), cells))
        print(f"compiled {len(cells)} in {time.time() - start:.0f} s", flush=True)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for cell, built in zip(cells, builds, strict=True):
            if time.time() - start > arguments.max_seconds:
                print("out of time before", cell.id)
                break
            writer.writerow(measure(cell, built, warm=cell is not cells[0]))
            file.flush()


if __name__ == "__main__":
    main()
