"""The timeline of a point: one measured step beside the simulated replay of that very step, and both as compact text.

A page draws it in the browser, so that it can be zoomed; what is sent there are the rows once, and times as whole
numbers. `packed` gives a point's timeline as base64 of zlib of JSON, which cannot be mistaken for markup.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipebench.metrics import bubble_fraction
from pipebench.record import RunResult
from pipebench.render import chunks_of, num_chunks_of, shade
from pipebench.report.cells import fraction, milliseconds
from pipebench.rows import median_step, replay
from pipebench.schedule.action import Op
from pipebench.trace import Trace

MOST_BYTES = 1_000_000
"""What all timelines of a page may take; the largest are left out first."""

_FINEST = 1e-7
"""Share of the makespan that a time is rounded to, at least."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step and its replay: the same rows with the costs of that step, each rank on a device of its own.

    `kind` says how the step came about: measured, or itself simulated.
    """

    kind: str
    step: Trace
    replayed: Trace

    @property
    def alternative(self) -> str:
        """Return in text what the picture shows first."""
        return (
            f"Timeline of {self.step.num_ranks} ranks. {self.kind.capitalize()} step: {_numbers(self.step)}. "
            f"Replayed, each rank on a device of its own: {_numbers(self.replayed)}."
        )


def timeline_of(result: RunResult) -> Timeline | None:
    """Return the median step and its replay, None where no spans were recorded; raise ValueError for senseless ones."""
    step = median_step(result)
    if step is None:
        return None
    if not (np.isfinite(step.start_s).all() and np.isfinite(step.end_s).all() and step.makespan_s > 0):
        raise ValueError("spans: expected finite times and a step that takes some")
    return Timeline("simulated" if result.status == "simulated" else "measured", step, replay(result, step))


def packed(timelines: Mapping[str, Timeline]) -> dict[str, str]:
    """Return the text of each timeline by its key; the largest are missing where all exceed `MOST_BYTES`."""
    texts: dict[str, str] = {}
    left = MOST_BYTES
    for key in sorted(timelines, key=lambda key: len(timelines[key].step.start_s)):
        text = base64.b64encode(zlib.compress(json.dumps(compact(timelines[key]), separators=(",", ":")).encode(), 9))
        left -= len(text)
        if left < 0:
            break
        texts[key] = text.decode()
    return texts


def compact(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as lists: `ranks` with ops, stages and micro-batches (-1: all of them) of each rank's row.

    `step` and `replayed` hold for each rank the pause before and the length of each action, in units of `unit_s`.
    `chunks` is which of its rank's stages each stage is; `colors` are an op's, one a chunk.
    """
    rows, step = timeline.step.rows, timeline.step
    longest_s = max(step.makespan_s, timeline.replayed.makespan_s)
    unit_s = 10.0 ** math.floor(math.log10(longest_s * _FINEST))
    chunks, num_chunks = chunks_of(step), num_chunks_of(step)
    ops = {action.op for row in rows for action in row}
    return {
        "unit_s": unit_s,
        "kind": timeline.kind,
        "heads": {"step": _numbers(step), "replayed": _numbers(timeline.replayed)},
        "chunks": [chunks[stage] for stage in sorted(chunks)],
        "colors": {op: [_hexadecimal(op, chunk, num_chunks) for chunk in range(num_chunks)] for op in Op if op in ops},
        "ranks": [
            {
                "ops": "".join(action.op for action in row),
                "stages": [action.stage for action in row],
                "micro_batches": [action.micro_batch for action in row],
            }
            for row in rows
        ],
        "step": _pauses_and_lengths(step, unit_s),
        "replayed": _pauses_and_lengths(timeline.replayed, unit_s),
    }


def _pauses_and_lengths(trace: Trace, unit_s: float) -> list[list[int]]:
    """Return differences of rounded times, so that roundings do not add up."""
    times = np.rint(np.stack([trace.start_s, trace.end_s], axis=1) / unit_s).astype(np.int64)
    ends = np.cumsum([len(row) for row in trace.rows])
    return [np.diff(rank.ravel(), prepend=0).tolist() for rank in np.split(times, ends[:-1])]


def _hexadecimal(op: Op, chunk: int, num_chunks: int) -> str:
    return f"#{bytes(shade(op, chunk, num_chunks)).hex()}"


def _numbers(trace: Trace) -> str:
    return f"makespan {milliseconds(trace.makespan_s)} ms, bubble {fraction(bubble_fraction(trace))}"
