"""`python -m pipebench.report.embed FILE.md`: fill the tables of sweeps into a Markdown file, so that it cannot lie.

A pair of comments says which table stands between them: a sweep's folder, seen from the file, and the table's name
(`--format csv` writes each table as tables/NAME.csv):

    <!-- table: results/quick samples -->
    <!-- end of table -->
"""

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.errors import ResultError
from pipebench.report.content import Content, content_of
from pipebench.report.sweep import read_sweep
from pipebench.report.table import markdown

_PLACE = re.compile(r"(<!-- table: (?P<folder>\S+) (?P<name>\S+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the file's tables and return the exit code: 2 when the file or a table cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.report.embed", description="Fill the tables of sweeps into a Markdown file."
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="with <!-- table: FOLDER NAME --> <!-- end of table -->"
    )
    path = parser.parse_args(argv).file
    try:
        path.write_text(embedded(path))
    except (ResultError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def embedded(path: Path) -> str:
    """Return the file's text with every table as its sweep's files now give it."""
    content = functools.cache(lambda folder: content_of(read_sweep(path.parent / folder)))
    return _PLACE.sub(lambda place: _filled(place, content(place["folder"])), path.read_text())


def _filled(place: re.Match[str], content: Content) -> str:
    tables = {table.name: table for table in content.tables}
    if place["name"] not in tables:
        raise ResultError(f"table {place['folder']} {place['name']}: expected one of {', '.join(tables)}")
    return f"{place[1]}\n{markdown(tables[place['name']])}\n\n{place['end']}"


if __name__ == "__main__":
    sys.exit(main())
