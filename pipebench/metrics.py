"""Numbers read off traces and samples. Every definition that a table prints has its home here."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pipebench.schedule.action import Action, Op
from pipebench.trace import Trace


def bubble_fraction(trace: Trace) -> float:
    """Return idle / makespan: 1 - busy / (ranks x makespan)."""
    busy_s = sum(span.duration_s for span in trace.spans)
    return 1.0 - busy_s / (trace.num_ranks * trace.makespan_s)


def action_costs(traces: Sequence[Trace]) -> dict[tuple[int, Op], float]:
    """Return what one action of each (stage, op) costs a core of its own, in seconds.

    The time for which a rank was ready but had no core is taken out, so the number stands even where stages
    outnumber cores. Mean over a step's micro-batches (sums stay true), median over steps (outliers do not
    count).
    """
    steps: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for trace in traces:
        step: dict[tuple[int, Op], list[float]] = defaultdict(list)
        for span in trace.spans:
            step[span.action.stage, span.action.op].append(span.duration_s - span.delay_s)
        for kind, costs in step.items():
            steps[kind].append(sum(costs) / len(costs))
    return {kind: float(np.median(costs)) for kind, costs in steps.items()}


def stage_times(costs: dict[tuple[int, Op], float], actions: Sequence[Action]) -> list[float]:
    """Return each stage's seconds of pipeline work in one step, the optimizer not included."""
    totals: dict[int, float] = defaultdict(float)
    for action in actions:
        if action.op != Op.OPTIMIZER:
            totals[action.stage] += costs[action.stage, action.op]
    return [totals[stage] for stage in sorted(totals)]


def imbalance(stage_times_s: Sequence[float]) -> float:
    """Return the slowest stage over the mean stage; 1 is perfect balance."""
    return max(stage_times_s) / (sum(stage_times_s) / len(stage_times_s))


def median_interval(
    groups: Sequence[Sequence[float]], confidence: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Return a percentile-bootstrap interval of the median over all samples.

    `groups` holds one list of samples per fresh worker group; groups are drawn first, then samples inside
    them, so that variation between groups widens the interval as it should.
    """
    random = np.random.default_rng(0)
    arrays = [np.asarray(group, dtype=float) for group in groups if len(group)]
    medians = np.empty(draws)
    for draw in range(draws):
        chosen = random.integers(0, len(arrays), len(arrays))
        medians[draw] = np.median(
            np.concatenate([random.choice(arrays[index], len(arrays[index])) for index in chosen])
        )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)
