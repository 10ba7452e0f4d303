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


Costs = dict[tuple[int, Op], float]
"""Seconds of one action by (stage, op)."""


def step_costs(trace: Trace) -> Costs:
    """Return what one action of each (stage, op) cost a core of its own, mean over the step's micro-batches.

    The time for which a rank was ready but had no core is taken out, so the number stands even where stages
    outnumber cores.
    """
    step: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for span in trace.spans:
        step[span.action.stage, span.action.op].append(span.duration_s - span.delay_s)
    return {kind: sum(costs) / len(costs) for kind, costs in step.items()}


def action_costs(traces: Sequence[Trace]) -> Costs:
    """Return the median over steps of `step_costs`."""
    steps: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for trace in traces:
        for kind, cost in step_costs(trace).items():
            steps[kind].append(cost)
    return {kind: float(np.median(costs)) for kind, costs in steps.items()}


def stage_times(costs: Costs, actions: Sequence[Action]) -> list[float]:
    """Return each stage's seconds of pipeline work in one step, the optimizer not included."""
    totals: dict[int, float] = defaultdict(float)
    for action in actions:
        if action.op != Op.OPTIMIZER:
            totals[action.stage] += costs[action.stage, action.op]
    return [totals[stage] for stage in sorted(totals)]


def imbalance(stage_times_s: Sequence[float]) -> float:
    """Return the slowest stage over the mean stage; 1 is perfect balance."""
    return max(stage_times_s) / (sum(stage_times_s) / len(stage_times_s))


Groups = Sequence[Sequence[float]]
"""Samples of one point: a list for each fresh group of workers."""


def median_interval(groups: Groups) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of the median over all samples."""
    return _interval(_bootstrap_medians(groups, np.random.default_rng(0)))


def paired_ratio(groups: Groups, baseline: Groups) -> tuple[float, float, float]:
    """Return the ratio of two points' step times and its 95 % percentile-bootstrap interval.

    Group i of both ran one after the other, so the ratio of their medians is free of the machine's slow drift;
    the result is the median of those ratios. Rounds are drawn first, then samples inside them.
    """
    random = np.random.default_rng(0)
    pairs = [(np.asarray(a, dtype=float), np.asarray(b, dtype=float)) for a, b in zip(groups, baseline, strict=True)]

    def ratio(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.median(a) / np.median(b))

    def redrawn(index: int) -> float:
        a, b = pairs[index]
        return ratio(random.choice(a, len(a)), random.choice(b, len(b)))

    draws = [np.median([redrawn(index) for index in random.integers(0, len(pairs), len(pairs))]) for _ in range(1000)]
    return (float(np.median([ratio(a, b) for a, b in pairs])), *_interval(np.asarray(draws)))


def _bootstrap_medians(groups: Groups, random: np.random.Generator, draws: int = 2000) -> np.ndarray:
    """Draw groups first, then samples inside them, so that variation between groups widens the interval."""
    arrays = [np.asarray(group, dtype=float) for group in groups if len(group)]
    medians = np.empty(draws)
    for draw in range(draws):
        chosen = random.integers(0, len(arrays), len(arrays))
        medians[draw] = np.median(
            np.concatenate([random.choice(arrays[index], len(arrays[index])) for index in chosen])
        )
    return medians


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
