"""Schedules as text: the CSV that PyTorch writes and reads, and the grid that an error shows.

One line per rank, an action a cell, empty cells where PyTorch marks idle steps. PyTorch's form has F, B, I and W; `R`
may be written too, which PyTorch does not know.
"""

import csv
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Row, Schedule

_WINDOW = 6
"""Actions a grid shows on either side of the marked one."""

_MOST_ROWS = 16
"""Rows a grid shows; marked ones first."""


def to_csv(schedule: Schedule) -> str:
    """Return the rows as CSV; the optimizer's steps, which every row ends with, are not part of the form."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in schedule.rows:
        writer.writerow([str(action) for action in row if action.op != Op.OPTIMIZER])
    return text.getvalue()


def load_csv(path: Path) -> Schedule:
    """Read a schedule; its name is the path. Raise ScheduleError, which names line and cell, for what it is not."""
    try:
        lines = list(csv.reader(path.read_text().splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise ScheduleError(f"schedule {path}: cannot be read: {error}") from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    rows = [_row(path, number, cells) for number, cells in enumerate(lines, start=1)]
    if not any(map(len, rows)):
        raise ScheduleError(f"schedule {path}: expected a line of actions such as 0F0,0B0 for each rank")
    return Schedule(str(path), rows)


def _row(path: Path, number: int, cells: list[str]) -> Row:
    actions = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            action = Action.parse(cell)
        except ScheduleError as error:
            raise ScheduleError(f"schedule {path}: line {number}, cell {column}: {error}") from error
        if action.op == Op.OPTIMIZER:
            raise ScheduleError(
                f"schedule {path}: line {number}, cell {column}: {action}: expected F, B, I, W or R; "
                "the optimizer steps after a stage's last gradient by itself"
            )
        actions.append(action)
    return Row(actions)


def grid(schedule: Schedule, marked: Mapping[int, int | None]) -> str:
    """Return the rows around what is wrong, `>` before each marked rank and brackets around its action.

    `marked` gives the place in the rank's row, or None where the row as a whole is wrong.
    """
    shown = sorted([*marked, *[rank for rank in range(schedule.num_ranks) if rank not in marked]][:_MOST_ROWS])
    width = len(str(schedule.num_ranks - 1))
    lines = []
    for rank in shown:
        row, place = schedule.rows[rank], marked.get(rank)
        first = max(0, (place or 0) - _WINDOW)
        last = min(len(row), (place or 0) + _WINDOW + 1)
        cells = [f"[{row[i]}]" if i == place else f" {row[i]} " for i in range(first, last)]
        before, after = "... " if first else "", " ..." if last < len(row) else ""
        lines.append(f"{'>' if rank in marked else ' '} rank {rank:>{width}} | {before}{''.join(cells)}{after}")
    hidden = schedule.num_ranks - len(shown)
    return "\n".join([*lines, *([f"  ({hidden} more ranks)"] if hidden else [])])
