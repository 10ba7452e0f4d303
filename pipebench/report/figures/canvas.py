"""What all pictures share: their colours, their frame with a title and a line below it, and what they are.

Figures are made without pyplot, so no global state is touched; seaborn lends its style. Whatever a picture tells apart
by colour it tells apart by a marker, a hatch or a label too.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipebench.grid import K, M, axes_of, values, varying
from pipebench.report.cells import LEGEND, MARKS, marks
from pipebench.rows import Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#262626", "#555555", "#e6e6e6", "#ffffff"
"""Text and axes, what stands back, grid lines, and what is hollow: a page may put colours of its own in their place."""

PALETTE = ("#0173b2", "#c97b06", "#029e73", "#c46bb0", "#a9744a", "#d55e00", "#3f97d0", "#848b94")
"""Colours of data: seaborn's "colorblind", darkened where it needed that to reach a contrast of 3 on white paper.

Each has at least that on a dark page (#14171c) too.
"""

MARKERS = "os^DvPX"

MOST_PANELS = 6
"""More panels than this cannot be read in one picture; the tables have the rest."""

_DPI = 200
_PANELS_A_LINE = 3
_LETTERS_AN_INCH = 14
"""Of the line below the title; DejaVu Sans is a wide font."""


_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure under its file's stem; `alternative` says in text, with numbers, what it shows."""

    name: str
    title: str
    alternative: str
    figure: "Figure"


def drawn(width_in: float, height_in: float, title: str, subtitle: str, fill: Callable[["Figure"], None]) -> "Figure":
    """Return a figure with its title, a grey line below it and what `fill` draws; the height is that of the latter."""
    import seaborn
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = textwrap.wrap(subtitle, round(width_in * _LETTERS_AN_INCH))
    band_in = 0.42 + 0.16 * len(lines)
    total_in = height_in + band_in
    below_band = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - band_in / total_in))
    style = seaborn.axes_style("ticks", _STYLE)
    # Without text.parse_math a $ in a name is a $.
    with rc_context({"text.parse_math": False, "hatch.linewidth": 0.7, "font.size": 9.0}), style:
        figure = Figure(figsize=(width_in, total_in), dpi=_DPI, layout=below_band)
        FigureCanvasAgg(figure)
        figure.text(0.01, 1 - 0.1 / total_in, title, va="top", fontsize=12, fontweight="bold")
        figure.text(0.01, 1 - 0.34 / total_in, "\n".join(lines), va="top", fontsize=8.5, color=MUTED)
        fill(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # everything has its place: every format shows the same, and sooner
    return figure


def panel_size(num_panels: int) -> tuple[float, float]:
    """Return width and height in inches that so many panels need, a legend at their right."""
    columns = min(_PANELS_A_LINE, num_panels)
    return 3.4 * columns + 2.6 if columns > 1 else 7.2, 3.2 * -(-num_panels // columns)


def panels(figure: "Figure", titles: Sequence[str], unit: str, *, share_y: bool) -> list["Axes"]:
    """Return axes for each title, the vertical one named in the first of each line."""
    import seaborn

    columns = min(_PANELS_A_LINE, len(titles))
    grid = figure.subplots(-(-len(titles) // columns), columns, squeeze=False, sharey=share_y)
    found = list(grid.flat)
    for axes, title in zip(found, titles, strict=False):
        axes.set_title("\n".join(textwrap.wrap(title, 46)), fontsize=9.5, loc="left")
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        seaborn.despine(ax=axes)
    for axes in found[len(titles) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(unit)
    return found[: len(titles)]


def legend(figure: "Figure", handles: Sequence["Artist"]) -> None:
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)


def look_of(index: int) -> tuple[str, str]:
    """Return colour and marker of the line of that number; both differ, and no pair comes twice in 56."""
    return PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]


def in_common(rows: Sequence[Row], on_axes: Sequence[str] = ()) -> str:
    """Return what all rows share, but for what the picture has `on_axes`; a group of one rank is not worth a word."""
    varied = {*varying(rows), *(axis for axis in (K, M) if len(values(rows, axis)) > 1)}
    same = [name for name in axes_of(rows) if name not in {*on_axes, *varied, "replicas"}]
    return ", ".join(f"{name}={rows[0][name]}" for name in same)


def marks_explained(rows: Sequence[Row]) -> str:
    """Return what the marks mean that these rows bear, such as `* oversubscribed`."""
    used = "".join(marks(row) for row in rows)
    return ", ".join(f"{mark} {LEGEND[mark].partition(':')[0]}" for mark in MARKS if mark in used)


def sentences(*parts: str) -> str:
    """Return the parts that say something, with semicolons: the line below a title."""
    return "; ".join(part for part in parts if part)


_MOST_TOLD = 15


def told(opening: str, facts: Sequence[str]) -> str:
    """Return a text alternative: the opening and as many facts as somebody will listen to."""
    rest = len(facts) - _MOST_TOLD
    more = [f"And {rest} more."] if rest > 0 else []
    return " ".join([opening, *facts[:_MOST_TOLD], *more])
