"""Write all views of a sweep into its folder, from its files alone."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipebench.errors import ResultError
from pipebench.report.figures import FIGURES
from pipebench.report.page import page
from pipebench.report.sweep import read_sweep, rows
from pipebench.report.tables import write_csv


def write_report(folder: Path) -> list[Path]:
    """Write results.csv, report.md and the pictures; return what was written.

    A picture for which nothing was measured is left out.
    """
    sweep = read_sweep(folder)
    table = rows(sweep)
    try:
        with _replacing(folder / "results.csv") as temporary:
            write_csv(table, temporary)
        pictures = []
        for name, draw in FIGURES.items():
            picture = draw(table)
            if picture is not None:
                pictures.append(folder / name)
                with _replacing(folder / name) as temporary:
                    temporary.write_bytes(picture)
        with _replacing(folder / "report.md") as temporary:
            temporary.write_text(page(sweep, table, [path.name for path in pictures]))
    except OSError as error:
        raise ResultError(f"{folder}: the report cannot be written: {error}") from error
    return [folder / "results.csv", folder / "report.md", *pictures]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a new file that takes the place of `path`: never half written, and no link is followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
