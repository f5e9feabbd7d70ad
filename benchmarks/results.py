"""The table that a run fills: one row for each cell and implementation, in a CSV file that is whole at any moment."""

import csv
import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BANDWIDTH_COLUMNS = ["name", "batch", "seqlen", "head", "bw"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation at one cell. Without a figure (`median_us` None) the note says why there is none."""

    device: str
    driver: str
    jax: str
    torch: str
    commit: str
    options: str
    """What else decides the figure: "quick", "tiny", or nothing."""
    op: str
    case: str
    implementation: str
    """As a reader knows it: "ours, CUDA", "FlashMLA"."""
    method: str
    """"loop" inside one jitted function, or replayed CUDA "graph"."""
    dtype: str
    """Of the cache."""
    batch: int
    seqlen: int
    """The sequences' mean length."""
    heads: int
    kv_heads: int
    q_len: int
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    roof_percent: float | None = None
    """The least time that the measured roofs allow, of the time taken."""
    peak_mib: float | None = None
    """Device memory of a call besides its inputs: outputs, scratch and temporaries."""
    error: float | None = None
    """The worst row's ||out - reference|| / ||reference||."""
    limit: float | None = None
    ok: bool = False
    note: str = ""
    repro: str = ""
    """The command line that measures this row again."""

    @property
    def key(self) -> tuple[str, ...]:
        """What a later run need not measure again."""
        return (*self.place, self.op, self.case, self.implementation)

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What figures to be compared within a table have in common."""
        return (self.device, self.jax, self.commit, self.options)


COLUMNS = [field.name for field in dataclasses.fields(Row)]
_FORMATS = {
    "median_us": "{:.2f}",
    "p20_us": "{:.2f}",
    "p80_us": "{:.2f}",
    "tflops": "{:.5g}",
    "gbs": "{:.5g}",
    "roof_percent": "{:.3g}",
    "peak_mib": "{:.1f}",
    "error": "{:.1e}",
    "limit": "{:.0e}",
}


def timed(samples: Sequence[float], flops: int, num_bytes: int, roof_seconds: float | None) -> dict[str, Any]:
    """The figures of a row, from seconds a call."""
    median = statistics.median(samples)
    low, high = (percentile(samples, p) for p in (20, 80))
    return dict(
        median_us=median * 1e6,
        p20_us=low * 1e6,
        p80_us=high * 1e6,
        tflops=flops / median / 1e12,
        gbs=num_bytes / median / 1e9,
        roof_percent=None if roof_seconds is None else 100 * roof_seconds / median,
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Between the two nearest samples, in proportion."""
    ordered = sorted(samples)
    place = percent / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def read(path: Path) -> list[Row]:
    """ValueError, in one line, for what is no such table; FileNotFoundError where there is no file."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            found = reader.fieldnames or []
            if missing := [column for column in COLUMNS if column not in found]:
                raise ValueError(
                    f"{path}: expected a table of run.py, with the columns {', '.join(COLUMNS)}; "
                    f"{missing[0]!r} is missing"
                )
            return [_parsed(path, number, row) for number, row in enumerate(reader, start=2)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected a CSV file, got {error}") from None


def write(path: Path, rows: Iterable[Row]) -> None:
    """All of it or nothing: a reader, or the next run, never sees half a row."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _text(name, getattr(row, name)) for name in COLUMNS} for row in rows)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def with_row(rows: Sequence[Row], new: Row) -> list[Row]:
    """The rows, `new` in place of what was measured before with its key."""
    kept = [row for row in rows if row.key != new.key]
    return [*kept, new]


def write_bandwidths(path: Path, rows: Iterable[Row], names: dict[str, str]) -> None:
    """The figures as `name,batch,seqlen,head,bw` (GB/s), where names are those of the command line."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(BANDWIDTH_COLUMNS)
        for row in rows:
            if row.ok and row.gbs is not None and row.op != "roof":
                name = names.get(row.implementation, row.implementation)
                writer.writerow([name, row.batch, row.seqlen, row.heads, f"{row.gbs:.0f}"])


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _FORMATS.get(name, "{}").format(value)


def _parsed(path: Path, line: int, texts: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Row):
        text = texts[field.name]
        try:
            if field.name == "ok":
                values["ok"] = {"yes": True, "no": False}[text]
            elif field.type is int:
                values[field.name] = int(text)
            elif field.type is str:
                values[field.name] = text or ""
            else:
                values[field.name] = float(text) if text else None
        except (KeyError, ValueError, TypeError):
            expected = "yes or no" if field.name == "ok" else "a number"
            raise ValueError(
                f"{path}: line {line}: {field.name}: expected {expected}, got {text!r}"
            ) from None
    return Row(**values)
