"""Which axes of a grid vary, and the groups of rows that share all but stages and micro-batches.

Tables, pictures and charts are laid out K by M; every other axis that varies gets a table, a panel or a series per
combination. It lies below report and tracking, which both need it and must not know each other.
"""

from collections.abc import Sequence
from typing import Any

from pipebench.rows import Row

K, M = "stages", "micro"


def axes_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns that say which point a row is: `row_of` puts them between status and step time."""
    names = list(rows[0]) if rows else []
    return names[names.index("status") + 1 : names.index("step_s")] if names else []


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the axes besides K and M that have several values."""
    return [name for name in axes_of(rows) if name not in (K, M) and len({str(row[name]) for row in rows}) > 1]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each combination of the other axes, under a title such as `schedule=1f1b`."""
    names = varying(rows)
    result: dict[str, list[Row]] = {}
    for row in rows:
        result.setdefault(", ".join(f"{name}={row[name]}" for name in names), []).append(row)
    return result


def values(rows: Sequence[Row], axis: str) -> list[Any]:
    """Return the distinct values of K or M in rising order."""
    return sorted({row[axis] for row in rows})
