"""Is anything slower than before? Two tables of run.py, cell by cell.

    python benchmarks/compare.py old.csv new.csv       # 1 if a cell is slower by more than 5% beyond its spread
    python benchmarks/compare.py old.csv new.csv --threshold 2%
    python benchmarks/compare.py old.csv new.csv --all # the cells in between too

A cell counts as slower when the fast end of its new samples (the 20th percentile) lies more than the threshold above
the slow end of its old ones (the 80th). Cells that have a figure in one table only are listed; one whose figure was
lost (it was right, now it is wrong or missing from a table that has other cells of that implementation) fails too.

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

Key = tuple[str, str, str]


class Change(NamedTuple):
    key: Key
    """(op, case, implementation)"""
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


def figures(rows: Sequence[Row]) -> dict[Key, Row]:
    """The newest right figure of each cell."""
    return {
        (row.op, row.case, row.implementation): row
        for row in rows
        if row.ok and row.median_us is not None and row.op != "roof"
    }


def changes(old: dict[Key, Row], new: dict[Key, Row]) -> list[Change]:
    return [Change(key, old[key], new[key]) for key in old if key in new]


def lost(old: dict[Key, Row], new_rows: Sequence[Row]) -> dict[Key, str]:
    """{cell that has no figure any more: why}, among the cells that the new table speaks of."""
    spoken_of = {(row.op, row.case, row.implementation): row for row in new_rows}
    return {
        key: spoken_of[key].note or "no figure"
        for key in old
        if key in spoken_of and not (spoken_of[key].ok and spoken_of[key].median_us is not None)
    }


def line(change: Change, mark: str) -> str:
    op, case, implementation = change.key
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
        print("compare.py: error: the two tables have no cell in common", file=sys.stderr)
        return 2
    slower = [change for change in both if change.slower(threshold)]
    faster = [change for change in both if change.faster(threshold)]
    for change in sorted(both, key=lambda change: -change.ratio):
        mark = "SLOWER" if change in slower else "faster" if change in faster else ""
        if mark or everything:
            print(line(change, mark))
    for (op, case, implementation), note in gone.items():
        print(f"{'LOST':7} {op:16} {case:34} {implementation:28} {note}")
    for name, ours, theirs in (("old", old, new), ("new", new, old)):
        if only := [key for key in ours if key not in theirs and key not in gone]:
            cases = ", ".join(" ".join(key[1:]) for key in only[:3])
            print(f"{len(only)} cells in the {name} table only: {cases}{' ...' if len(only) > 3 else ''}")
    if both:
        mean = math.exp(sum(math.log(change.ratio) for change in both) / len(both))
        print(
            f"{len(both)} cells compared: {len(slower)} slower and {len(faster)} faster by more than "
            f"{threshold:.1%} beyond their spread; time new / old {mean:.3f} in geometric mean"
        )
    if slower:
        names = "|".join(sorted({change.key[1] for change in slower}))
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
