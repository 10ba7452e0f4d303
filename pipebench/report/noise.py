"""The noise floor of a sweep: how far the point that was measured twice lies from itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.metrics import Ratio, noise_floor, ratio_of_medians
from pipebench.record import one_line_errors, step_groups
from pipebench.report.cells import digits
from pipebench.report.sweep import Sweep
from pipebench.report.tables import point_name
from pipebench.rows import COMPARABLE, Row


@dataclass(frozen=True, slots=True)
class Noise:
    """The A/A pair's ratio of step times, second over first; `floor` is a ratio of at least 1."""

    ratio: Ratio
    floor: float


def noise_of(sweep: Sweep) -> Noise | None:
    """Return the sweep's noise, None where no point has two measurements that may be compared."""
    first = sweep.results.get(sweep.again.key) if sweep.again else None
    if sweep.again is None or first is None or not {first.status, sweep.again.status} <= set(COMPARABLE):
        return None
    with one_line_errors(first.key):
        ratio = ratio_of_medians(step_groups(sweep.again), step_groups(first))
        return Noise(ratio, noise_floor(ratio))


def floor_of(sweep: Sweep) -> float:
    """Return the noise floor, 1 where none is known."""
    noise = noise_of(sweep)
    return noise.floor if noise else 1.0


def in_words(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Say in one line what was measured twice and which differences mean nothing."""
    if sweep.again is None:
        return "Not measured."
    [row] = [row for row in rows if row["key"] == sweep.again.key]
    twice = f"{point_name(row, rows)} measured twice"
    noise = noise_of(sweep)
    if noise is None:
        pair = [sweep.results.get(sweep.again.key), sweep.again]
        why = "; ".join(f"{r.status}: {r.message}" for r in pair if r is not None and r.status not in COMPARABLE)
        return f"Not known: {twice}, {why or 'the first time without a result'}."
    ratio = noise.ratio
    interval = f"ratio {ratio.value:.3f} (95 %: {ratio.low:.3f} to {ratio.high:.3f})"
    return f"{twice}: {interval}; differences below {percent(noise.floor)} mean nothing here."


def percent(floor: float) -> str:
    """Return a floor such as 1.03 as `3.0 %`."""
    return f"{digits((floor - 1) * 100, 2)} %"
