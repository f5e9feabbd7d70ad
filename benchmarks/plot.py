"""Pictures of a table of run.py, one pair for each op in it; drawn from the table alone.

    python benchmarks/plot.py results.csv                    # results-mla_decode-bandwidth.png, ...-ratio.png
    python benchmarks/plot.py results.csv --cells '^b128-' --out pictures --format svg
    python benchmarks/plot.py paged.csv ragged.csv flash.csv mla.csv    # all in one: paged-roof.png
    python benchmarks/plot.py results.csv --page --cells 'q32kv8'       # *-roof as results.svg, for a page

*-bandwidth: GB/s over the sequences' length, a line an implementation, a panel a batch and head count, under the roof
that the same run measured. *-ratio: the best peer's time over ours for each cell; where we lose, the cell is
framed. *-roof: percent of the roof for each cell, a mark an implementation.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import results
import roofline
from looks import OURS, in_order, is_ours, looks, op_title, shown
from matplotlib import rc_context
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure  # without pyplot: files only, no window, no state
from matplotlib.patches import Rectangle
from results import Row
from roof_chart import Table, roof_chart

# The part of a case's id that says how long its sequences are, where they are about as long.
LENGTH = re.compile(r"-(s|from)\d+(?=-|$)")
_INITIALS = {
    "FlashMLA": "FM",
    "FA3 (vLLM)": "FA3",
    "FlashInfer": "FI",
    "vLLM's Triton": "vT",
    "jax's deprecated kernel": "jax",
    "jax.nn, pages gathered": "nn",
    "torch SDPA, pages gathered": "SDPA",
}
ROOF = "roof: memory or tensor cores, measured (roofline.py)"
WIDEST_RATIO = 1.5  # beyond it, colours differ no more
STRONG_RATIO = 1.23  # beyond it they are dark
LOSING = 0.995  # what is printed as 1.00 is level


class Panel(NamedTuple):
    """Cells that differ by length alone."""

    line: tuple[int, int, str]
    """Of the picture: batch, new tokens, and the rest of the id."""
    column: tuple[int, int]
    """Heads: keys and values, queries."""

    @property
    def title(self) -> str:
        (batch, q_len, _), (kv_heads, heads) = self
        tokens = f" x {q_len} tokens" if q_len > 1 else ""
        over = f" over {kv_heads}" if kv_heads > 1 else ""
        return f"{batch} sequence{'s' * (batch > 1)}{tokens}, {heads} heads{over}"


def panel_of(row: Row) -> Panel:
    rest = LENGTH.sub("", row.case).replace(f"-q{row.heads}kv{row.kv_heads}", "")
    return Panel((row.batch, row.q_len, rest), (row.kv_heads, row.heads))


def bandwidth(rows: Sequence[Row]) -> Figure | None:
    """None where no cells differ by length."""
    panels: dict[Panel, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seqlen):
        if LENGTH.search(row.case):
            panels.setdefault(panel_of(row), []).append(row)
    panels = {panel: own for panel, own in panels.items() if len({row.seqlen for row in own}) > 1}
    if not panels:
        return None
    lines, columns = (sorted(set(places)) for places in zip(*panels, strict=True))
    size = max(3.6 * len(columns), 6.6) + 0.4, 2.9 * len(lines) + 1.6
    drawn = Figure(figsize=size, layout="constrained")
    all_axes = drawn.subplots(len(lines), len(columns), sharey=True, squeeze=False)
    for axes in all_axes.flat:
        axes.set_axis_off()
    styles = looks(names := in_order({row.implementation for own in panels.values() for row in own}))
    for panel, own in panels.items():
        axes = all_axes[lines.index(panel.line), columns.index(panel.column)]
        axes.set_axis_on()
        _draw_panel(axes, panel, own, names, styles)
    handles = {line.get_label(): line for axes in all_axes.flat for line in axes.get_lines()}
    roof = [label for label in handles if label == ROOF]
    labels = [*(shown(name) for name in names if shown(name) in handles), *roof]
    drawn.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 1 + len(columns)),
        fontsize=9,
    )
    drawn.suptitle(f"{op_title(rows)}\nbandwidth over sequence length")
    return drawn


def _draw_panel(axes, panel: Panel, own: Sequence[Row], names: Sequence[str], styles) -> None:
    roofs = {row.seqlen: row.gbs * 100 / row.roof_percent for row in own if row.gbs and row.roof_percent}
    if roofs:
        lengths = sorted(roofs)
        axes.plot(lengths, [roofs[n] for n in lengths], color="black", ls="--", lw=1, label=ROOF)
    for name in names:
        line = [(row.seqlen, row.gbs) for row in own if row.implementation == name]
        if line:
            color, marker = styles[name]
            # Ours above the others.
            places = tuple(zip(*line, strict=True))
            axes.plot(
                *places,
                color=color,
                marker=marker,
                ms=5,
                lw=1.5,
                label=shown(name),
                zorder=3 - names.index(name) / 99,
            )
    lengths = sorted({row.seqlen for row in own})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels=[_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=9.5)
    axes.set_xlabel("tokens a sequence")
    axes.set_ylabel("GB/s")
    axes.tick_params(labelleft=True)
    axes.grid(alpha=0.3)


def ratio(rows: Sequence[Row], ours: str | None = None) -> Figure | None:
    """None where no cell has both ours and a peer. `ours`: the implementation that stands for us; None takes what a
    call takes by itself, or else the fastest of ours in each cell."""
    cells = ratios(rows, ours)
    if not cells:
        return None
    # Lines: batch and length; columns: heads and new tokens.
    lines = list(dict.fromkeys(_line_of(row) for row in sorted((c.ours for c in cells), key=_line_order)))
    columns = sorted({_column_of(cell.ours) for cell in cells})
    drawn = Figure(figsize=(1.15 * len(columns) + 2.2, 0.42 * len(lines) + 1.9), layout="constrained")
    axes = drawn.subplots()
    norm = TwoSlopeNorm(1.0, 1 / WIDEST_RATIO, WIDEST_RATIO)
    colors = axes.imshow([[float("nan")] * len(columns)] * len(lines), cmap="RdBu", norm=norm, aspect="auto")
    values = [[float("nan")] * len(columns) for _ in lines]
    for cell in cells:
        y, x = lines.index(_line_of(cell.ours)), columns.index(_column_of(cell.ours))
        values[y][x] = cell.ratio
        strong = not 1 / STRONG_RATIO < cell.ratio < STRONG_RATIO
        axes.text(
            x,
            y,
            f"{cell.ratio:.2f}  {_abbreviated(cell.peer.implementation)}",
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if strong else "black",
            weight="bold" if cell.ratio < LOSING else "normal",
        )
        if cell.ratio < LOSING:
            axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, ec="#67001f", lw=1.8))
    colors.set_data(values)
    axes.set_xticks(range(len(columns)), labels=[_column_text(column) for column in columns], fontsize=8)
    axes.set_yticks(range(len(lines)), labels=lines, fontsize=8)
    axes.set_xticks([x - 0.5 for x in range(1, len(columns))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(lines))], minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0)
    axes.set_ylabel("sequences x tokens each")
    losing = sum(cell.ratio < LOSING for cell in cells)
    title = f"{op_title(rows)}\nbest peer's time / ours; framed: we lose ({losing} of {len(cells)})"
    axes.set_title(title, fontsize=10)
    peers = in_order({cell.peer.implementation for cell in cells})
    drawn.supxlabel("best peer:  " + ",  ".join(f"{_abbreviated(p)} = {p}" for p in peers), fontsize=8)
    bar = drawn.colorbar(colors, ax=axes, shrink=0.8, ticks=[1 / 1.5, 0.8, 1, 1.25, 1.5])
    bar.ax.set_yticklabels(["0.67", "0.8", "1", "1.25", "1.5"], fontsize=8)
    return drawn


class Compared(NamedTuple):
    ours: Row
    peer: Row
    """The fastest."""

    @property
    def ratio(self) -> float:
        """Above 1 we are faster."""
        return (self.peer.median_us or 0) / (self.ours.median_us or 1)


def ratios(rows: Sequence[Row], ours: str | None = None) -> list[Compared]:
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    found = []
    for own in by_case.values():
        mine = [row for row in own if (row.implementation == ours if ours else is_ours(row))]
        # What a call takes by itself is the honest figure, though another of ours were faster.
        mine = [row for row in mine if row.implementation == OURS] or mine
        peers = [row for row in own if not is_ours(row)]
        if mine and peers:
            found.append(Compared(min(mine, key=_time), min(peers, key=_time)))
    return found


def _time(row: Row) -> float:
    return row.median_us or float("inf")


def _line_of(row: Row) -> str:
    equal = LENGTH.search(row.case)
    return f"{row.batch} x {row.seqlen}" + ("" if equal else " (varied)")


def _line_order(row: Row) -> tuple[int, bool, int]:
    return row.batch, LENGTH.search(row.case) is None, row.seqlen


def _column_of(row: Row) -> tuple[int, int, int, str]:
    options = re.search(r"-(kv(?:e4m3|e5m2|int8)|w\d+|bs\d+).*", LENGTH.sub("", row.case))
    return row.kv_heads, row.heads, row.q_len, options[0] if options else ""


def _column_text(column: tuple[int, int, int, str]) -> str:
    kv_heads, heads, q_len, options = column
    lines = [f"{heads} heads", f"over {kv_heads}"] if kv_heads > 1 else [f"{heads} heads"]
    return "\n".join(
        [*lines, *([f"{q_len} tokens"] if q_len > 1 else []), *([options[1:]] if options else [])]
    )


def _abbreviated(name: str) -> str:
    """A peer's initials: "FM", "FA3"."""
    return _INITIALS.get(name) or name[:4]


