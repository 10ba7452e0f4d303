"""Memory of the largest rank: measured activations beside the memory model's, and all else on top.

Points that differ in their recompute setting alone stand together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K, M, varying
from pipebench.report.cells import MIB, mebibytes
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
    MUTED,
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
from pipebench.schedule.builders import Recompute

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "Peak memory of the largest rank"
LOOKS = {
    Recompute.NEVER: (PALETTE[0], ""),
    Recompute.EXCEPT_LAST: (PALETTE[1], "///"),
    Recompute.ALWAYS: (PALETTE[2], "xxx"),
    Recompute.LAYER: (PALETTE[3], "..."),
    Recompute.SELECTIVE: (PALETTE[4], "\\\\\\"),
    Recompute.BUDGET: (PALETTE[6], "+++"),
}
"""Colour and hatch of activations by recompute setting."""


def memory_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw activations, the model's prediction of them, and the whole peak in MiB; None when nothing was measured."""
    known = [row for row in rows if row["status"] in COMPARABLE and row["peak_memory_bytes"] is not None]
    if not known:
        return None
    found = clusters(fastest(known), ("recompute",) if "recompute" in varying(known) else (K, M))
    shown = [row for cluster in found for row in cluster]

    def fill(figure: "Figure") -> None:
        places = bar_places(figure, found, [bar_label(row, known) for row in shown], "MiB")
        for (axes, place), row in zip(places, shown, strict=True):
            _bar(axes, place, row)
        room_for_numbers(places[0][0], 0.0, max(_end_mib(row) for row in shown))
        legend(figure, _handles(shown))

    subtitle = sentences(in_common(shown), marks_explained(shown), left_out(known, shown))
    figure = drawn(*frame_size(found), _TITLE, subtitle, fill)
    opening = (
        "Peak memory of the largest rank of each point in MiB, its activations, and the memory model's prediction."
    )
    return Picture("memory", _TITLE, told(opening, [_in_words(row, rows) for row in shown]), figure)


def _end_mib(row: Row) -> float:
    return float(max(row["peak_memory_bytes"], row["activations_predicted_bytes"] or 0)) / MIB


def _bar(axes: "Axes", place: float, row: Row) -> None:
    activations_mib, peak_mib = row["activations_bytes"] / MIB, row["peak_memory_bytes"] / MIB
    colour, hatch = LOOKS[Recompute(row["recompute"])]
    axes.barh(place, activations_mib, BAR_HEIGHT, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0)
    rest_mib = peak_mib - activations_mib
    axes.barh(place, rest_mib, BAR_HEIGHT, activations_mib, color=PAPER, edgecolor=MUTED, linewidth=0.8)
    if row["activations_predicted_bytes"] is not None:
        predicted_mib = row["activations_predicted_bytes"] / MIB
        axes.plot([predicted_mib], [place], "D", color=INK, markerfacecolor=PAPER, markersize=5)
    beside(axes, place, _end_mib(row), mebibytes(row["peak_memory_bytes"]))


def _handles(rows: Sequence[Row]) -> list["Artist"]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    settings = [setting for setting in Recompute if setting.value in {row["recompute"] for row in rows}]
    handles: list[Artist] = []
    for setting in settings:
        colour, hatch = LOOKS[setting]
        label = "activations" + (f",\nrecompute={setting.value}" if len(settings) > 1 else "")
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=PAPER, label=label))
    handles.append(
        Patch(facecolor=PAPER, edgecolor=MUTED, linewidth=0.8, label="parameters, gradients,\noptimizer, transfers")
    )
    if any(row["activations_predicted_bytes"] is not None for row in rows):
        diamond = Line2D([], [], linestyle="", marker="D", color=INK, markerfacecolor=PAPER, markersize=5)
        diamond.set_label("activations predicted\nby the memory model")
        handles.append(diamond)
    return handles


def _in_words(row: Row, rows: Sequence[Row]) -> str:
    predicted = row["activations_predicted_bytes"]
    against = "" if predicted is None else f" ({mebibytes(predicted)} predicted)"
    return (
        f"{point_name(row, rows)}: peak {mebibytes(row['peak_memory_bytes'])}, "
        f"of it activations {mebibytes(row['activations_bytes'])}{against}."
    )
