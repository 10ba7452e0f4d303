"""Rows of actions as a grid for error messages, with what is wrong marked."""

from collections.abc import Mapping, Sequence

_WINDOW = 6
"""Actions shown on either side of the marked one."""

_MOST_ROWS = 16
"""Rows shown; marked ones first."""


def grid(rows: Sequence[Sequence[object]], marked: Mapping[int, int | None]) -> str:
    """Return the rows around what is wrong, `>` before each marked rank and brackets around its action.

    `marked` gives the place in the rank's row, or None where the row as a whole is wrong.
    """
    shown = sorted([*marked, *[rank for rank in range(len(rows)) if rank not in marked]][:_MOST_ROWS])
    width = len(str(len(rows) - 1))
    lines = []
    for rank in shown:
        row, place = rows[rank], marked.get(rank)
        first = max(0, (place or 0) - _WINDOW)
        last = min(len(row), (place or 0) + _WINDOW + 1)
        cells = [f"[{row[i]}]" if i == place else f" {row[i]} " for i in range(first, last)]
        before, after = "... " if first else "", " ..." if last < len(row) else ""
        lines.append(f"{'>' if rank in marked else ' '} rank {rank:>{width}} | {before}{''.join(cells)}{after}")
    hidden = len(rows) - len(shown)
    return "\n".join([*lines, *([f"  ({hidden} more ranks)"] if hidden else [])])
