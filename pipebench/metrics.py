"""Numbers read off traces and samples. Every definition that a table prints has its home here."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipebench.schedule.action import OPS, Action, Op, Schedule, ops_of, stages_of
from pipebench.schedule.simulate import Costs
from pipebench.trace import Span, Trace


def bubble_fraction(trace: Trace) -> float:
    """Return idle / makespan: 1 - busy / (ranks x makespan)."""
    return 1.0 - float(trace.duration_s.sum()) / (trace.num_ranks * trace.makespan_s)


def step_costs(trace: Trace) -> dict[tuple[int, Op], float]:
    """Return what one action of each (stage, op) cost a core of its own in seconds, mean over the micro-batches.

    The time for which a rank was ready but had no core is taken out, so the number stands even where stages
    outnumber cores. The two are read one after the other, so that of a very short action may look like all there was.
    """
    if not trace.num_ranks:
        return {}
    codes = np.concatenate([row.codes for row in trace.rows])
    kinds, kind = np.unique(stages_of(codes) * len(OPS) + ops_of(codes), return_inverse=True)
    seconds = np.bincount(kind, trace.duration_s - trace.delay_s) / np.bincount(kind)
    seconds[(seconds <= 0) & (np.bincount(kind, trace.delay_s) > 0)] = _LEAST_S
    return {
        (number // len(OPS), OPS[number % len(OPS)]): mean
        for number, mean in zip(kinds.tolist(), seconds.tolist(), strict=True)
    }


_LEAST_S = 1e-9
"""What an action takes at least that really ran."""


def action_costs(traces: Sequence[Trace]) -> dict[tuple[int, Op], float]:
    """Return the median over steps of `step_costs`."""
    steps: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for trace in traces:
        for kind, cost in step_costs(trace).items():
            steps[kind].append(cost)
    return {kind: float(np.median(costs)) for kind, costs in steps.items()}


def stage_times(costs: Costs, actions: Iterable[Action]) -> list[float]:
    """Return each stage's seconds of pipeline work in one step, the optimizer not included."""
    totals: dict[int, float] = defaultdict(float)
    for action in actions:
        if action.op != Op.OPTIMIZER:
            totals[action.stage] += costs[action.stage, action.op]
    return [totals[stage] for stage in sorted(totals)]


def critical_path(schedule: Schedule, trace: Trace, transfer_s: float | Sequence[float] = 0.0) -> list[Span]:
    """Return the chain of spans that ends the step, in order of time: each started when the one before let it.

    Walks back from the span that ended last, each time to what let it start: the action before it in its rank's row
    or one of its dependencies, whichever was there last (the row's wins a tie). A dependency from another rank is
    there `transfer_s` after its end (as in `simulate`; for a measured trace 0, so that a transfer shows as a wait).
    The durations, and the waits between them and before the first, add up to the makespan.
    """
    assert schedule.rows == trace.rows, f"critical path of {schedule.name}: the trace is not of these rows"
    boundary_s = np.broadcast_to(np.asarray(transfer_s, dtype=np.float64), schedule.num_stages)
    first = np.cumsum([0, *map(len, schedule.rows)]).tolist()

    def arrival_s(producer: Action, consumer: Action) -> float:
        crosses = schedule.rank_of(producer) != schedule.rank_of(consumer)
        ended_s = trace.end_s[_place(schedule, producer)]
        return float(ended_s + boundary_s[max(producer.stage, consumer.stage)] if crosses else ended_s)

    path: list[Span] = []
    place: int | None = int(np.argmax(trace.end_s)) if schedule.num_actions else None
    while place is not None:
        span = _span(trace, first, place)
        path.append(span)
        before = [(float(trace.end_s[place - 1]), place - 1)] if place > first[span.rank] else []
        waited_for = [(arrival_s(p, span.action), _place(schedule, p)) for p in schedule.dependencies(span.action)]
        place = max(before + waited_for, key=lambda candidate: candidate[0], default=(0.0, None))[1]
    return path[::-1]


def _place(schedule: Schedule, action: Action) -> int:
    return int(schedule.place[action.op][action.stage, action.micro_batch])


def _span(trace: Trace, first: Sequence[int], place: int) -> Span:
    rank = bisect_right(first, place) - 1
    times = float(trace.start_s[place]), float(trace.end_s[place]), float(trace.delay_s[place])
    return Span(rank, trace.rows[rank][place - first[rank]], *times)


def imbalance(stage_times_s: Sequence[float]) -> float:
    """Return the slowest stage over the mean stage; 1 is perfect balance."""
    return max(stage_times_s) / (sum(stage_times_s) / len(stage_times_s))


Groups = Sequence[Sequence[float]]
"""Samples of one point: a list for each fresh group of workers."""


