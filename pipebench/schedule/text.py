"""Schedules as text: the CSV that PyTorch writes and reads.

One line per rank, an action a cell, empty cells where PyTorch marks idle steps. PyTorch's form has F, B, I and W; `R`
may be written too, which PyTorch does not know.
"""

import csv
from io import StringIO
from pathlib import Path

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Row, Schedule


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
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
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
