"""Times `paged_attention` with its default configs over a list of shapes, each result checked against the reference.

    python benchmarks/paged_attention.py --shapes shapes.json --out results.csv [--ids REGEX] [--max-seconds S]

`shapes.json` holds {"gqa_decode": [{"id", "b", "s", "hq", "hkv", "d", "page"}, ...]}; every sequence has s tokens.
Times are of calls inside one jitted loop ("loop"), caches larger than L2, shuffled tables. With --options it times
8-bit caches, a window and block sparsity instead, each beside the dense bf16 call to compare it with.
"""

import argparse
import csv
import functools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from pallas_attn import LocalStride
from pallas_attn._timing import device_seconds, warm_up
from pallas_attn.ops.paged_attention import tune
from pallas_attn.ops.paged_attention.tune import Point

COLUMNS = ["device", "jax", "peer", "op", "id", "us", "gbs", "method", "err", "note"]


def shape_cells(path: Path, ids: str) -> list[tuple[str, Point, dict]]:
    shapes = [s for s in json.loads(path.read_text())["gqa_decode"] if re.search(ids, s["id"])]
    dtype = "bfloat16"
    return [
        (s["id"], Point(s["b"], s["s"], s["hq"], s["hkv"], s["d"], s["page"], dtype, dtype), {})
        for s in shapes
    ]


def option_cells() -> list[tuple[str, Point, dict]]:
    def point(b: int, s: int, cache_dtype: str = "bfloat16") -> Point:
        return Point(b, s, 32, 8, 128, 16, "bfloat16", cache_dtype)

    sparse = {"block_sparse": LocalStride(64, 1, 8)}
    cells: list[tuple[str, Point, dict]] = []
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"):
        cells.append((f"{dtype} b64 s8192", point(64, 8192, dtype), {}))
    for b in (16, 1):
        cells.append((f"dense b{b} s32768", point(b, 32768), {}))
        cells.append((f"1/8 of blocks b{b} s32768", point(b, 32768), sparse))
    for b in (16, 1):
        cells.append((f"dense b{b} s1024", point(b, 1024), {}))
        cells.append((f"window 1024 b{b} s32768", point(b, 32768), {"sliding_window": 1024}))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ids", default="")
    parser.add_argument("--max-seconds", type=float, default=1e9)
    parser.add_argument("--implementation", default="pallas")
    arguments = parser.parse_args()
    cells = option_cells() if arguments.options else shape_cells(arguments.shapes, arguments.ids)
    start = time.time()

    def build(cell):
        _, point, options = cell
        shapes = tune.input_shapes(point)
        attend = tune.attend(shapes, implementation=arguments.implementation, **options)
        rounds = tune.rounds_of(point)
        run = jax.jit(functools.partial(tune.looped, attend, rounds)).lower(shapes).compile()
        return run, rounds

    with ThreadPoolExecutor() as pool, arguments.out.open("w", newline="") as file:
        # Compiling beside a measurement would disturb it.
        builds = [future.result() for future in [pool.submit(build, cell) for cell in cells]]
        print(f"compiled {len(cells)} in {time.time() - start:.0f} s", flush=True)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        warm = False
        for (name, point, options), (run, rounds) in zip(cells, builds, strict=True):
            if time.time() - start > arguments.max_seconds:
                print("out of time before", name)
                break
            inputs = tune.inputs_of(point)
            reference = tune.first_and_last(tune.attend(inputs, implementation="xla", **options), inputs)
            outs = run(inputs)
            error = max(tune.worst_error(*pair) for pair in zip((outs[0], outs[-1]), reference, strict=True))
            if not warm:
                warm_up(functools.partial(run, inputs))
                warm = True
            us = device_seconds(functools.partial(run, inputs)) / (rounds * len(inputs.tables)) * 1e6
            row = dict(
                device=jax.devices()[0].device_kind,
                jax=jax.__version__,
                peer="pallas-attn",
                op="gqa_decode",
                id=name,
                us=f"{us:.2f}",
                gbs=f"{point.kv_bytes / us / 1e3:.0f}",
                method="loop",
                err=f"{error:.1e}",
                note="" if error <= tune.LARGEST_ERROR[point.dtype] else "WRONG",
            )
            writer.writerow(row)
            file.flush()
            print(name, row["us"], "us", row["gbs"], "GB/s", row["err"], row["note"], flush=True)
            del inputs, outs, reference


if __name__ == "__main__":
    main()
