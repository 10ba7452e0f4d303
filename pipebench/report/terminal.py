"""What a sweep says at its end, on the terminal: its table, and the answers it was run for."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pipebench.grid import K, M, varying
from pipebench.report.cells import LEGEND, MARKS, NOTHING, bubble, digits, marks, mebibytes, setting, with_interval
from pipebench.report.engines import EngineSet
from pipebench.report.glance import at_a_glance
from pipebench.report.noise import floor_of
from pipebench.report.noise import in_words as noise_in_words
from pipebench.report.sweep import Sweep
from pipebench.rows import COMPARABLE, Row

if TYPE_CHECKING:
    from rich.table import Table


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
    for mark in MARKS:
        if mark in used:
            print(f"{mark} {LEGEND[mark]}")


def print_engines(sets: Sequence[EngineSet]) -> None:
    """Print the tables of engines side by side, if several ran; long lines wrap and no number is cut off."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for found in sets:
        table = Table(box=None, padding=(0, 2), pad_edge=False, collapse_padding=True, header_style="bold")
        for number, name in enumerate(found.table.header):
            justify: Literal["left", "right"] = "left" if number < found.table.num_text_columns else "right"
            table.add_column(Text(textwrap.fill(name, _HEADER_LETTERS)), no_wrap=True, justify=justify)
        for line in found.table.lines:
            table.add_row(*(Text(" ".join(cell.text.split())) for cell in line))
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        print(found.table.title)
        Console(highlight=False, width=max(console.width, needed)).print(table)
        print()


_HEADER_LETTERS = 12


def print_glance(sweep: Sweep, engines: Sequence[EngineSet]) -> None:
    """Print the answers at a glance, the best of each engine and the noise floor, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    width = max(60, min(console.width, 120))
    answers = at_a_glance(sweep.rows, floor_of(sweep))
    told = [f"{answer.question}: {answer.answer}. {answer.because}" for answer in answers]
    told += [each.words for each in engines]
    if sweep.again is not None:
        told.append(f"Noise floor: {noise_in_words(sweep, sweep.rows)}")
    for text in told:
        print(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False))


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
        bad = row["status"] not in (*COMPARABLE, "pending")
        cells = [setting(row[name]) for name in (K, M, *names)] + [row["status"], *_numbers(row), marks(row)]
        table.add_row(*(Text(cell) for cell in cells), style="red" if bad else None)
    return table


def _numbers(row: Row) -> list[str]:
    error = row["grad_rel_error"]
    return [
        with_interval(row),
        digits(row["samples_per_s"]),
        digits(row["speedup"]),
        bubble(row, "/"),
        mebibytes(row["peak_memory_bytes"]),
        NOTHING if error is None else f"{error:.1e}",
    ]
