"""Draw traces: as text, as SVG, or as Chrome's trace format, which Perfetto opens.

A rank's stages are told apart by their chunk: its first stage is chunk 0, its next chunk 1, and so on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from pipebench.metrics import bubble_fraction
from pipebench.schedule.action import OPS, Action, Op, Row, ops_of, stages_of
from pipebench.trace import Span, Trace


def natural_unit_s(trace: Trace, finest: int = 4) -> float:
    """Return the seconds of a column: the largest part of the shortest action that all times are multiples of.

    Parts are a whole, a half, and so on to 1/`finest`; where none fits, it is the shortest action's seconds.
    """
    durations = trace.duration_s[trace.duration_s > 0]
    if not len(durations):
        return 1.0
    shortest_s = float(durations.min())
    for parts in range(1, finest + 1):
        columns = np.concatenate([trace.start_s, trace.end_s]) * (parts / shortest_s)
        if np.abs(columns - np.round(columns)).max() < 1e-6 * max(1.0, columns.max()):
            return shortest_s / parts
    return shortest_s


def ascii_width(trace: Trace, unit_s: float | None = None) -> int:
    """Return the characters in a line of `ascii_picture`."""
    num_columns = round(trace.makespan_s / (unit_s or natural_unit_s(trace)))
    return len(_label(trace, 0)) + 2 + _characters(trace) * num_columns + 1


def ascii_picture(trace: Trace, unit_s: float | None = None) -> str:
    """Return one line per rank, each action as its op and micro-batch repeated over its columns, idle as dots.

    Columns are `unit_s` seconds wide (default: `natural_unit_s`) and hold two characters, so micro-batches above 9
    keep their last digit. The op of a rank's second stage is in lower case: `F3` then `f3`. Where a rank has more
    than two stages, all ops are capitals and a third character names the chunk: `F3a`, `F3b`, `F3c`.
    """
    unit_s = unit_s or natural_unit_s(trace)
    characters = _characters(trace)
    lines = [["·" * characters] * round(trace.makespan_s / unit_s) for _ in trace.rows]
    chunks = chunks_of(trace)
    for span in trace.spans:
        cell = _cell(span.action, chunks[span.action.stage], characters)
        for column in range(round(span.start_s / unit_s), round(span.end_s / unit_s)):
            lines[span.rank][column] = cell
    return "\n".join(f"{_label(trace, rank)} |{''.join(cells)}|" for rank, cells in enumerate(lines))


def _cell(action: Action, chunk: int, characters: int) -> str:
    op = action.op.lower() if chunk and characters == 2 else str(action.op)
    digit = op if action.op == Op.OPTIMIZER else str(action.micro_batch % 10)
    return f"{op}{digit}{chr(ord('a') + chunk % 26)}"[:characters]


def _label(trace: Trace, rank: int) -> str:
    return f"rank {rank:>{len(str(trace.num_ranks - 1))}}"


def _characters(trace: Trace) -> int:
    return 2 if num_chunks_of(trace) <= 2 else 3


def _stages(row: Row) -> list[int]:
    return [int(stage) for stage in np.unique(stages_of(row.codes))]


def chunks_of(trace: Trace) -> dict[int, int]:
    """Return which of its rank's stages each stage is, counted from 0."""
    return {stage: chunk for row in trace.rows for chunk, stage in enumerate(_stages(row))}


def num_chunks_of(trace: Trace) -> int:
    """Return the most stages that a rank has."""
    return max((len(_stages(row)) for row in trace.rows), default=0)


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return the trace in Chrome's JSON format, one process per rank, all on one clock, in microseconds."""
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(trace.num_ranks)
    ]
    spans = [
        {
            "ph": "X",
            "name": str(span.action),
            "cat": span.action.op.name.lower(),
            "pid": span.rank,
            "tid": 0,
            "ts": round(span.start_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
            "args": {
                "stage": span.action.stage,
                "micro_batch": span.action.micro_batch,
                "delay_us": round(span.delay_s * 1e6, 3),
            },
        }
        for span in trace.spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}


COLORS = {
    Op.FORWARD: (86, 180, 233),
    Op.BACKWARD: (230, 159, 0),
    Op.INPUT_GRADIENT: (213, 94, 0),
    Op.WEIGHT_GRADIENT: (0, 158, 115),
    Op.RECOMPUTE: (240, 228, 66),
    Op.OPTIMIZER: (204, 121, 167),
}
"""Colours that the colour-blind can tell apart (Okabe and Ito 2008), by op."""

WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRADIENT: "input gradient",
    Op.WEIGHT_GRADIENT: "weight gradient",
    Op.RECOMPUTE: "recompute",
    Op.OPTIMIZER: "optimizer",
}

