"""Pictures of a sweep: bubble and throughput against micro-batches, one line per K; and schedules side by side.

Only points whose gradients are right (or were not checked) are drawn. Figures are made without pyplot, so no global
state is touched; seaborn lends its palette and style.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pipebench.report.cells import MIB
from pipebench.report.content import Content
from pipebench.report.grid import K, M, axes_of, groups, values, varying
from pipebench.report.schedules import compared, schedule_name
from pipebench.rows import COMPARABLE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6
"""More panels than this cannot be read in one picture; the tables have the rest."""

_COLUMNS = 3
_DPI = 200
_GREY = "#555555"

Colour = tuple[float, float, float]
Draw = Callable[["Axes", Sequence[Row], Colour], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure under its file's stem; `alternative` says in text what it shows."""

    name: str
    title: str
    alternative: str
    figure: "Figure"


def rendered(picture: Picture, suffix: str) -> bytes:
    """Return the picture as png, svg or pdf; the same picture gives the same bytes."""
    from matplotlib import rc_context

    dates: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": picture.name, "svg.fonttype": "none"}):
        picture.figure.savefig(content, format=suffix, metadata=dates.get(suffix))
    return content.getvalue()


def themed_svg(picture: Picture) -> str:
    """Return the picture to stand in a page: named, scaled by the page, its greys the page's `--ink`, `--muted`, ..."""
    svg = rendered(picture, "svg").decode()
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg ") :], flags=re.DOTALL)
    name = picture.name
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None, f"{name}: an SVG of matplotlib has a viewBox"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="figure" {box[0]} '
        f'role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(picture.title)}</title>'
        f'<desc id="{name}-desc">{escape(picture.alternative)}</desc>'
    )
    for colour, theme in _THEME.items():
        body = body.replace(colour, f"var(--{theme})")
    body = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1sans-serif", body)
    return opening + body[body.index(">") + 1 :]


_THEME = {"#000000": "ink", "#262626": "ink", "#555555": "muted", "#e6e6e6": "rule", "#ffffff": "paper"}


def pictures_of(content: Content) -> list[Picture]:
    """Return every picture for which something was measured."""
    rows = content.rows
    drawn = [picture(rows) for picture in (schedules_picture, bubble_picture, throughput_picture)]
    return [picture for picture in drawn if picture is not None]


def bubble_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw measured, replayed and bound bubble fraction; None when no step was traced."""
    drawn = [row for row in rows if row["status"] in COMPARABLE and row["bubble_fraction"] is not None]
    labels = [_measured_or_simulated(drawn), "replayed", "bound"]
    title = "Bubble fraction: how much of K devices stood idle"
    figure = _figure(drawn, title, "idle / makespan", labels, _bubble)
    return Picture("bubble", title, "bubble against micro-batches", figure) if figure else None


def throughput_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw samples per second with 95 % intervals; None when nothing was measured."""
    drawn = [row for row in rows if row["status"] in COMPARABLE]
    labels = ["median, 95 % interval" if _measured_or_simulated(drawn) == "measured" else "simulated"]
    title = "Throughput: training samples per second"
    figure = _figure(drawn, title, "samples / s", labels, _throughput)
    return Picture("throughput", title, "throughput against micro-batches", figure) if figure else None


def _measured_or_simulated(rows: Sequence[Row]) -> str:
    simulated = [row["status"] == "simulated" for row in rows]
    return "simulated" if rows and all(simulated) else "measured or simulated" if any(simulated) else "measured"


