"""Training loss against training step: a pipeline must not change what is trained, so lines should coincide.

Points that train the same share a panel. In it each further number of stages (or of micro-batches, where all have as
many stages) gets a thinner line, so that those below it show. Evaluations are hollow marks on a dotted line.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipebench.grid import K, M, values, varying
from pipebench.report.advice import WHAT_IS_TRAINED
from pipebench.report.content import Point
from pipebench.report.figures.canvas import (
    MOST_PANELS,
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
from pipebench.rows import COMPARABLE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "Training loss"
_THINNEST, _WIDER, _MOST_WIDER = 1.4, 2.2, 8.0
"""Width of the line on top, how much wider each one below it is, and how much the lowest of many, in points."""


def loss_picture(points: Sequence[Point]) -> Picture | None:
    """Draw the loss of every training step, warm-up included; None when nothing was trained."""
    trained = [point for point in points if point.row["status"] in COMPARABLE and point.losses]
    if not trained:
        return None
    sets = _trained_alike(trained)
    shown = sets[:MOST_PANELS]
    rows = [point.row for point in trained]
    told_apart = K if len(values(rows, K)) > 1 else M
    counts = values(rows, told_apart)

    def fill(figure: "Figure") -> None:
        found = panels(figure, [title for title, _ in shown], "loss", share_y=False)
        for axes, (_, members) in zip(found, shown, strict=True):
            _curves(axes, members, told_apart, counts)
        legend(figure, _handles("K" if told_apart == K else "M", counts))

    rest = len(sets) - len(shown)
    subtitle = sentences(
        in_common(rows, [told_apart]),
        _apart(trained) if len(sets) == 1 else "",
        f"{rest} more are not drawn" if rest else "",
    )
    figure = drawn(*panel_size(len(shown)), _TITLE, subtitle, fill)
    facts = [f"{sentences(title, _course(members), _apart(members))}." for title, members in sets]
    return Picture("loss", _TITLE, told("Training loss against training step.", facts), figure)


def _trained_alike(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Return the points by what they train, each under a title that names what differs in that: `seed=1`."""
    sets: dict[str, list[Point]] = {}
    for point in points:
        sets.setdefault(point.trains, []).append(point)
    names = [name for name in varying([point.row for point in points]) if name.partition(".")[0] in WHAT_IS_TRAINED]
    return [
        (", ".join(f"{name}={members[0].row[name]}" for name in names) if len(sets) > 1 else "", members)
        for members in sets.values()
    ]


def _curves(axes: "Axes", points: Sequence[Point], told_apart: str, counts: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    for point in sorted(points, key=lambda point: int(point.row[told_apart])):
        number = counts.index(point.row[told_apart])
        colour, marker = look_of(number)
        width = _THINNEST + (len(counts) - 1 - number) * min(_WIDER, _MOST_WIDER / len(counts))
        steps = range(point.first_step + 1, point.first_step + len(point.losses) + 1)
        axes.plot(steps, point.losses, color=colour, linewidth=width, marker=marker, markevery=[-1], markersize=5)
        if point.evaluations:
            found = [(each.step, each.loss) for each in point.evaluations]
            axes.plot(*zip(*found, strict=True), color=colour, linestyle=":", marker=marker, markerfacecolor=PAPER)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step, warm-up included")


def _handles(letter: str, counts: Sequence[int]) -> list["Artist"]:
    from matplotlib.lines import Line2D

    looks = [look_of(number) for number in range(len(counts))]
    return [
        Line2D([], [], color=colour, linewidth=3, marker=marker, markersize=6, label=f"{letter}={count}")
        for count, (colour, marker) in zip(counts, looks, strict=True)
    ]


def _course(points: Sequence[Point]) -> str:
    """Say where the losses begin and where they are at the last step that all of the points trained."""
    last = min(len(point.losses) for point in points)
    first, then = (_between([point.losses[step] for point in points]) for step in (0, last - 1))
    before = points[0].first_step
    many = f"{len(points)} points" if len(points) > 1 else "one point"
    evaluated = [point.evaluations[-1].loss for point in points if point.evaluations]
    return (
        f"{many}, {first} at step {before + 1}"
        + (f", {then} at step {before + last}" if last > 1 else "")
        + (f", {_between(evaluated)} in the last evaluation" if evaluated else "")
    )


def _between(losses: Sequence[float]) -> str:
    low, high = f"{min(losses):.4g}", f"{max(losses):.4g}"
    return low if low == high else f"{low} to {high}"


def _apart(points: Sequence[Point]) -> str:
    """Say how far apart the losses are at the last step that all of the points trained, empty for a single one.

    Micro-batches of another size draw other dropout masks, so points of equal M are told of apart from the others.
    """
    if len(points) == 1:
        return ""
    last = min(len(point.losses) for point in points)
    by_micro: dict[int, list[float]] = {}
    for point in points:
        by_micro.setdefault(point.row[M], []).append(point.losses[last - 1])
    everyone = [loss for losses in by_micro.values() for loss in losses]
    text = f"largest difference at step {points[0].first_step + last}: {_spread(everyone)}"
    if 1 < len(by_micro) < len(points):
        text += f", at equal M {max(map(_spread, by_micro.values()), key=float)}"
    return text


def _spread(losses: Sequence[float]) -> str:
    apart = max(losses) - min(losses)
    return f"{apart:.1e}" if apart else "0"
