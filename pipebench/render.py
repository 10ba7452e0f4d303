"""Draw a trace: as text, or as Chrome's trace format, which Perfetto opens."""

from typing import Any

from pipebench.schedule.action import Op
from pipebench.trace import Trace


def ascii_picture(trace: Trace, unit_s: float = 1.0) -> str:
    """Return one line per rank, each action as its op and micro-batch repeated over its columns, idle as dots.

    Columns are `unit_s` seconds wide and hold two characters, so micro-batches above 9 keep their last digit.
    """
    width = round(trace.makespan_s / unit_s)
    lines = [["··"] * width for _ in range(trace.num_ranks)]
    for span in trace.spans:
        digit = "" if span.action.op == Op.OPTIMIZER else str(span.action.micro_batch % 10)
        cell = f"{span.action.op}{digit}".ljust(2, span.action.op)
        for column in range(round(span.start_s / unit_s), round(span.end_s / unit_s)):
            lines[span.rank][column] = cell
    return "\n".join(f"rank {rank} |{''.join(cells)}|" for rank, cells in enumerate(lines))


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