class Ratio(NamedTuple):
    """One step time over another, with its 95 % interval."""

    value: float
    low: float
    high: float


def median_interval(groups: Groups) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of the median over all samples."""
    return _interval(_bootstrap_medians(groups, np.random.default_rng(0)))


def paired_ratio(groups: Groups, baseline: Groups) -> Ratio:
    """Return the ratio of two points' step times and its 95 % percentile-bootstrap interval.

    Group i of both ran one after the other, so the ratio of their medians is free of the machine's slow drift;
    the result is the median of those ratios. Rounds are drawn first, then samples inside them. Raise ArithmeticError
    for a baseline that took no time.
    """
    random = np.random.default_rng(0)
    assert len(groups) == len(baseline), "one group of each a round"
    (a, sizes_a), (b, sizes_b) = _padded(groups), _padded(baseline)
    block = max(1, _MOST_DRAWN_AT_ONCE // max(a.size, b.size))
    with np.errstate(divide="raise", invalid="raise"):
        ratio = np.median([np.median(x) / np.median(y) for x, y in zip(groups, baseline, strict=True)])
        draws = []
        for done in range(0, _PAIRED_DRAWS, block):
            rounds = random.integers(0, len(groups), (min(block, _PAIRED_DRAWS - done), len(groups)))
            redrawn_a, redrawn_b = (_redrawn(s, n, rounds, random) for s, n in ((a, sizes_a), (b, sizes_b)))
            ratios = _medians(redrawn_a, sizes_a[rounds]) / _medians(redrawn_b, sizes_b[rounds])
            draws.append(np.median(ratios, axis=1))
    return Ratio(float(ratio), *_interval(np.concatenate(draws)))


_PAIRED_DRAWS = 1000


def ratio_of_medians(groups: Groups, baseline: Groups) -> Ratio:
    """Return the ratio of two points' median step times and its 95 % percentile-bootstrap interval.

    Both were measured apart from each other, so each is redrawn by itself (`paired_ratio` is for points that took
    turns). Raise ArithmeticError for a baseline that took no time.
    """
    random = np.random.default_rng(0)
    with np.errstate(divide="raise", invalid="raise"):
        draws = _bootstrap_medians(groups, random) / _bootstrap_medians(baseline, random)
        ratio = np.median(np.concatenate(groups)) / np.median(np.concatenate(baseline))
    return Ratio(float(ratio), *_interval(draws))


def noise_floor(again: Ratio) -> float:
    """Return how far two measurements of the same point may lie apart, as a ratio of at least 1.

    It is the end farther from 1 of the interval of an A/A pair's ratio (`ratio_of_medians` of one point measured
    twice), so it holds both the scatter of the steps and what changed between the two. A smaller difference between
    two points says nothing.
    """
    return max(again.high, 1 / again.low)


def _bootstrap_medians(groups: Groups, random: np.random.Generator, draws: int = 2000) -> np.ndarray:
    """Draw groups first, then samples inside them, so that variation between groups widens the interval."""
    samples, sizes = _padded([group for group in groups if len(group)])
    block = max(1, _MOST_DRAWN_AT_ONCE // samples.size)
    medians = []
    for done in range(0, draws, block):
        chosen = random.integers(0, len(sizes), (min(block, draws - done), len(sizes)))
        drawn = _redrawn(samples, sizes, chosen, random)
        medians.append(_medians(drawn.reshape(len(drawn), -1), sizes[chosen].sum(axis=1)))
    return np.concatenate(medians)


_MOST_DRAWN_AT_ONCE = 1_000_000
"""Samples; a point of very many steps is drawn in several goes instead of filling the memory."""


def _padded(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples, a row for each group with infinities at its end, and how many samples each has."""
    sizes = np.array([len(group) for group in groups])
    samples = np.full((len(groups), sizes.max()), np.inf)
    for index, group in enumerate(groups):
        samples[index, : len(group)] = group
    return samples, sizes


def _redrawn(samples: np.ndarray, sizes: np.ndarray, chosen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return as many samples of each chosen group as it has, drawn from it, with infinities at the end."""
    most = samples.shape[1]
    num_drawn = sizes[chosen][..., np.newaxis]
    drawn: np.ndarray = samples[chosen[..., np.newaxis], random.integers(0, num_drawn, (*chosen.shape, most))]
    drawn[np.arange(most) >= num_drawn] = np.inf
    return drawn


def _medians(drawn: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the medians along the last axis, where `counts` are samples and the infinities are none.

    They come last in sorted samples, so the median stands where the count says.
    """
    drawn = np.sort(drawn)
    low, high = (np.take_along_axis(drawn, at[..., np.newaxis], -1)[..., 0] for at in ((counts - 1) // 2, counts // 2))
    return np.asarray((low + high) / 2)


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)