_LIGHTEST = 0.62
"""Share of white in the colour of a rank's last stage."""

_WIDTH, _MARGIN, _GUTTER, _TITLE, _LANE, _GAP, _LEGEND = 1080.0, 14.0, 26.0, 28.0, 22.0, 3.0, 32.0
"""Lengths in user units: picture, its edge, between panels, a panel's title, a lane, between lanes, the legend."""

_LABEL_CHARACTER, _DIGIT, _SWATCH = 6.6, 0.6, 14.0
"""Width of a label's character; width of a digit over its font size; edge of a legend's square."""

_IDLE = "#e9e9ec"

_FONTS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

_STYLE = (
    ".heading{font-size:15px;font-weight:600}.note,.label{font-size:12px;fill:#4d4d4d}"
    f".lane{{fill:{_IDLE}}}"
    ".action{stroke:#fff}.number{text-anchor:middle}"
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Where a trace is drawn: its upper left corner, its width, and how long a second is."""

    heading: str
    trace: Trace
    left: float
    top: float
    width: float
    per_s: float

    @property
    def lanes_left(self) -> float:
        return self.left + len(_label(self.trace, 0)) * _LABEL_CHARACTER + 8

    def lane_top(self, rank: int) -> float:
        return self.top + _TITLE + rank * (_LANE + _GAP)


def svg_picture(panels: Sequence[tuple[str, Trace]], columns: int = 2) -> str:
    """Return a self-contained SVG: a titled panel for each trace, a lane for each rank, a box for each action.

    All panels share one scale, so that a longer step is a longer picture. A rank's later stages are lighter; what
    is idle shows the lane. Boxes name themselves when pointed at, and hold their micro-batch where it fits.
    """
    columns = max(1, min(columns, len(panels)))
    width = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GUTTER) / columns
    longest_s = max((trace.makespan_s for _, trace in panels), default=0.0) or 1.0
    labels = max((len(_label(trace, 0)) for _, trace in panels), default=0) * _LABEL_CHARACTER + 8
    top, drawn = _MARGIN, []
    for first in range(0, len(panels), columns):
        line = panels[first : first + columns]
        for column, (heading, trace) in enumerate(line):
            left = _MARGIN + column * (width + _GUTTER)
            drawn.append("".join(_draw(_Panel(heading, trace, left, top, width, (width - labels) / longest_s))))
        top += _TITLE + max(trace.num_ranks for _, trace in line) * (_LANE + _GAP) + 14
    traces = [trace for _, trace in panels]
    described = "; ".join(_description(heading, trace) for heading, trace in panels)
    return "\n".join([*_opening(top + _LEGEND, described), *drawn, "".join(_legend(traces, top)), "</svg>", ""])


def _opening(height: float, described: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" '
        f'height="{height:g}" font-family="{_FONTS}" fill="#1b1b1b" role="img" '
        'aria-labelledby="pipebench-title pipebench-desc">',
        '<title id="pipebench-title">Pipeline schedules: what each rank does over time</title>',
        f'<desc id="pipebench-desc">{escape(described)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH:g}" height="{height:g}" rx="8" fill="#fff"/>',
    ]


def _description(heading: str, trace: Trace) -> str:
    return f"{heading}: {trace.num_ranks} ranks, {_numbers(trace)}"


def _numbers(trace: Trace) -> str:
    bubble = f"{bubble_fraction(trace):.1%}" if trace.makespan_s else "none"
    return f"bubble {bubble}, makespan {trace.makespan_s:.4g} s"


def _draw(panel: _Panel) -> Iterator[str]:
    trace = panel.trace
    shortest = float(trace.duration_s.min(initial=np.inf, where=trace.duration_s > 0)) * panel.per_s
    yield f'<g stroke-width="{min(0.8, 0.12 * shortest):.2f}">'
    yield f'<text class="heading" x="{panel.left:.1f}" y="{panel.top + 16:.1f}">{escape(panel.heading)}</text>'
    right = panel.left + panel.width
    yield f'<text class="note" text-anchor="end" x="{right:.1f}" y="{panel.top + 16:.1f}">{_numbers(trace)}</text>'
    for rank in range(trace.num_ranks):
        top, length = panel.lane_top(rank), trace.makespan_s * panel.per_s
        label = _label(trace, rank)
        yield f'<text class="label" x="{panel.left:.1f}" y="{top + _LANE / 2 + 4:.1f}">{label}</text>'
        yield f'<rect class="lane" x="{panel.lanes_left:.2f}" y="{top:.1f}" width="{length:.2f}" height="{_LANE:g}"/>'
    chunks, num_chunks = chunks_of(trace), num_chunks_of(trace)
    for span in trace.spans:
        yield from _box(panel, span, shade(span.action.op, chunks[span.action.stage], num_chunks))
    yield "</g>"


def _box(panel: _Panel, span: Span, color: tuple[int, int, int]) -> Iterator[str]:
    left, width = panel.lanes_left + span.start_s * panel.per_s, span.duration_s * panel.per_s
    top = panel.lane_top(span.rank)
    yield (
        f'<rect class="action" x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{_LANE:g}" '
        f'fill="#{bytes(color).hex()}"><title>{_tooltip(span)}</title></rect>'
    )
    number = "" if span.action.op == Op.OPTIMIZER else str(span.action.micro_batch)
    size = min(12.0, (width - 2.5) / (_DIGIT * max(1, len(number))))
    if number and size >= 6:
        middle = left + width / 2
        baseline = top + _LANE / 2 + 0.36 * size
        yield f'<text class="number" x="{middle:.2f}" y="{baseline:.1f}" font-size="{size:.1f}">{number}</text>'


def _tooltip(span: Span) -> str:
    action = span.action
    what = "" if action.op == Op.OPTIMIZER else f", micro-batch {action.micro_batch}"
    times = f"{span.start_s:.4g} to {span.end_s:.4g} s"
    return f"{action}: {WORDS[action.op]} of stage {action.stage}{what}, on rank {span.rank}, {times}"


def shade(op: Op, chunk: int, num_chunks: int) -> tuple[int, int, int]:
    """Return the colour of an op in one of a rank's stages: the later the stage, the lighter."""
    white = _LIGHTEST * chunk / max(1, num_chunks - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in COLORS[op])
    return red, green, blue


def _legend(traces: Sequence[Trace], top: float) -> Iterator[str]:
    """Name the ops that occur, with a swatch for each shade, and what idle looks like."""
    left, most = _MARGIN, max(map(num_chunks_of, traces), default=1)
    for op in Op:
        num_chunks = max((num_chunks_of(trace) for trace in traces if _occurs(op, trace)), default=0)
        if num_chunks:
            shades = [shade(op, chunk, num_chunks) for chunk in range(num_chunks)]
            yield from _swatches(left, top, [f"#{bytes(shade).hex()}" for shade in shades])
            left += _SWATCH * num_chunks + 6
            yield _note(left, top, f"{op} {WORDS[op]}")
            left += (len(WORDS[op]) + 2) * _LABEL_CHARACTER + 14
    yield from _swatches(left, top, [_IDLE])
    yield _note(left + _SWATCH + 6, top, "idle" if most <= 1 else "idle; lighter: the later stages of a rank")
    yield _note(_WIDTH - _MARGIN, top, "time →", ' text-anchor="end"')


def _note(left: float, top: float, text: str, more: str = "") -> str:
    return f'<text class="note" x="{left:.1f}" y="{top + 11:.1f}"{more}>{text}</text>'


def _swatches(left: float, top: float, fills: Sequence[str]) -> Iterator[str]:
    for place, fill in enumerate(fills):
        x = left + _SWATCH * place
        yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{_SWATCH:g}" height="{_SWATCH:g}" fill="{fill}"/>'


def _occurs(op: Op, trace: Trace) -> bool:
    return any((ops_of(row.codes) == OPS.index(op)).any() for row in trace.rows)
