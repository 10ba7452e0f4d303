"""Write the views of a sweep into its folder, from its files alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pipebench.errors import ResultError
from pipebench.files import own, put
from pipebench.report.content import Content, content_of
from pipebench.report.figures import Picture, pictures_of, rendered
from pipebench.report.html import html_page
from pipebench.report.latex import latex
from pipebench.report.page import page
from pipebench.report.sweep import Sweep
from pipebench.report.table import csv_of, csv_text

Files = dict[str, bytes]
"""Content by name inside the sweep's folder."""


def _results(content: Content) -> Files:
    rows = content.rows
    header = rows[0] if rows else ["key", "status"]
    return {"results.csv": csv_text(header, (row.values() for row in rows)).encode()}


def _markdown(content: Content, pictures: Sequence[Picture]) -> Files:
    return {"report.md": page(content, pictures).encode()}


def _html(content: Content, pictures: Sequence[Picture]) -> Files:
    return {"report.html": html_page(content, pictures).encode()}


def _latex(content: Content, pictures: Sequence[Picture]) -> Files:
    return {f"tables/{table.name}.tex": latex(table).encode() for table in content.tables}


def _csv(content: Content, pictures: Sequence[Picture]) -> Files:
    return {f"tables/{table.name}.csv": csv_of(table).encode() for table in content.tables}


def _pictures(suffix: str) -> Callable[[Content, Sequence[Picture]], Files]:
    def files(content: Content, pictures: Sequence[Picture]) -> Files:
        return {f"{picture.name}.{suffix}": rendered(picture, suffix) for picture in pictures}

    return files


FORMATS: dict[str, Callable[[Content, Sequence[Picture]], Files]] = {
    "md": _markdown,
    "html": _html,
    "latex": _latex,
    "csv": _csv,
    "png": _pictures("png"),
    "svg": _pictures("svg"),
    "pdf": _pictures("pdf"),
}
"""What a report can be written as; results.csv is written with any of them."""

USUAL = ("md", "html", "png")
"""What a sweep leaves behind without being asked."""


def write_report(sweep: Sweep, formats: Sequence[str] = USUAL) -> list[Path]:
    """Write results.csv and the views named in `formats` into the sweep's folder; return what was written.

    A picture for which nothing was measured is left out. Raise ResultError for a folder that cannot be written.
    """
    folder, content = sweep.folder, content_of(sweep)
    pictures = pictures_of(content)
    files = _results(content)
    for name in formats:
        files |= FORMATS[name](content, pictures)
    try:
        for name, written in files.items():
            own(folder, (folder / name).parent).mkdir(exist_ok=True)
            put(folder / name, written)
    except OSError as error:
        raise ResultError(f"{folder}: the report cannot be written: {error}") from error
    return [folder / name for name in files]
