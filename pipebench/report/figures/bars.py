"""The frame of pictures with a horizontal bar for each point: where a bar goes, and what stands beside it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pipebench.grid import K, M, values, varying
from pipebench.report.cells import kind, marks
from pipebench.report.figures.canvas import RULE
from pipebench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 60
"""More bars than this cannot be read in one picture; the tables have the rest."""

BAR_HEIGHT = 0.72
_BARS_A_COLUMN = 30
_BAR_IN, _LEAST_IN = 0.27, 1.6
_GAP = 0.5
_MOST_LETTERS = 48


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return as many rows as a picture holds, in their order; of more, those with the shortest steps."""
    kept = sorted(range(len(rows)), key=lambda number: float(rows[number]["step_s"]))[:MOST_BARS]
    return [rows[number] for number in sorted(kept)]


def left_out(rows: Sequence[Row], shown: Sequence[Row]) -> str:
    """Say which rows a picture shows, empty where that is all."""
    return "" if len(shown) == len(rows) else f"the {len(shown)} fastest of {len(rows)} points, all in the tables"


def bar_label(row: Row, rows: Sequence[Row]) -> str:
    """Return what tells the row from the others, and its marks: `K=2 M=8 1f1b chunks=2 *`.

    A word says what it is a value of; a number does not. One stage a rank is what one expects.
    """
    names = [name for name in varying(rows) if row[name] is not None and (name, row[name]) != ("chunks", 1)]
    parts = [f"{letter}={row[axis]}" for letter, axis in (("K", K), ("M", M)) if len(values(rows, axis)) > 1]
    parts += [str(row[name]) if isinstance(row[name], str) else f"{name}={row[name]}" for name in names]
    label = shortened(" ".join(parts) or f"K={row[K]} M={row[M]}")
    return " ".join(filter(None, [label + kind(row), marks(row)]))


def shortened(text: str) -> str:
    """Return text that fits beside a bar: the middle of a long one, such as of a path, is left out."""
    if len(text) <= _MOST_LETTERS:
        return text
    half = _MOST_LETTERS // 2 - 1
    return f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[-half:]}"


def clusters(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """Return the rows by all that varies but `names`, to stand close together; one cluster if none has two rows."""
    others = [name for name in (K, M, *varying(rows)) if name not in names]
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row[name]) for name in others), []).append(row)
    return [list(rows)] if len(found) == len(rows) else list(found.values())


def frame_size(found: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """Return width and height in inches that the bars of these clusters need, a legend at their right."""
    columns = _columns(found)
    length = max(places[-1] for places in columns) + 1
    return 4.2 * len(columns) + 5.3, 0.75 + max(_LEAST_IN, _BAR_IN * length)


def bar_places(
    figure: "Figure", found: Sequence[Sequence[Row]], labels: Sequence[str], unit: str
) -> list[tuple["Axes", float]]:
    """Return where the bar of each row of these clusters goes, top down; long lists have two columns."""
    import seaborn

    columns = _columns(found)
    last = max(places[-1] for places in columns)
    around = max(0.0, _LEAST_IN / _BAR_IN - last - 1) / 2
    grid = figure.subplots(1, len(columns), squeeze=False, sharex=True)
    result: list[tuple[Axes, float]] = []
    for axes, places in zip(grid.flat, columns, strict=True):
        axes.set_yticks(places, labels=labels[len(result) : len(result) + len(places)])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(last + 0.6 + around, -0.6 - around)  # few bars are no thicker than many
        axes.set_xlabel(unit)
        axes.grid(axis="x", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        seaborn.despine(ax=axes, left=True)
        result += [(axes, place) for place in places]
    return result


def _columns(found: Sequence[Sequence[Row]]) -> list[list[float]]:
    """Return the vertical places of the bars of each column, which are as many in all but the last."""
    steps = [1 if number else 1 + _GAP for cluster in found for number in range(len(cluster))]
    num_columns = -(-len(steps) // _BARS_A_COLUMN)
    a_column = -(-len(steps) // num_columns)
    columns = []
    for first in range(0, len(steps), a_column):
        below_first = steps[first + 1 : first + a_column]
        columns.append(list(accumulate(below_first, initial=0.0)))
    return columns


def beside(axes: "Axes", place: float, end: float, text: str) -> None:
    """Write a number at the right of a bar that ends there."""
    axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center_baseline", fontsize=8.5)


def room_for_numbers(axes: "Axes", low: float, high: float) -> None:
    """Let the horizontal axis span the bars and what is written beside them."""
    axes.set_xlim(low * 1.08, high * 1.16 or 1.0)
