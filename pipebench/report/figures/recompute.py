"""What recompute saves and costs: peak memory against step time, and activations against micro-batches.

One point for each setting and M; the picture stands only where there are several settings. GPipe's own curve,
O(N + (L/K)(N/M)) for N samples of a mini-batch and L layers, shows what its recompute would keep.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K, M, values, varying
from pipebench.report.cells import MIB, mebibytes, milliseconds
from pipebench.report.figures.canvas import (
    INK,
    MARKERS,
    MUTED,
    PALETTE,
    PAPER,
    RULE,
    Picture,
    drawn,
    in_common,
    legend,
    sentences,
    told,
)
from pipebench.report.figures.memory import LOOKS
from pipebench.rows import COMPARABLE, Row
from pipebench.schedule.builders import Recompute

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "What recompute saves and costs"
_CURVE = "GPipe: O(N + (L/K)(N/M))"
_MOST_GROUPS = 3
"""Each has a line of two panels."""

_SETTINGS = ("recompute", "recompute_budget")

_LABEL_WIDTH, _LABEL_HEIGHT = 36.0, 14.0
"""Room of a label in the picture's own units."""


def recompute_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw memory against time, and activations against M; None where points do not differ in how they recompute."""
    known = [row for row in rows if row["status"] in COMPARABLE and row["peak_memory_bytes"] is not None]
    found = {title: own for title, own in _groups(known).items() if len({_setting(row) for row in own}) > 1}
    if not found:
        return None
    shown = dict(list(found.items())[:_MOST_GROUPS])
    drawn_rows = [row for own in shown.values() for row in own]

    def fill(figure: "Figure") -> None:
        grid = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), (title, own) in zip(grid, shown.items(), strict=True):
            _panel(left, title, "step, median, ms", "peak memory of the largest rank, MiB")
            _panel(right, title, "micro-batches M", "its activations, MiB")
            _draw(left, right, own, _budgets(drawn_rows))
        legend(figure, _handles(drawn_rows))

    more = len(found) - len(shown)
    subtitle = sentences(in_common(drawn_rows, [M, *_SETTINGS]), f"{more} more in the tables" if more else "")
    figure = drawn(9.4, 3.3 * len(shown), _TITLE, subtitle, fill)
    opening = (
        "Peak memory of the largest rank in MiB against the median step in ms, by recompute setting and number of "
        "micro-batches; its activations beside what GPipe would keep by O(N + (L/K)(N/M))."
    )
    return Picture("recompute", _TITLE, told(opening, [_in_words(row, rows) for row in drawn_rows]), figure)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows that differ in M and in how they recompute alone, under what else says which they are."""
    names = [name for name in (K, *varying(rows)) if name not in _SETTINGS]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(", ".join(f"{name}={row[name]}" for name in names), []).append(row)
    return found


def _setting(row: Row) -> str:
    budget = row.get("recompute_budget")
    return str(row["recompute"]) if budget is None else f"{row['recompute']} {budget} MiB"


def _panel(axes: "Axes", title: str, across: str, up: str) -> None:
    import seaborn

    axes.set_title("\n".join(textwrap.wrap(title, 46)), fontsize=9.5, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(axis="both", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    seaborn.despine(ax=axes)


def _draw(left: "Axes", right: "Axes", rows: Sequence[Row], budgets: Sequence[float]) -> None:
    counts = values(rows, M)
    for own in _by_setting(rows).values():
        colour, marker = _look(own[0], budgets)
        at_s, at_m = [row["step_s"] * 1e3 for row in own], [row[M] for row in own]
        peaks, activations = ([row[f"{name}_bytes"] / MIB for row in own] for name in ("peak_memory", "activations"))
        for axes, across, up in ((left, at_s, peaks), (right, at_m, activations)):
            axes.plot(across, up, color=colour, linewidth=1.2, alpha=0.6)
            for row, x, y in zip(own, across, up, strict=True):
                face = PAPER if row["oversubscribed"] else colour
                axes.plot([x], [y], marker, color=colour, markerfacecolor=face, markersize=6, zorder=3)
    curve = dict[int, int]()
    for row in rows:  # cuts and the largest rank differ between settings, and so does GPipe's count of them
        if row["activations_gpipe_bytes"] is not None:
            curve[row[M]] = max(curve.get(row[M], 0), row["activations_gpipe_bytes"])
    right.plot(sorted(curve), [curve[m] / MIB for m in sorted(curve)], ":.", color=INK, linewidth=1.6)
    right.set_xscale("log", base=2)
    right.set_xticks(counts, labels=[str(count) for count in counts])
    right.minorticks_off()
    for axes in (left, right):
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    _label_counts(left, rows)


def _label_counts(axes: "Axes", rows: Sequence[Row]) -> None:
    """Write M beside the points, but not over another point's: those follow along the line."""
    taken = list[tuple[float, float]]()
    for row in sorted(rows, key=lambda row: (-row["peak_memory_bytes"], row["step_s"])):
        place = (row["step_s"] * 1e3, row["peak_memory_bytes"] / MIB)
        x, y = axes.transData.transform(place)
        if all(abs(x - other_x) > _LABEL_WIDTH or abs(y - other_y) > _LABEL_HEIGHT for other_x, other_y in taken):
            axes.annotate(f"M={row[M]}", place, (4, 4), textcoords="offset points", fontsize=7, color=MUTED)
            taken.append((x, y))


def _by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each setting in rising order of M; settings in the order in which they are defined."""
    order = [setting.value for setting in Recompute]
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (order.index(row["recompute"]), row.get("recompute_budget") or 0, row[M])):
        found.setdefault(_setting(row), []).append(row)
    return found


def _look(row: Row, budgets: Sequence[float]) -> tuple[str, str]:
    """Return colour and marker of a setting, the colour that the picture of memory gives it; budgets differ in both."""
    setting = Recompute(row["recompute"])
    number = budgets.index(row["recompute_budget"]) if row.get("recompute_budget") in budgets else 0
    colour = PALETTE[(PALETTE.index(LOOKS[setting][0]) + number) % len(PALETTE)]
    return colour, MARKERS[(list(Recompute).index(setting) + number) % len(MARKERS)]


def _budgets(rows: Sequence[Row]) -> list[float]:
    return sorted({row["recompute_budget"] for row in rows if row.get("recompute_budget") is not None})


def _handles(rows: Sequence[Row]) -> list["Artist"]:
    from matplotlib.lines import Line2D

    handles: list[Artist] = []
    for setting, own in _by_setting(rows).items():
        colour, marker = _look(own[0], _budgets(rows))
        handles.append(Line2D([], [], color=colour, linewidth=1.2, marker=marker, markersize=6, label=setting))
    if any(row["activations_gpipe_bytes"] is not None for row in rows):
        handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.6, label=_CURVE))
    if any(row["oversubscribed"] for row in rows):
        hollow = Line2D([], [], color=INK, linestyle="", marker="o", markerfacecolor=PAPER, label="oversubscribed")
        handles.append(hollow)
    return handles


def _in_words(row: Row, rows: Sequence[Row]) -> str:
    gpipe = row["activations_gpipe_bytes"]
    against = "" if gpipe is None else f" (GPipe {mebibytes(gpipe)})"
    where = ", ".join(f"{name}={row[name]}" for name in (K, *varying(rows)) if name not in _SETTINGS)
    return (
        f"{where}, M={row[M]}, {_setting(row)}: {milliseconds(row['step_s'])} ms, "
        f"peak {mebibytes(row['peak_memory_bytes'])}, activations {mebibytes(row['activations_bytes'])}{against}."
    )