def schedules_picture(rows: Sequence[Row]) -> Picture | None:
    """Draw step time and peak memory by schedule, fastest first; None when there is no such choice."""
    sets = [ordered for ordered in compared(rows).values() if len(ordered) > 1]
    if not sets:
        return None
    import seaborn
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sets = sets[:MOST_PANELS]
    heights = [1.1 + 0.3 * len(ordered) for ordered in sets]
    palette = seaborn.color_palette("colorblind")
    with rc_context({"text.parse_math": False}), seaborn.axes_style("ticks", {"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.5, sum(heights) + 0.6), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(sets), 2, squeeze=False, sharey="row", height_ratios=heights)
        for (time, memory), (title, ordered) in zip(grid, compared(rows).items(), strict=False):
            _bars(time, [row["step_s"] * 1e3 for row in ordered], palette[0], "{:.4g}")
            low, high = ([abs(row["step_s"] - row[name]) * 1e3 for row in ordered] for name in _INTERVAL)
            times = [row["step_s"] * 1e3 for row in ordered]
            time.errorbar(times, range(len(ordered)), xerr=[low, high], fmt="none", color="black", elinewidth=1.2)
            _bars(memory, [row["peak_memory_bytes"] / MIB for row in ordered], palette[1], "{:.3g}")
            time.set_yticks(range(len(ordered)), labels=[schedule_name(row) for row in ordered])
            time.invert_yaxis()
            time.set_title(title, fontsize=9.5, loc="left")
            time.set_xlabel("step, ms (95 % interval)")
            memory.set_xlabel("peak memory of the largest rank, MiB")
        figure.suptitle("Schedules, fastest first", x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.draw_without_rendering()
    alternative = "step time and peak memory of each schedule, fastest first; the table has the numbers"
    return Picture("schedules", "Schedules, fastest first", alternative, figure)


_INTERVAL = ("step_ci_low_s", "step_ci_high_s")


def _bars(axes: "Axes", lengths: Sequence[float], colour: Colour, text: str) -> None:
    """Draw a bar per schedule with its number at the root, where no interval crosses it."""
    import seaborn

    axes.barh(range(len(lengths)), lengths, color=colour, alpha=0.75)
    for place, length in enumerate(lengths):
        axes.annotate(text.format(length), (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    seaborn.despine(ax=axes)


def _bubble(axes: "Axes", rows: Sequence[Row], colour: Colour) -> None:
    micro = [row[M] for row in rows]
    _measured(axes, rows, "bubble_fraction", colour)
    replayed = [row["bubble_replayed"] for row in rows]
    bound = [math.nan if row["bubble_bound"] is None else row["bubble_bound"] for row in rows]
    axes.plot(micro, replayed, "--", color=colour, linewidth=1.5, marker="_", markersize=8)
    axes.plot(micro, bound, ":", color=colour, linewidth=1.2, marker=".", markersize=4)


def _throughput(axes: "Axes", rows: Sequence[Row], colour: Colour) -> None:
    speed = [row["samples_per_s"] for row in rows]
    low = [row["samples_per_s"] * (1 - row["step_s"] / row["step_ci_high_s"]) for row in rows]
    high = [row["samples_per_s"] * (row["step_s"] / row["step_ci_low_s"] - 1) for row in rows]
    _measured(axes, rows, "samples_per_s", colour)
    axes.errorbar(
        [row[M] for row in rows], speed, yerr=[low, high], fmt="none", color=colour, elinewidth=1.3, capsize=4
    )


def _measured(axes: "Axes", rows: Sequence[Row], column: str, colour: Colour) -> None:
    """Draw a broad, pale line, under which replayed and bound stay visible where all three agree.

    Its points are hollow where stages shared cores, since K devices would have done otherwise.
    """
    axes.plot([row[M] for row in rows], [row[column] for row in rows], color=colour, linewidth=3.5, alpha=0.35)
    for row in rows:
        face = "white" if row["oversubscribed"] else colour
        axes.plot([row[M]], [row[column]], "o", color=colour, markerfacecolor=face, markersize=6, zorder=3)


def _figure(rows: Sequence[Row], title: str, unit: str, labels: Sequence[str], draw: Draw) -> "Figure | None":
    if not rows or (len(values(rows, M)) == 1 and compared(rows)):  # a line through one point says nothing
        return None
    import seaborn
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = dict(list(groups(rows).items())[:MOST_PANELS])
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    stages = values(rows, K)
    palette = dict(zip(stages, seaborn.color_palette("colorblind", len(stages)), strict=True))
    with rc_context({"text.parse_math": False}), seaborn.axes_style("ticks", {"font.family": "DejaVu Sans"}):
        size = (3.4 * columns + 2.6 if columns > 1 else 7.2, 3.2 * lines + 0.9)
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(lines, columns, squeeze=False, sharey=_one_scale(rows))
        for axes, (name, members) in zip(grid.flat, panels.items(), strict=False):
            _panel(axes, name, members, palette, draw)
            _micro_axis(axes, values(rows, M))
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        _from_zero(figure.axes)
        for axes in grid[:, 0]:
            axes.set_ylabel(unit)
        figure.suptitle(f"{title}\n\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
        subtitle = _subtitle(rows, len(panels))
        figure.text(0.01, 1 - 0.42 / size[1], subtitle, va="center", fontsize=8.5, color=_GREY)
        _legend(figure, palette, labels, any(row["oversubscribed"] for row in rows))
        figure.draw_without_rendering()
    return figure


def _panel(axes: "Axes", name: str, rows: Sequence[Row], palette: dict[int, Colour], draw: Draw) -> None:
    import seaborn

    for stages in values(rows, K):
        draw(axes, sorted((row for row in rows if row[K] == stages), key=lambda row: row[M]), palette[stages])
    axes.set_title(name, fontsize=9.5, loc="left")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    seaborn.despine(ax=axes)


def _micro_axis(axes: "Axes", micro: Sequence[int]) -> None:
    """Give every panel the same axis, with a tick at each M that was run."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(micro[0] / 1.25, micro[-1] * 1.25)
    axes.set_xticks(micro, labels=[str(m) for m in micro])
    axes.minorticks_off()
    axes.set_xlabel("micro-batches M")


def _from_zero(panels: Sequence["Axes"]) -> None:
    """Start the vertical axes at 0; after all are drawn, since panels that share one stretch it."""
    tops = [axes.get_ylim()[1] for axes in panels]
    for axes, top in zip(panels, tops, strict=True):
        axes.set_ylim(0, 1.04 * top)


def _one_scale(rows: Sequence[Row]) -> bool:
    """Panels share the vertical axis unless they show different models or batches."""
    return not any(name == "batch" or name.startswith("model") for name in varying(rows))


def _subtitle(rows: Sequence[Row], num_panels: int) -> str:
    """Say what all points have in common, and what was left out."""
    first = rows[0]
    same = [name for name in axes_of(rows) if name not in (K, M, "replicas") and name not in varying(rows)]
    text = ", ".join(f"{name}={first[name]}" for name in same)
    left_out = len(groups(rows)) - num_panels
    return f"{text}; {left_out} more combinations in the tables" if left_out > 0 else text


def _legend(figure: "Figure", palette: dict[int, Colour], labels: Sequence[str], any_hollow: bool) -> None:
    """Explain the colours by K, and in grey the lines: measured first, then replayed and bound where drawn."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=3, label=f"K={stages}") for stages, colour in palette.items()]
    looks = [
        Line2D([], [], color="#c4c4c4", linewidth=3.5, marker="o", markersize=5, mfc=_GREY, mec=_GREY),
        Line2D([], [], color=_GREY, linestyle="--", marker="_", markersize=8),
        Line2D([], [], color=_GREY, linestyle=":", marker=".", markersize=4),
    ]
    for handle, label in zip(looks, labels, strict=False):
        handle.set_label(label)
        handles.append(handle)
    if any_hollow:
        handles.append(Line2D([], [], color=_GREY, linestyle="", marker="o", mfc="white", label="oversubscribed"))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
