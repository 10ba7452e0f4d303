"""Schedules side by side: step time and peak memory of each, fastest first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K
from pipebench.report.cells import MIB, marks, mebibytes, milliseconds
from pipebench.report.figures.bars import BAR_HEIGHT, MOST_BARS, beside, room_for_numbers, shortened
from pipebench.report.figures.canvas import (
    INK,
    MOST_PANELS,
    PALETTE,
    Picture,
    drawn,
    in_common,
    marks_explained,
    sentences,
    told,
)
from pipebench.report.schedules import compared, schedule_name
from pipebench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "Schedules, fastest first"
_PALE = 0.75
"""Bars are so pale that an interval crosses them visibly, on paper and on a dark page."""


def schedules_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw step time and peak memory by schedule; None when there is no such choice."""
    sets = compared(rows)
    if not sets:
        return None
    shown = _readable(sets)
    heights = [0.85 + 0.3 * len(ordered) for ordered in shown.values()]

    def fill(figure: "Figure") -> None:
        grid = figure.subplots(len(shown), 2, squeeze=False, sharey="row", height_ratios=heights)
        for (time, memory), (title, ordered) in zip(grid, shown.items(), strict=True):
            _times(time, title if len(shown) > 1 else "", ordered)
            _memories(memory, ordered)

    of_shown = [row for ordered in shown.values() for row in ordered]
    rest = len(sets) - len(shown)
    subtitle = sentences(
        in_common(of_shown, ["schedule", "chunks"]),
        marks_explained(of_shown),
        f"{rest} more in the tables" if rest else "",
    )
    figure = drawn(10.5, sum(heights), _TITLE, subtitle, fill)
    facts = [f"{title}: {', '.join(map(_in_words, ordered))}." for title, ordered in shown.items()]
    facts += [f"And {rest} more."] if rest else []
    opening = "Median step time and peak memory of the largest rank for each schedule, fastest first."
    return Picture("schedules", _TITLE, told(opening, facts), figure)


def _readable(sets: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Return as many sets as one picture holds, at least one: those with most stages, where most is at stake."""
    shown: dict[str, list[Row]] = {}
    for title, ordered in sorted(sets.items(), key=lambda each: -each[1][0][K]):
        if shown and (len(shown) == MOST_PANELS or sum(map(len, shown.values())) + len(ordered) > MOST_BARS):
            break
        shown[title] = ordered
    return shown


def _in_words(row: Row) -> str:
    step, memory = milliseconds(row["step_s"]), mebibytes(row["peak_memory_bytes"])
    return f"{schedule_name(row)}{marks(row)} {step} ms and {memory} MiB"


def _times(axes: "Axes", title: str, ordered: Sequence[Row]) -> None:
    steps_ms = [row["step_s"] * 1e3 for row in ordered]
    ends_ms = [row["step_ci_high_s"] * 1e3 for row in ordered]
    below_ms, above_ms = ([abs(row["step_s"] - row[name]) * 1e3 for row in ordered] for name in _INTERVAL)
    _frame(axes, "step, ms (median, 95 % interval)")
    axes.barh(range(len(ordered)), steps_ms, BAR_HEIGHT, color=PALETTE[0], alpha=_PALE)
    axes.errorbar(steps_ms, range(len(ordered)), xerr=[below_ms, above_ms], fmt="none", color=INK, elinewidth=1.2)
    for place, (row, end) in enumerate(zip(ordered, ends_ms, strict=True)):
        beside(axes, place, end, milliseconds(row["step_s"]))
    room_for_numbers(axes, 0.0, max(ends_ms))
    axes.set_yticks(range(len(ordered)), labels=[shortened(schedule_name(row)) + marks(row) for row in ordered])
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_title(title, fontsize=9.5, loc="left")


_INTERVAL = ("step_ci_low_s", "step_ci_high_s")


def _memories(axes: "Axes", ordered: Sequence[Row]) -> None:
    peaks_mib = [row["peak_memory_bytes"] / MIB for row in ordered]
    _frame(axes, "peak memory of the largest rank, MiB")
    axes.barh(range(len(ordered)), peaks_mib, BAR_HEIGHT, color=PALETTE[1], alpha=_PALE)
    for place, row in enumerate(ordered):
        beside(axes, place, peaks_mib[place], mebibytes(row["peak_memory_bytes"]))
    room_for_numbers(axes, 0.0, max(peaks_mib))


def _frame(axes: "Axes", unit: str) -> None:
    import seaborn

    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit)
    seaborn.despine(ax=axes, left=True)
