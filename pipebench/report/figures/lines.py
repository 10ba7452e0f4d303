"""Bubble and throughput against micro-batches, a line for each number of stages.

Where all points have one number of micro-batches, the two change places: against stages. Points that differ in
anything else stand in panels of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipebench.grid import K, M, groups, values, varying
from pipebench.report.cells import digits, fraction, measured_or_simulated
from pipebench.report.figures.canvas import (
    INK,
    MOST_PANELS,
    MUTED,
    PAPER,
    Picture,
    drawn,
    in_common,
    legend,
    look_of,
    panel_size,
    panels,
    sentences,
    told,
)
from pipebench.report.schedules import compared
from pipebench.rows import COMPARABLE, Row
from pipebench.schedule.bounds import bubble_bound

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {K: "stages K", M: "micro-batches M"}
_LETTERS = {K: "K", M: "M"}
_MOST_TICKS = 9
_CURVE_POINTS = 200


@dataclass(frozen=True, slots=True)
class Line:
    """The rows of one line in rising order of `x`, K or M; `along` are the values of x that the picture spans."""

    rows: Sequence[Row]
    x: str
    along: Sequence[int]
    colour: str
    marker: str

    def column(self, name: str) -> list[float]:
        return _or_nan([row[name] for row in self.rows])


def bubble_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw measured, replayed and bound bubble fraction; None when no step was traced, or nothing forms a line."""
    told_of = [row for row in rows if row["status"] in COMPARABLE and row["bubble_fraction"] is not None]
    if not _forms_lines(told_of):
        return None
    measured = measured_or_simulated(told_of)
    kinds = {"measured": measured, "replayed": "replayed", "bound": "bound"}
    title = "Bubble fraction: how much of K devices stood idle"
    figure = _figure(told_of, title, "idle / makespan", kinds, _bubble)
    opening = f"Bubble fraction, idle over makespan, against {_NAMES[_x(told_of)]}."
    columns = {measured: "bubble_fraction", "replayed": "bubble_replayed", "bound": "bubble_bound"}
    return Picture("bubble", title, told(opening, _facts(told_of, columns, fraction)), figure)


def throughput_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw samples per second with 95 % intervals, and one device's where known; None when nothing forms a line."""
    told_of = [row for row in rows if row["status"] in COMPARABLE]
    if not _forms_lines(told_of):
        return None
    all_simulated = measured_or_simulated(told_of) == "simulated"
    kinds = {"measured": "simulated" if all_simulated else "median, 95 % interval"}
    if any(row["speedup"] for row in told_of):
        kinds["one device"] = "one device"
    title = "Throughput: training samples per second"
    figure = _figure(told_of, title, "samples / s", kinds, _throughput)
    opening = f"Training samples per second against {_NAMES[_x(told_of)]}."
    columns = {"samples/s": "samples_per_s", "speed-up over one device": "speedup"}
    return Picture("throughput", title, told(opening, _facts(told_of, columns, digits)), figure)


def _x(rows: Sequence[Row]) -> str:
    return K if len(values(rows, M)) == 1 < len(values(rows, K)) else M


def _forms_lines(rows: Sequence[Row]) -> bool:
    """Tell whether to draw: schedules compared at one size are bars, since a line through one point says nothing."""
    return bool(rows) and (len(values(rows, _x(rows))) > 1 or not compared(rows))


def _facts(rows: Sequence[Row], columns: dict[str, str], text: Callable[[float | None], str]) -> list[str]:
    """Say for each line where its numbers begin and end."""
    facts = []
    for panel, members in groups(rows).items():
        for line in _lines(members, rows):
            first, last = line.rows[0], line.rows[-1]
            numbers = []
            for name, column in columns.items():
                if first[column] is not None:
                    ends = f" to {text(last[column])}" if last is not first else ""
                    numbers.append(f"{name} {text(first[column])}{ends}")
            span = f"{_LETTERS[line.x]}={first[line.x]}" + (f" to {last[line.x]}" if last is not first else "")
            where = sentences(panel, f"{_LETTERS[_other(line.x)]}={first[_other(line.x)]}, {span}")
            facts.append(f"{where}: {', '.join(numbers)}.")
    return facts


def _other(x: str) -> str:
    return M if x == K else K


def _lines(members: Sequence[Row], rows: Sequence[Row]) -> list[Line]:
    """Return the lines of one panel; the same K or M looks the same in all of them."""
    x = _x(rows)
    along, told_apart = values(rows, x), values(rows, _other(x))
    lines = []
    for number, value in enumerate(told_apart):
        own = sorted((row for row in members if row[_other(x)] == value), key=lambda row: int(row[x]))
        if own:
            lines.append(Line(own, x, along, *look_of(number)))
    return lines


def _figure(
    rows: Sequence[Row], title: str, unit: str, kinds: dict[str, str], draw: Callable[["Axes", Line], None]
) -> "Figure":
    """Return the figure with a panel for each group of rows; `kinds` labels the kinds of lines that `draw` draws."""
    shown = dict(list(groups(rows).items())[:MOST_PANELS])
    left_out = len(groups(rows)) - len(shown)
    x = _x(rows)

    def fill(figure: "Figure") -> None:
        found = panels(figure, list(shown), unit, share_y=_one_scale(rows))
        for axes, members in zip(found, shown.values(), strict=True):
            for line in _lines(members, rows):
                draw(axes, line)
            _count_axis(axes, values(rows, x), _NAMES[x])
        _from_zero(found)
        legend(figure, [*_line_handles(rows), *_kind_handles(kinds)])

    more = f"{left_out} more in the tables" if left_out else ""
    subtitle = sentences(in_common(rows, [x, _other(x)] if len(values(rows, _other(x))) > 1 else [x]), more)
    return drawn(*panel_size(len(shown)), title, subtitle, fill)


