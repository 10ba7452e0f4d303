"""Long trainings that should be one and the same: their losses, and below how far apart they drift.

Points that train the same with as many micro-batches share a column. Each is compared with the one of fewest stages: a
difference within the bound (see `rounding`) is rounding, one above it a mistake. Losses that are equal to the last bit
leave nothing to draw, which the legend says.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K, M
from pipebench.report.content import Point
from pipebench.report.figures.canvas import MUTED, RULE, Picture, drawn, look_of, told
from pipebench.rounding import largest_drift
from pipebench.rows import COMPARABLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_STEPS = 50
"""Of fewer the picture of the losses says enough."""

_TITLE = "Long training: how far apart?"
_MOST_COLUMNS = 3
_ROOM_FOR_THE_LEGEND = 10.0
"""Top of the axis of differences: above the bound there is nothing, one hopes."""


def drift_picture(points: Sequence[Point]) -> Picture | None:
    """Draw losses and their relative differences; None where no two points train the same for long."""
    sets = _trained_alike(points)[:_MOST_COLUMNS]
    if not sets:
        return None

    def fill(figure: "Figure") -> None:
        grid = figure.subplots(2, len(sets), squeeze=False, sharex="col")
        for members, (above, below) in zip(sets, grid.T, strict=True):
            _draw(members, above, below)
        grid[0, 0].set_ylabel("loss")
        grid[1, 0].set_ylabel("relative difference")

    subtitle = "below: losses against those of the point with fewest stages, and what rounding explains at most"
    figure = drawn(4.6 * len(sets) + 2.6, 5.6, _TITLE, subtitle, fill)
    facts = [f"{members[0].name} against {'; '.join(map(_in_words, _compared(members)))}." for members in sets]
    return Picture("drift", _TITLE, told("Losses of trainings that should be the same.", facts), figure)


def drift(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return |a - b| / |b| of each step that both trained, 0 where they are equal to the last bit."""
    pairs = zip(losses, reference, strict=False)
    return [0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs]


def _trained_alike(points: Sequence[Point]) -> list[list[Point]]:
    """Return sets of two points or more, fewest stages first, those of most steps first."""
    sets: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        if point.row["status"] in COMPARABLE and len(point.losses) >= LEAST_STEPS:
            sets.setdefault((point.trains, point.row[M]), []).append(point)
    compared = [sorted(members, key=lambda point: int(point.row[K])) for members in sets.values() if len(members) > 1]
    return sorted(compared, key=lambda members: -len(members[0].losses))


def _compared(members: Sequence[Point]) -> list[tuple[str, list[float]]]:
    """Return the name of each point but the first with its drift from that one."""
    reference = members[0].losses
    return [(point.name, drift(point.losses, reference)) for point in members[1:]]


def _draw(members: Sequence[Point], above: "Axes", below: "Axes") -> None:
    import seaborn

    widest = len(members) - 1
    for number, point in enumerate(members):
        colour, marker = look_of(number)
        steps = [point.first_step + done for done in range(1, len(point.losses) + 1)]
        width = 1.2 + 1.6 * (widest - number)  # the first lies below the others, and shows
        above.plot(steps, point.losses, color=colour, linewidth=width, marker=marker, markevery=[-1], label=point.name)
    first = members[0].first_step
    most = max(len(found) for _, found in _compared(members))
    steps = [first + done for done in range(1, most + 1)]
    below.plot(steps, [largest_drift(done) for done in range(1, most + 1)], color=MUTED, linestyle="--", label="bound")
    for number, (name, found) in enumerate(_compared(members), start=1):
        colour, marker = look_of(number)
        drawn_at = [value if value else math.nan for value in found]
        label = _in_words((name, found))
        below.plot(steps[: len(found)], drawn_at, color=colour, linewidth=0, marker=marker, markersize=3, label=label)
    below.set_yscale("log")
    below.set_ylim(top=_ROOM_FOR_THE_LEGEND)
    below.yaxis.set_major_formatter(lambda value, place: f"{value:.0e}")
    below.set_xlabel("training step")
    for axes in (above, below):
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.legend(frameon=False, fontsize=8, loc="upper right" if axes is above else "upper left")
        seaborn.despine(ax=axes)


def _in_words(compared: tuple[str, list[float]]) -> str:
    """Say how far a point drifts at most, and whether that is within the bound at every step."""
    name, found = compared
    if not any(found):
        return f"{name}: equal to the last bit in all {len(found)} steps"
    above = [step for step, value in enumerate(found, start=1) if not value <= largest_drift(step)]
    held = f"above the bound from step {above[0]}" if above else "within the bound"
    return f"{name}: at most {max(found):.1e} in {len(found)} steps, {held}"
