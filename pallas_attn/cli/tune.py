"""`pallas-attn tune`: measure configs on this GPU and write the file that calls then read."""

import dataclasses
import math
import os
import sys
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
from pallas_attn.cli.options import flag, taken
from pallas_attn.tuning import entries
from pallas_attn.tuning.points import Fields, Point, Timing, measure
from pallas_attn.tuning.registry import OPS

# A point whose calls read more bytes than this is skipped; the next smaller one represents it.
MOST_READ_BYTES = 5 << 30
SIZES = ("num_heads", "num_kv_heads", "head_dim", "page_size", "dtype", "cache_dtype")
# Lengths are int32.
LONGEST = 2**31 - 1

type Best = dict[Point, tuple[Timing, Timing, entries.Entry | None]]
"""For each point: timings of the fastest config and the heuristic's, and the entry that had the fastest one."""


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """The command's options, by their names on the command line; None in `sizes` is the op's default."""

    op: str
    sizes: dict[str, Any]
    num_seqs: Sequence[int]
    max_len: Sequence[int]
    output: Path | None
    implementation: str


def run_tune(options: TuneOptions) -> int:
    """Runs the command: a table to stdout, progress to stderr.

    Raises:
        ValueError, OSError: no GPU, or what the user has to change, in one line.
        RuntimeError: no config of any point could be timed; nothing is written.
    """
    device = current_device()
    if options.implementation != "interpret" and device.platform != "gpu":
        fail("tune", "device", "an NVIDIA GPU to measure on", repr(device.kind))
    points = _points(options)
    root = options.output or Path(os.environ.get(configs.CONFIGS_VARIABLE) or configs.packaged_configs())
    path, packaged = (
        folder / device.slug / f"{options.op}.json" for folder in (root, configs.packaged_configs())
    )
    # Unreadable or unwritable files are found before the work, not after it.
    configs.check_writable(path)
    old = configs.load(path)
    others = [] if path == packaged else configs.load(packaged)

    best = _measured(points, options.implementation, [*old, *others])
    merged = entries.merged(old, [entries.entry(point, *found) for point, found in best.items()], others)
    # In a file or a pipe lines may be of any width. The table comes first, so that measurements are not lost.
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    out.print(_table(best))
    configs.save(path, merged, device=device.kind, jax=jax.__version__)
    out.print(f"wrote {path}", soft_wrap=True)
    if root != configs.packaged_configs():
        out.print(f"calls read it while {configs.CONFIGS_VARIABLE}={root.resolve()} is set", soft_wrap=True)
    return 0


def _points(options: TuneOptions) -> list[Point]:
    kind = OPS[options.op]
    sizes = taken("tune", kind.sizes, options.sizes, f"--op {options.op}")
    for name, value in dict(sizes, num_seqs=min(options.num_seqs), max_len=min(options.max_len)).items():
        if isinstance(value, int) and value < 1:
            fail("tune", flag(name), "at least 1", str(value))
    if (longest := max(options.max_len)) > LONGEST:
        fail("tune", "--max-len", f"at most {LONGEST}", str(longest))
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        expected = f"a multiple of --num-kv-heads ({sizes['num_kv_heads']})"
        fail("tune", "--num-heads", expected, str(sizes["num_heads"]))
    points = [
        point
        for num_seqs in sorted(set(options.num_seqs))
        for max_len in sorted(set(options.max_len))
        for point in kind.variants(num_seqs, max_len, **sizes)
    ]
    least = min(point.read_bytes for point in points)
    return [point for point in points if point.read_bytes <= max(least, MOST_READ_BYTES)]


def _choices(point: Point, before: entries.Entry | None) -> list[Fields]:
    """The candidates, and last the call's current config, so that no entry is replaced by a slower one."""
    choices = point.candidates()
    if before is None:
        return choices
    try:
        configs.check_names(type(point.config()), before["config"])
        fields = point.fields_of(before["config"])
        config = point.config(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tune: not an entry of measured configs: {before}: {error!r}") from error
    # Compared as whole configs: an entry may have fields that no candidate has.
    return [*(choice for choice in choices if choice == {} or point.config(**choice) != config), fields]


def _measured(points: Sequence[Point], implementation: str, known: Sequence[entries.Entry]) -> Best:
    """Results for the points for which a config could be timed; RuntimeError with the reason if there are none.
    `known`: the current entries."""
    err = Console(stderr=True)
    work = [
        (point, before, _choices(point, before))
        for point, before in ((point, entries.serving(point, known)) for point in points)
    ]
    best: Best = {}
    problem = "nothing was tried"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=sum(len(choices) for *_, choices in work))
        for point, before, choices in work:
            about = f"{point.case.num_seqs} x {point.max_len}, {point.kind}"
            bar.update(task, description=about)
            timings = []
            for timing in measure(point, choices, implementation):
                timings.append(timing)
                if timing.problem:
                    problem = timing.problem
                    err.print(f"left out: {about} {timing.fields}: {problem}", markup=False)
                bar.advance(task)
            fastest = min(timings, key=lambda timing: timing.microseconds)
            if math.isfinite(fastest.microseconds):
                kept = before is not None and point.config(**fastest.fields) == point.config(**choices[-1])
                best[point] = fastest, timings[0], before if kept else None
            else:
                err.print(f"nothing to keep: {about}: every config was left out", markup=False)
    if not best:
        raise RuntimeError(
            f"tune: no config of {points[0].case.op} could be timed, nothing is written: {problem}"
        )
    return best


def _table(best: Best) -> Table:
    columns = ("sequences", "tokens", "kind", "us", "GB/s", "heuristic's us", "block_q", "block_kv", "warps")
    table = Table(*columns, "stages")
    for point, (fastest, first, _) in best.items():
        tiles = point.tiles(fastest.fields)
        speed = point.read_bytes / fastest.microseconds / 1e3
        figures = (f"{fastest.microseconds:.1f}", f"{speed:.0f}", f"{first.microseconds:.1f}")
        sizes = (tiles.block_q, tiles.block_kv, tiles.num_warps, tiles.num_stages)
        table.add_row(*map(str, (point.case.num_seqs, point.max_len, point.kind, *figures, *sizes)))
    return table
