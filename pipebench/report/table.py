"""A table as data, and the plain formats of it: Markdown and CSV. (LaTeX has a file, HTML the page's template.)

Cells hold plain text; what would be syntax is escaped here, by format, so whoever makes a table knows none of them.
"""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from pipebench.report.cells import escape


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell; the number behind it, to sort and to shade by; and the point it tells of, if one.

    `status` is that point's, where it stands in place of a number.
    """

    text: str
    value: float | None = None
    key: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Lines of cells under a header. The first `num_text_columns` are text, the others numbers, at the right.

    `name` is a file's stem, unique in a report. `keys` names the point of each line, where a line is a point's.
    `shaded`: lower or higher values are of interest as a whole, so a page may colour the cells by them.
    """

    name: str
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    num_text_columns: int = 1
    keys: tuple[str, ...] = ()
    shaded: bool = False


def cells(texts: Iterable[str]) -> tuple[Cell, ...]:
    return tuple(Cell(text) for text in texts)


def markdown(table: Table) -> str:
    """Return the table as Markdown (GitHub's pipes)."""
    from tabulate import tabulate

    alignment = ["left" if column < table.num_text_columns else "right" for column in range(len(table.header))]
    lines = [[f"**{cell.status}**" if cell.status else escape(cell.text) for cell in line] for line in table.lines]
    header = [escape(name) for name in table.header]
    return tabulate(lines, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return the lines as CSV; None becomes an empty field, and text cannot become a formula of a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_defused(name) for name in header])
    writer.writerows([_defused(value) for value in line] for line in lines)
    return text.getvalue()


def _defused(value: object) -> object:
    if not isinstance(value, str):
        return value
    on_one_line = value.replace("\r", " ")  # which csv does not quote, and readers take for the end of the row
    return f"'{on_one_line}" if value.startswith(_FORMULA_STARTS) and not _is_number(value) else on_one_line


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
