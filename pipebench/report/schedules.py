"""Schedules side by side: ordered by measured step time, memory beside it, zero-bubble next to interleaving.

A zero-bubble schedule is to be judged against the best interleaving, which also shrinks the bubble and needs no
split backward; so every row of the one kind names the best of the other.
"""

from collections.abc import Sequence

from pipebench.report.cells import NOTHING, bubble, digits, escape, kind, marks, mebibytes, milliseconds
from pipebench.report.grid import K, M, axes_of
from pipebench.report.tables import markdown
from pipebench.rows import COMPARABLE, Row

ZERO_BUBBLE = ("zb_h1", "zb_h2", "zb_v", "zb_auto", "v_half", "v_min")
INTERLEAVING = ("interleaved", "looped_bfs")

_HEADER = (
    "schedule",
    "stages a rank",
    "step ms [95 %]",
    "of gpipe's",
    "samples/s",
    "speed-up",
    "bubble: measured / replayed / bound",
    "peak MiB",
    "best interleaving ms",
    "of that",
)


def comparisons(rows: Sequence[Row]) -> dict[str, str]:
    """Return a table for each set of `compared` rows."""
    return {title: _comparison(ordered) for title, ordered in compared(rows).items()}


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


def _comparison(rows: Sequence[Row]) -> str:
    """`rows` are in order of step time."""
    gpipe = next((row for row in rows if row["schedule"] == "gpipe"), None)
    rival = next((row for row in rows if row["schedule"] in INTERLEAVING), None)
    return markdown(_HEADER, [_line(row, gpipe, rival) for row in rows])


def _line(row: Row, gpipe: Row | None, rival: Row | None) -> list[str]:
    judged = rival is not None and row["schedule"] in ZERO_BUBBLE
    interval = f"[{milliseconds(row['step_ci_low_s'])}, {milliseconds(row['step_ci_high_s'])}]"
    return [
        escape(row["schedule"]) + marks(row).replace("*", "\\*") + kind(row),
        str(row["chunks"]),
        f"{milliseconds(row['step_s'])} {interval}",
        _ratio(row, gpipe),
        digits(row["samples_per_s"]),
        digits(row["speedup"]),
        bubble(row, " / "),
        mebibytes(row["peak_memory_bytes"]),
        f"{milliseconds(rival['step_s'])} ({rival['schedule']}, {rival['chunks']})" if judged and rival else NOTHING,
        _ratio(row, rival) if judged else NOTHING,
    ]


def _ratio(row: Row, other: Row | None) -> str:
    return NOTHING if other is None else f"{row['step_s'] / other['step_s']:.3f}"
