"""How near to what the card can do each implementation comes, cell by cell: a panel a table."""

from collections.abc import Sequence
from typing import NamedTuple

import roofline
from looks import cell, in_order, looks, op_title, shown
from matplotlib.figure import Figure
from results import Row

LINE = 0.27  # inches a cell
TITLE = "How near each call comes to what limits it, memory or tensor cores, as measured in the same run"


class Table(NamedTuple):
    rows: Sequence[Row]
    """Of one op."""
    roofs: Sequence[Row]
    """What the run measured of the card."""


def roof_chart(tables: Sequence[Table], columns: int = 2) -> Figure | None:
    """None where no run has measured its roof."""
    tables = [Table([r for r in table.rows if r.roof_percent], table.roofs) for table in tables]
    tables = [table for table in tables if table.rows]
    if not tables:
        return None
    longest = max(len({row.case for row in table.rows}) for table in tables)
    columns = min(columns, len(tables))
    lines = -(-len(tables) // columns)
    size = 7.6 * columns, lines * (LINE * longest + 1.3) + 0.9
    drawn = Figure(figsize=size, layout="constrained")
    panels = drawn.subplots(lines, columns, squeeze=False).flat
    names = in_order({row.implementation for table in tables for row in table.rows})
    styles = looks(names)
    for axes in panels:
        axes.set_axis_off()
    for axes, table in zip(drawn.axes, tables, strict=False):
        axes.set_axis_on()
        _draw_panel(axes, table, names, styles)
    handles = {line.get_label(): line for axes in drawn.axes for line in axes.get_lines()}
    labels = [*(shown(name) for name in names), "roof"]
    drawn.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 1 + 2 * columns),
        fontsize=9,
    )
    drawn.suptitle(TITLE, fontsize=11 if columns > 1 else 9)
    return drawn


def _draw_panel(axes, table: Table, names: Sequence[str], styles) -> None:
    cases = list(dict.fromkeys(row.case for row in table.rows))
    words = {row.case: cell(row) for row in table.rows}
    # What is so in every cell is said once, above them; how long it is stays.
    common = [word for word in words[cases[0]][1:] if all(word in own for own in words.values())]
    for name in names:
        points = [
            (row.roof_percent, cases.index(row.case)) for row in table.rows if row.implementation == name
        ]
        if points:
            color, marker = styles[name]
            zorder = 3 - names.index(name) / 99  # ours above the others
            axes.plot(
                *zip(*points, strict=True),
                marker=marker,
                color=color,
                ls="",
                ms=6,
                label=shown(name),
                zorder=zorder,
            )
    axes.axvline(100, color="black", ls="--", lw=1, label="roof")
    axes.set_yticks(range(len(cases)), labels=[_label(words[case], common) for case in cases], fontsize=8)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(0, 104)
    axes.set_xlabel("% of the roof", fontsize=8)
    axes.grid(alpha=0.3)
    rates = {row.case: row for row in table.roofs}
    measured = []
    if (read := rates.get(roofline.READ)) and read.gbs:
        measured.append(f"{read.gbs:.0f} GB/s")
    if (product := rates.get(roofline.PRODUCT)) and product.tflops:
        measured.append(f"{product.tflops:.0f} TFLOPS")
    axes.set_title(
        ", ".join([op_title(table.rows, between="\n"), *common])
        + (f"\nroof: {' or '.join(measured)}" if measured else ""),
        fontsize=9.5,
    )


def _label(words: Sequence[str], common: Sequence[str]) -> str:
    return ", ".join(word for word in words if word not in common)