def _short(length: int) -> str:
    """1024 -> 1k, where it is that."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def drawn(rows: Sequence[Row], roofs: Sequence[Row], ours: str | None) -> dict[str, Figure]:
    """{what the file's name ends in: picture}."""
    found: dict[str, Figure | None] = {}
    for own in by_op(rows):
        op = own[0].op
        found[f"{op}-bandwidth"] = bandwidth(own)
        found[f"{op}-ratio"] = ratio(own, ours)
        found[f"{op}-roof"] = roof_chart([Table(own, roofs)])
    return {name: figure for name, figure in found.items() if figure is not None}


def by_op(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.op == op] for op in dict.fromkeys(row.op for row in rows)]


def _save(figure: Figure, path: Path) -> None:
    """Letters stay letters, and the same table gives the same file."""
    if path.suffix == ".svg":
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.family": "sans-serif"}):
            figure.savefig(path, metadata={"Date": None, "Creator": None})
    else:
        figure.savefig(path, dpi=150)


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--cells", default="", metavar="REGEX", help="those whose id it finds")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="an implementation")
    parser.add_argument("--page", action="store_true", help="*-roof alone, named as the table, as svg")
    parser.add_argument(
        "--ours", metavar="NAME", help='what stands for us in *-ratio, such as "ours, Pallas"'
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: beside the table")
    parser.add_argument("--format", choices=("png", "svg"), default="png")
    arguments = parser.parse_args(command_line)
    try:
        found: list[Table] = []
        for path in arguments.tables:
            right = [
                row for row in results.read(path) if row.ok and row.implementation not in arguments.without
            ]
            rows = [row for row in right if row.op != roofline.OP and re.search(arguments.cells, row.case)]
            found.append(Table(rows, [row for row in right if row.op == roofline.OP]))
        table = arguments.tables[0]
        if len(found) == 1 and not arguments.page:
            pictures = {f"-{name}": own for name, own in drawn(*found[0], arguments.ours).items()}
        else:
            panels = [Table(own, roofs) for rows, roofs in found for own in by_op(rows)]
            picture = roof_chart(panels, columns=1 if arguments.page else 2)
            pictures = {} if picture is None else {"" if arguments.page else "-roof": picture}
        if not pictures:
            raise ValueError(f"{table}: expected right figures of cells that can be drawn, found none")
        for name, figure in pictures.items():
            folder = arguments.out or table.parent
            path = folder / f"{table.stem}{name}.{'svg' if arguments.page else arguments.format}"
            _save(figure, path)
            print(f"drawn in {path}")
    except (ValueError, OSError, re.error) as error:
        parser.exit(2, f"plot.py: error: {str(error).splitlines()[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