def _bubble(axes: "Axes", line: Line) -> None:
    at = [row[line.x] for row in line.rows]
    _measured(axes, line, "bubble_fraction")
    axes.plot(at, line.column("bubble_replayed"), "--", color=line.colour, linewidth=1.5, marker="_", markersize=8)
    curve = _bound_curve(line)
    if curve is None:  # known where it was measured what the passes cost, and so at the points alone
        axes.plot(at, line.column("bubble_bound"), ":", color=line.colour, linewidth=1.2, marker=".", markersize=4)
    else:
        axes.plot(*curve, ":", color=line.colour, linewidth=1.4)


def _bound_curve(line: Line) -> tuple[list[int], list[float]] | None:
    """Return the bound over all that the picture spans; None where that is one count, or costs of the points enter it.

    They do not where the form for equal costs goes through the bound of every point.
    """
    first = line.rows[0]

    def bound_at(x: int) -> float | None:
        stages, micro = (x, first[M]) if line.x == K else (first[K], x)
        return bubble_bound(first["schedule"], stages, micro, first["chunks"])

    here = [bound_at(row[line.x]) for row in line.rows]
    through_all = np.allclose(_or_nan(here), line.column("bubble_bound"), rtol=0, atol=1e-9, equal_nan=True)
    if line.along[0] == line.along[-1] or not through_all:
        return None
    spanned = np.geomspace(line.along[0], line.along[-1], _CURVE_POINTS).round()
    counts = [int(count) for count in np.unique(spanned)]
    return counts, _or_nan([bound_at(count) for count in counts])


def _or_nan(found: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in found]


def _throughput(axes: "Axes", line: Line) -> None:
    at, speed = [row[line.x] for row in line.rows], line.column("samples_per_s")
    low = [row["samples_per_s"] * (1 - row["step_s"] / row["step_ci_high_s"]) for row in line.rows]
    high = [row["samples_per_s"] * (row["step_s"] / row["step_ci_low_s"] - 1) for row in line.rows]
    _measured(axes, line, "samples_per_s")
    axes.errorbar(at, speed, yerr=[low, high], fmt="none", color=line.colour, elinewidth=1.3, capsize=4)
    for one_device in {f"{row['samples_per_s'] / row['speedup']:.6g}" for row in line.rows if row["speedup"]}:
        axes.axhline(float(one_device), color=MUTED, linestyle="-.", linewidth=1.2, zorder=1)


def _measured(axes: "Axes", line: Line, column: str) -> None:
    """Draw a broad, pale line, under which replayed and bound stay visible where all three agree.

    Its points are hollow where stages shared cores, since K devices would have done otherwise.
    """
    axes.plot([row[line.x] for row in line.rows], line.column(column), color=line.colour, linewidth=3.5, alpha=0.35)
    for row in line.rows:
        face = PAPER if row["oversubscribed"] else line.colour
        at, value = [row[line.x]], [row[column]]
        axes.plot(at, value, line.marker, color=line.colour, markerfacecolor=face, markersize=6, zorder=3)


def _count_axis(axes: "Axes", counts: Sequence[int], name: str) -> None:
    """Give every panel the same axis, with a tick at each count that was run, as far as there is room."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
    apart = (counts[-1] / counts[0]) ** (1 / _MOST_TICKS)
    ticks: list[int] = []
    for count in counts:
        if not ticks or count >= ticks[-1] * apart:
            ticks.append(count)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(name)


def _from_zero(found: Sequence["Axes"]) -> None:
    """Start the vertical axes at 0; after all are drawn, since panels that share one stretch it."""
    tops = [axes.get_ylim()[1] for axes in found]
    for axes, top in zip(found, tops, strict=True):
        axes.set_ylim(0, 1.04 * top)


def _one_scale(rows: Sequence[Row]) -> bool:
    """Panels share the vertical axis unless they show different models or batches."""
    return not any(name == "batch" or name.startswith("model") for name in varying(rows))


def _line_handles(rows: Sequence[Row]) -> list["Artist"]:
    """Explain the colours and markers of the lines, and hollow points where there are any."""
    from matplotlib.lines import Line2D

    told_apart = _other(_x(rows))
    handles: list[Artist] = []
    for number, value in enumerate(values(rows, told_apart)):
        colour, marker = look_of(number)
        label = f"{_LETTERS[told_apart]}={value}"
        handles.append(Line2D([], [], color=colour, linewidth=3, marker=marker, markersize=6, label=label))
    if any(row["oversubscribed"] for row in rows):
        hollow = Line2D([], [], color=INK, linestyle="", marker="o", markerfacecolor=PAPER, label="oversubscribed")
        handles.append(hollow)
    return handles


def _kind_handles(labels: dict[str, str]) -> list["Artist"]:
    """Explain in grey the kinds of lines that are drawn, each under its label."""
    from matplotlib.lines import Line2D

    looks = {
        "measured": Line2D([], [], color=MUTED, linewidth=3.5, alpha=0.35),
        "replayed": Line2D([], [], color=MUTED, linestyle="--", marker="_", markersize=8),
        "bound": Line2D([], [], color=MUTED, linestyle=":"),
        "one device": Line2D([], [], color=MUTED, linestyle="-.", linewidth=1.2),
    }
    for kind, label in labels.items():
        looks[kind].set_label(label)
    return [looks[kind] for kind in labels]
