"""Schedules side by side: which rows differ in their schedule alone, fastest first, and what those are called."""

from collections.abc import Sequence

from pipebench.grid import K, M, axes_of
from pipebench.report.cells import kind
from pipebench.rows import COMPARABLE, Row

ZERO_BUBBLE = ("zb_h1", "zb_h2", "zb_v", "zb_auto", "v_half", "v_min")
INTERLEAVING = ("interleaved", "looped_bfs")


def schedule_name(row: Row) -> str:
    """Return what a picture calls the row: the schedule, its stages per rank where it has several, what is unusual."""
    chunks = "" if row["chunks"] == 1 else f", {row['chunks']} stages a rank"
    return f"{row['schedule']}{chunks}{kind(row)}"


def compared(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return by title the rows that differ in schedule and chunks alone, fastest first, at least two schedules each."""
    names = [name for name in axes_of(rows) if name not in ("schedule", "chunks")]
    told = [name for name in names if name in (K, M) or len({str(row[name]) for row in rows}) > 1]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] in COMPARABLE:
            groups.setdefault(", ".join(f"{name}={row[name]}" for name in told), []).append(row)
    return {
        title: sorted(group, key=lambda row: float(row["step_s"]))
        for title, group in groups.items()
        if len({row["schedule"] for row in group}) > 1
    }
