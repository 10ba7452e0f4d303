"""A table as data, and the plain formats of it: Markdown and CSV. (LaTeX has a file, HTML the page's template.)

Cells hold plain text; what would be syntax is escaped here, by format, so whoever makes a table knows none of them.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipebench.report.cells import NOTHING, escape


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
    `shade` says from which value to which a page may colour the cells; None where they are of unlike kinds.
    """

    name: str
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    num_text_columns: int = 1
    keys: tuple[str, ...] = ()
    shade: tuple[float, float] | None = None


def cells(texts: Iterable[str]) -> tuple[Cell, ...]:
    return tuple(Cell(text) for text in texts)


def markdown(table: Table) -> str:
    """Return the table as Markdown (GitHub's pipes)."""
    from tabulate import tabulate

    alignment = ["left" if column < table.num_text_columns else "right" for column in range(len(table.header))]
    lines = [[f"**{cell.status}**" if cell.status else escape(cell.text) for cell in line] for line in table.lines]
    header = [escape(name) for name in table.header]
    return tabulate(lines, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_MARKS = r"[*~]*(?: \w+)?"
_COMPOSITES = {
    ("", " low", " high"): re.compile(rf"({_NUMBER}) \[({_NUMBER}), ({_NUMBER})\]{_MARKS}"),
    (" measured", " replayed", " bound"): re.compile(
        rf"({_NUMBER}|{NOTHING}) / ({_NUMBER}|{NOTHING}) / ({_NUMBER}|{NOTHING}){_MARKS}"
    ),
    ("",): re.compile(rf"({_NUMBER}){_MARKS}"),
}
"""Cells of several numbers, and what the columns are called that each gets in CSV."""


def csv_of(table: Table) -> str:
    """Return the table as CSV of bare numbers, each in a column of its own; marks are columns of results.csv."""
    header, columns = list(table.header[: table.num_text_columns]), []
    for number in range(table.num_text_columns):
        columns.append([line[number].text for line in table.lines])
    for number in range(table.num_text_columns, len(table.header)):
        texts = [line[number].text for line in table.lines]
        suffixes, pattern = _composite(texts)
        name = re.sub(r" \[95 %\]$|:? \(?measured / replayed / bound\)?$", "", table.header[number])
        header += [name + suffix for suffix in suffixes]
        split = [match.groups() if (match := pattern.fullmatch(text)) else (text,) for text in texts]
        columns += [[cells[i] if i < len(cells) else NOTHING for cells in split] for i in range(len(suffixes))]
    lines = zip(*columns, strict=True)
    return csv_text(header, ([None if text == NOTHING else text for text in line] for line in lines))


def _composite(texts: Sequence[str]) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return the first kind of cell that one of the texts is of, the plain one where none is."""
    kinds = list(_COMPOSITES.items())
    return next((kind for kind in kinds if any(kind[1].fullmatch(text) for text in texts)), kinds[-1])


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
