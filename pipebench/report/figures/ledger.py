"""Where the time went: a stacked bar for each point, the parts of its ledger in their fixed order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K, M
from pipebench.ledger import PARTS, part_name
from pipebench.report.cells import milliseconds, tenths
from pipebench.report.figures.bars import (
    BAR_HEIGHT,
    bar_label,
    bar_places,
    beside,
    clusters,
    fastest,
    frame_size,
    left_out,
    room_for_numbers,
)
from pipebench.report.figures.canvas import (
    INK,
    PALETTE,
    PAPER,
    Picture,
    drawn,
    in_common,
    legend,
    marks_explained,
    sentences,
    told,
)
from pipebench.report.tables import point_name
from pipebench.rows import COMPARABLE, Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "Where the time of a step went"
_BLUE, _ORANGE, _GREEN, _PURPLE, _BROWN, _VERMILION, _SKY, _GREY = PALETTE

_LOOKS = {
    "compute_s": (_GREY, ""),
    "fill_and_drain_s": (_BLUE, "///"),
    "recompute_s": (_PURPLE, "xxxx"),
    "imbalance_s": (_ORANGE, "\\\\\\"),
    "transfers_s": (_GREEN, "+++"),
    "optimizer_s": (_BROWN, "||"),
    "jitter_s": (_SKY, "xx"),
    "overhead_s": (_VERMILION, "---"),
}
"""Colour and hatch of each part."""


_VISIBLE = 0.005
"""Share of a step from which a negative part gets a mark."""


def ledger_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw the parts of each step in ms; None where no engine recorded spans."""
    known = [row for row in rows if row["status"] in COMPARABLE and row["ledger_compute_s"] is not None]
    if not known:
        return None
    found = clusters(fastest(known), (K, M))
    shown = [row for cluster in found for row in cluster]

    def fill(figure: "Figure") -> None:
        places = bar_places(figure, found, [bar_label(row, known) for row in shown], "ms of the median step")
        bars = [_stack(axes, place, row) for (axes, place), row in zip(places, shown, strict=True)]
        low, high = min(start for start, _ in bars), max(end for _, end in bars)
        room_for_numbers(places[0][0], low, high)
        legend(figure, _handles(any(map(_saves, shown))))

    subtitle = sentences(in_common(shown), marks_explained(shown), left_out(known, shown))
    figure = drawn(*frame_size(found), _TITLE, subtitle, fill)
    opening = "Milliseconds of the median step of each point, by what they went to."
    return Picture("ledger", _TITLE, told(opening, [_in_words(row, rows) for row in shown]), figure)


def _stack(axes: "Axes", place: float, row: Row) -> tuple[float, float]:
    """Draw one point's parts and return where the stack begins and ends, in ms.

    What a part saves, a negative one, stands left of zero, so that no part hides another; a tick then shows the step.
    """
    start = end = 0.0
    for part in PARTS:
        length = row[f"ledger_{part}"] * 1e3
        colour, hatch = _LOOKS[part]
        left = end if length >= 0 else start
        axes.barh(place, length, BAR_HEIGHT, left, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0)
        if length >= 0:
            end += length
        else:
            start += length
    step_ms = row["step_s"] * 1e3
    if _saves(row):
        axes.plot([step_ms], [place], "|", color=INK, markersize=13, markeredgewidth=1.4)
    beside(axes, place, max(end, step_ms), milliseconds(row["step_s"]))
    return start, end


def _saves(row: Row) -> bool:
    """Tell whether negative parts are large enough to be seen."""
    negative_s = sum(min(0.0, row[f"ledger_{part}"]) for part in PARTS)
    return bool(-negative_s > _VISIBLE * row["step_s"])


def _handles(any_negative: bool) -> list["Artist"]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    for part in PARTS:
        colour, hatch = _LOOKS[part]
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=PAPER, linewidth=0, label=part_name(part)))
    if any_negative:
        tick = Line2D([], [], color=INK, linestyle="", marker="|", markersize=11, markeredgewidth=1.4)
        tick.set_label("step (negative parts\nstand left of zero)")
        handles.append(tick)
    return handles


def _in_words(row: Row, rows: Sequence[Row]) -> str:
    """Return the step and its parts, those that round to nothing left out."""
    parts = {part_name(part): tenths(row[f"ledger_{part}"]) for part in PARTS}
    listed = ", ".join(f"{name} {text}" for name, text in parts.items() if text != "0.0")
    return f"{point_name(row, rows)}: step {milliseconds(row['step_s'])}, of it {listed}."
