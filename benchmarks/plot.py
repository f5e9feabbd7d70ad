"""Draws a CSV of mla_bandwidth.py: bandwidth over sequence length, a line an implementation, a panel a head count.

    python benchmarks/plot.py all_perf.csv [--out all.png]

Without --out the picture lies beside the CSV, as <name of the CSV>_bandwidth_vs_seqlen.png; its suffix says the format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure  # without pyplot: files only, no window, no state

COLUMNS = ["name", "batch", "seqlen", "head", "bw"]
MARKERS = "osD^vP*X"


def read(path: Path) -> pd.DataFrame:
    """ValueError, with a reason in one line, for what is no such table."""
    try:
        table = pd.read_csv(path, dtype={"name": str}, keep_default_na=False)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a CSV file, got {str(error).splitlines()[0]!r}") from None
    if missing := [column for column in COLUMNS if column not in table]:
        found = ", ".join(map(str, table.columns))
        raise ValueError(
            f"{path}: expected the columns {', '.join(COLUMNS)}, got {found} ({missing[0]} is missing)"
        )
    if table.empty:
        raise ValueError(f"{path}: expected at least one row, got only the header")
    for column in COLUMNS[1:]:
        numbers = pd.Series(pd.to_numeric(table[column], errors="coerce"))
        least = 0 if column == "bw" else 1
        right = list((numbers >= least) & (numbers < float("inf")))
        if not all(right):
            row = right.index(False)
            got = f"{str(table[column].iloc[row])!r} in row {row + 1}"
            raise ValueError(f"{path}: {column}: expected numbers from {least} up, got {got}")
        table[column] = numbers
    return table


def figure(table: pd.DataFrame) -> Figure:
    """A panel for each batch size and head count, all with the same scale of bandwidth."""
    panels = [rows for _, rows in table.sort_values("seqlen", kind="stable").groupby(["batch", "head"])]
    drawn = Figure(figsize=(6 * len(panels) + 1, 4.5), layout="constrained")
    styles = {name: (f"C{i}", MARKERS[i % len(MARKERS)]) for i, name in enumerate(table["name"].unique())}
    all_axes = drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, rows in zip(all_axes, panels, strict=True):
        for name, (color, marker) in styles.items():
            line = rows[rows["name"] == name]
            if len(line):
                axes.plot(line["seqlen"], line["bw"], color=color, marker=marker, label=name)
        lengths = sorted(rows["seqlen"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=[f"{length:g}" for length in lengths])
        axes.minorticks_off()
        batch, heads = rows["batch"].iloc[0], rows["head"].iloc[0]
        axes.set_title(f"MLA decode, batch {batch}, {heads} heads")
        axes.set_xlabel("mean sequence length")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("bandwidth (GB/s)")
    all_axes[0].set_ylim(0, 1.1 * max(1, table["bw"].max()))
    lines = {line.get_label(): line for axes in all_axes for line in axes.get_lines()}
    drawn.legend(lines.values(), lines.keys(), loc="outside right upper")
    return drawn


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--out", type=Path, help="picture to write")
    arguments = parser.parse_args(command_line)
    path = arguments.file
    out = arguments.out or path.with_name(f"{path.stem}_bandwidth_vs_seqlen.png")
    try:
        figure(read(path)).savefig(out, dpi=150)
    except (ValueError, OSError) as error:  # what read() says, or savefig of a suffix or folder
        parser.exit(2, f"{parser.prog}: {str(error).splitlines()[0]}\n")
    print(f"drawn in {out}")


if __name__ == "__main__":
    main()
