"""Is anything slower than before? Two tables of run.py, cell by cell.

    python benchmarks/compare.py old.csv new.csv       # 1 if a cell is slower by more than 5% beyond its spread
    python benchmarks/compare.py old.csv new.csv --threshold 2%
    python benchmarks/compare.py old.csv new.csv --all # the cells in between too

A cell counts as slower when the fast end of its new samples (the 20th percentile) lies more than the threshold above
the slow end of its old ones (the 80th). A cell is of a device, and of a run's options: others are not compared. Cells
that one table alone has are listed; one whose figure was lost (it was right, now the row says why not) fails too.

Exit status: 0; 1 when a cell is slower or lost its figure; 2 when there is nothing to compare.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import results
from results import Row


class Key(NamedTuple):
    """Of a cell."""

    device: str
    options: str
    op: str
    case: str
    implementation: str


class Change(NamedTuple):
    key: Key
    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """New time over old."""
        return _number(self.new.median_us) / _number(self.old.median_us)

    def slower(self, threshold: float) -> bool:
        return _number(self.new.p20_us) > _number(self.old.p80_us) * (1 + threshold)

    def faster(self, threshold: float) -> bool:
        return _number(self.new.p80_us) < _number(self.old.p20_us) / (1 + threshold)


def _number(value: float | None) -> float:
    if value is None:
        raise ValueError("expected a row with a figure, got one without")
    return value


def key(row: Row) -> Key:
    return Key(*(getattr(row, name) for name in Key._fields))


def figures(rows: Sequence[Row]) -> dict[Key, Row]:
    """The newest right figure of each cell."""
    return {key(row): row for row in rows if row.ok and row.median_us is not None and row.op != "roof"}


def changes(old: dict[Key, Row], new: dict[Key, Row]) -> list[Change]:
    return [Change(cell, old[cell], new[cell]) for cell in old if cell in new]


def lost(old: dict[Key, Row], new_rows: Sequence[Row]) -> dict[Key, str]:
    """{cell that has no figure any more: why}, among the cells that the new table speaks of."""
    spoken_of = {key(row): row for row in new_rows}
    return {
        cell: spoken_of[cell].note or "no figure"
        for cell in old
        if cell in spoken_of and not (spoken_of[cell].ok and spoken_of[cell].median_us is not None)
    }


def line(change: Change, mark: str) -> str:
    _, _, op, case, implementation = change.key
    spans = [
        f"{_number(row.median_us):9.2f} us ({_number(row.p20_us):.2f} to {_number(row.p80_us):.2f})"
        for row in (change.old, change.new)
    ]
    return f"{mark:7} {op:16} {case:34} {implementation:28} {spans[0]} -> {spans[1]}  {change.ratio:.3f}"


def report(old_rows: Sequence[Row], new_rows: Sequence[Row], threshold: float, everything: bool) -> int:
    """Prints; the exit status."""
    old, new = figures(old_rows), figures(new_rows)
    both, gone = changes(old, new), lost(old, new_rows)
    if not both and not gone:
        devices = " and ".join(", ".join(sorted({cell.device for cell in table})) for table in (old, new))
        print(f"compare.py: error: the two tables have no cell in common ({devices})", file=sys.stderr)
        return 2
    slower = [change for change in both if change.slower(threshold)]
    faster = [change for change in both if change.faster(threshold)]
    for change in sorted(both, key=lambda change: -change.ratio):
        mark = "SLOWER" if change in slower else "faster" if change in faster else ""
        if mark or everything:
            print(line(change, mark))
    for (_, _, op, case, implementation), note in gone.items():
        print(f"{'LOST':7} {op:16} {case:34} {implementation:28} {note}")
    for name, ours, theirs in (("old", old, new), ("new", new, old)):
        if only := [cell for cell in ours if cell not in theirs and cell not in gone]:
            cases = ", ".join(f"{cell.case} {cell.implementation}" for cell in only[:3])
            print(f"{len(only)} cells in the {name} table only: {cases}{' ...' if len(only) > 3 else ''}")
    if both:
        mean = math.exp(sum(math.log(change.ratio) for change in both) / len(both))
        print(
            f"{len(both)} cells compared: {len(slower)} slower and {len(faster)} faster by more than "
            f"{threshold:.1%} beyond their spread; time new / old {mean:.3f} in geometric mean"
        )
    if slower:
        names = "|".join(sorted({change.key.case for change in slower}))
        print(f"to measure the slower ones again: --cells '^({names})$'")
    return 1 if slower or gone else 0


def threshold_of(text: str) -> float:
    """ "5%" or "0.05", for argparse."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, got {text!r}")
    return value


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="old.csv")
    parser.add_argument("new", type=Path, metavar="new.csv")
    parser.add_argument("--threshold", type=threshold_of, default=0.05, metavar="5%%", help="default: 5%%")
    parser.add_argument("--all", action="store_true", help="list the cells in between too")
    arguments = parser.parse_args(command_line)
    try:
        old, new = (results.read(path) for path in (arguments.old, arguments.new))
    except (ValueError, OSError) as error:
        parser.exit(2, f"compare.py: error: {error}\n")
    return report(old, new, arguments.threshold, arguments.all)


if __name__ == "__main__":
    sys.exit(main())
