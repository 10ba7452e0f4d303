"""Rows as tables: results.csv, Markdown tables K by M, and the table at the end of a sweep."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipebench.report.cells import LEGEND, NOTHING, bubble, digits, escape, kind, marks, mebibytes, milliseconds
from pipebench.report.grid import K, M, values, varying
from pipebench.rows import COMPARABLE, Row

if TYPE_CHECKING:
    from rich.table import Table

PIVOTS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "Throughput (samples/s)": ("samples_per_s", lambda row: digits(row["samples_per_s"])),
    "Throughput (tokens/s)": ("tokens_per_s", lambda row: digits(row["tokens_per_s"])),
    "Speed-up over one device": ("speedup", lambda row: digits(row["speedup"])),
    "Bubble fraction (measured / replayed / bound)": ("bubble_bound", lambda row: bubble(row, " / ")),
    "Peak memory of the largest stage (MiB)": ("peak_memory_bytes", lambda row: mebibytes(row["peak_memory_bytes"])),
}
"""Title of each table K by M, the column it needs, and what stands in a cell."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all columns; None becomes an empty field, and text cannot become a formula of a spreadsheet."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0] if rows else ["key", "status"])
        writer.writerows([_defused(value) for value in row.values()] for row in rows)


def _defused(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], num_text_columns: int = 1) -> str:
    """Return a Markdown table of finished cells; columns after the first few are numbers, at the right."""
    from tabulate import tabulate

    alignment = ["left" if column < num_text_columns else "right" for column in range(len(header))]
    return tabulate(list(lines), header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def pivots(rows: Sequence[Row]) -> dict[str, str]:
    """Return by title the tables K by M of rows that differ in nothing else."""
    return {
        title: _pivot(rows, cell)
        for title, (column, cell) in PIVOTS.items()
        if any(row[column] is not None for row in rows)
    }


def _pivot(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    at = {(row[K], row[M]): row for row in rows}
    micro = values(rows, M)
    lines = [
        [f"**K={stages}**", *(_marked(at[stages, m], cell) if (stages, m) in at else NOTHING for m in micro)]
        for stages in values(rows, K)
    ]
    return markdown(["", *(f"M={m}" for m in micro)], lines)


def _marked(row: Row, cell: Callable[[Row], str]) -> str:
    """Return the cell with its marks; a point without a result shows its status instead of a number."""
    if row["status"] not in COMPARABLE:
        return f"**{row['status']}**"
    return cell(row) + marks(row).replace("*", "\\*") + kind(row)


def legend(rows: Sequence[Row]) -> list[str]:
    """Return a line for each mark, whether or not it occurs: its absence says something too."""
    return [f"`{mark}` {escape(meaning)}" for mark, meaning in LEGEND.items()] if rows else []


def print_table(rows: Sequence[Row]) -> None:
    """Print the table of a sweep; where there is too little room, long lines wrap and no number is cut off."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    wide = console.options.update(max_width=10_000)
    for gap in (2, 1):
        table = terminal_table(rows, gap)
        needed = Measurement.get(console, wide, table).maximum
        if needed <= console.width:
            break
    Console(highlight=False, width=max(console.width, needed)).print(table)
    used = "".join(marks(row) for row in rows)
    for mark in "*~":
        if mark in used:
            print(f"{mark} {LEGEND[mark]}")


def terminal_table(rows: Sequence[Row], gap: int = 2) -> "Table":
    """Return one line per point, columns `gap` apart: what it is, how it went, and the numbers that matter."""
    from rich.table import Table
    from rich.text import Text

    names = varying(rows)
    table = Table(box=None, padding=(0, gap), pad_edge=False, collapse_padding=True, header_style="bold")
    for name in ["K", "M", *names]:
        table.add_column(Text(name), no_wrap=True, justify="right" if name in ("K", "M") else "left")
    table.add_column("status", no_wrap=True)
    numbers = ("step ms\n[95 %]", "samples\n/s", "speed\n-up", "bubble: measured/\nreplayed/bound", "peak\nMiB")
    for header in (*numbers, "gradient\nerror"):
        table.add_column(header, no_wrap=True, justify="right")
    table.add_column("", no_wrap=True)
    for row in rows:
        bad = row["status"] in ("wrong", "error")
        cells = [str(row[name]) for name in (K, M, *names)] + [row["status"], *_numbers(row), marks(row)]
        table.add_row(*(Text(cell) for cell in cells), style="red" if bad else None)
    return table


def _numbers(row: Row) -> list[str]:
    error = row["grad_rel_error"]
    step = milliseconds(row["step_s"])
    if row["step_s"] is not None:
        step += f" [{milliseconds(row['step_ci_low_s'])}, {milliseconds(row['step_ci_high_s'])}]"
    return [
        step,
        digits(row["samples_per_s"]),
        digits(row["speedup"]),
        bubble(row, "/"),
        mebibytes(row["peak_memory_bytes"]),
        NOTHING if error is None else f"{error:.1e}",
    ]
