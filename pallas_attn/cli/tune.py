"""`pallas-attn tune`: measure configs on the present GPU and write the file that calls then read."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pallas_attn._call import configs
from pallas_attn._call.checks import fail
from pallas_attn._call.device import current_device
from pallas_attn.tuning.points import Point, Timing, candidates, measure

# A point with more keys and values than this is left out: the next smaller one stands for it.
MOST_KV_BYTES = 5 << 30


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """The command's options, by their names on the command line."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    cache_dtype: str | None
    num_seqs: Sequence[int]
    max_len: Sequence[int]
    output: Path | None
    implementation: str


def run_tune(options: TuneOptions) -> int:
    """Runs the command: a table to stdout, progress to stderr.

    Raises:
        ValueError, OSError: no GPU, or what the user has to change, in one line.
    """
    device = current_device()
    if options.implementation == "pallas" and device.platform != "gpu":
        fail("tune", "device", "an NVIDIA GPU to measure on", repr(device.kind))
    for name in ("num_heads", "num_kv_heads", "head_dim", "page_size", "num_seqs", "max_len"):
        for number in value if isinstance(value := getattr(options, name), Sequence) else [value]:
            if number < 1:
                fail("tune", "--" + name.replace("_", "-"), "at least 1", str(number))
    if options.num_heads % options.num_kv_heads:
        fail(
            "tune",
            "--num-heads",
            f"a multiple of --num-kv-heads ({options.num_kv_heads})",
            str(options.num_heads),
        )
    root = options.output or Path(os.environ.get(configs.CONFIGS_VARIABLE) or configs.packaged_configs())
    path = root / device.slug / "paged_attention.json"
    # What cannot be read or written shows before the work, not after.
    path.parent.mkdir(parents=True, exist_ok=True)
    old = configs.load(path) if path.is_file() else []

    err, out = Console(stderr=True), Console(highlight=False, markup=False)
    work = [(point, candidates(point)) for point in _points(options)]
    best: dict[Point, tuple[Timing, Timing]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=sum(len(choices) for _, choices in work))
        for point, choices in work:
            bar.update(task, description=f"{point.num_seqs} x {point.max_len} {point.cache_dtype}")
            timings = []
            for timing in measure(point, choices, options.implementation):
                timings.append(timing)
                if timing.problem:
                    err.print(
                        f"left out: {point.num_seqs} x {point.max_len} {timing.fields}: {timing.problem}",
                        markup=False,
                    )
                bar.advance(task)
            fastest = min(timings, key=lambda timing: timing.microseconds)
            if math.isfinite(fastest.microseconds):
                best[point] = fastest, timings[0]

    new = [_entry(point, fastest, first) for point, (fastest, first) in best.items()]
    configs.save(path, _merged(old, new), device=device.kind, jax=jax.__version__)
    out.print(_table(best))
    out.print(f"wrote {path}")
    if root != configs.packaged_configs():
        out.print(f"calls read it while {configs.CONFIGS_VARIABLE}={root} is set")
    return 0


def _points(options: TuneOptions) -> list[Point]:
    points = [
        Point(
            num_seqs,
            max_len,
            options.num_heads,
            options.num_kv_heads,
            options.head_dim,
            options.page_size,
            options.dtype,
            options.cache_dtype or options.dtype,
        )
        for num_seqs in sorted(set(options.num_seqs))
        for max_len in sorted(set(options.max_len))
    ]
    return [point for point in points if point.kv_bytes <= MOST_KV_BYTES] or points[:1]


def _entry(point: Point, fastest: Timing, first: Timing) -> dict[str, Any]:
    """What is kept of a point; `_merged` adds the ranges of calls that it is for."""
    chosen = dataclasses.asdict(point.config(**fastest.fields))
    del chosen["num_splits"]  # follows from the call
    return {
        "key": {
            "head_dim": point.head_dim,
            "page_size": point.page_size,
            "dtype": point.cache_dtype,
            "rows": [1, chosen["block_q"]],
        },
        "config": chosen,
        "measured": {
            "num_seqs": point.num_seqs,
            "num_kv_heads": point.num_kv_heads,
            "max_len": point.max_len,
            "us": round(fastest.microseconds, 2),
            "heuristic_us": round(first.microseconds, 2) if math.isfinite(first.microseconds) else None,
            "error": float(f"{fastest.error:.1e}"),
        },
    }


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All new entries, and the old ones that were not measured anew.

    The entries of a kind share its calls among them: each is for those nearest to what was measured, first in streams,
    then in length; ranges meet at geometric means. Entries of kinds without new ones stay as they are.
    """
    kinds = {_kind(entry) for entry in new}
    tuned = {}
    for entry in old + new:
        if _kind(entry) in kinds and "measured" in entry:
            about = entry["measured"]
            tuned[_kind(entry), about["num_seqs"] * about["num_kv_heads"], about["max_len"]] = entry
    merged = []
    for (kind, streams, max_len), entry in sorted(tuned.items(), key=lambda item: item[0]):
        ranges = {
            "streams": _range(streams, [s for k, s, m in tuned if k == kind]),
            "max_len": _range(max_len, [m for k, s, m in tuned if (k, s) == (kind, streams)]),
        }
        merged.append({**entry, "key": {**entry["key"], **ranges}})
    return merged + [entry for entry in old if _kind(entry) not in kinds]


def _kind(entry: dict[str, Any]) -> str:
    return json.dumps([entry["key"].get(name) for name in ("head_dim", "page_size", "dtype", "rows")])


def _range(value: int, measured: list[int]) -> list[int | None]:
    """[least, most] of what is nearer to `value` than to its neighbours among `measured`."""
    below = [v for v in measured if v < value]
    above = [v for v in measured if v > value]
    least = math.isqrt(max(below) * value) + 1 if below else 1
    return [least, math.isqrt(value * min(above)) if above else None]


def _table(best: dict[Point, tuple[Timing, Timing]]) -> Table:
    table = Table(
        "sequences", "tokens", "cache", "us", "GB/s", "heuristic's us", "block_kv", "warps", "stages"
    )
    for point, (fastest, first) in best.items():
        config = point.config(**fastest.fields)
        speed = point.kv_bytes / fastest.microseconds / 1e3
        cells = (
            point.num_seqs,
            point.max_len,
            point.cache_dtype,
            f"{fastest.microseconds:.1f}",
            f"{speed:.0f}",
        )
        tiles = (f"{first.microseconds:.1f}", config.block_kv, config.num_warps, config.num_stages)
        table.add_row(*map(str, cells + tiles))
    return table
