"""`zb_auto`: look for the fastest order under a memory limit, at the costs that were measured.

Two greedy schedulers build orders, each in several variants: one plans in rounds, the other lets every rank decide
when it becomes free. Each order is then played and its memory counted exactly, next to the hand-written schedules,
and the best that fits wins. So the result is never worse than the best hand-written schedule under the same limit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from pipebench.errors import LimitError
from pipebench.schedule.action import Action, Op, Row, Schedule
from pipebench.schedule.builders import SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import ZB_AUTO, build
from pipebench.schedule.greedy import Habits, Rounds, Task, by_events, by_habits, by_plan, by_rounds, within
from pipebench.schedule.memory import StageActivations, most_activation_bytes
from pipebench.schedule.simulate import Costs, simulate
from pipebench.trace import Trace

SHARES = (0.0, 0.3, 1.0)
"""Which parts of an action's seconds the variants would rather wait than start it."""

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT  # noqa: E741


def makespan(trace: Trace) -> float:
    return trace.makespan_s


@dataclass(frozen=True, slots=True)
class Found:
    """The best order found, its recomputes included, and the best hand-written one that fits ('' and inf: none)."""

    schedule: Schedule
    predicted_s: float
    best_known: str
    best_known_s: float
    limit_bytes: float


def search(
    num_ranks: int,
    num_micro_batches: int,
    chunks: int,
    costs: Costs,
    activations: Sequence[StageActivations],
    limit_bytes: float,
    transfer_s: float | Sequence[float] = 0.0,
    recompute: Recompute = Recompute.NEVER,
    objective: Callable[[Trace], float] = makespan,
) -> Found:
    """Return the schedule with the least objective among those that keep each rank within `limit_bytes`.

    Stages stand straight (1 chunk) or on a V (2 chunks); with more chunks only hand-written schedules are judged.
    Costs of a whole backward default to those of its parts, of a recompute to those of the forward. Of equal
    schedules the one with the lower peak wins. Raise LimitError
    when nothing fits.
    """
    defaults = {(stage, B): costs[stage, I] + costs[stage, W] for stage in range(num_ranks * chunks)}
    defaults |= {(stage, Op.RECOMPUTE): costs[stage, F] for stage in range(num_ranks * chunks)}
    costs = defaults | dict(costs)
    task = Task(num_ranks, num_micro_batches, chunks, costs, tuple(activations), limit_bytes, transfer_s, recompute)
    known = [_judge(task, schedule, objective) for schedule in _hand_written(task)]
    ours = [_judge(task, schedule, objective) for schedule in _candidates(task)]
    fitting = [judged for judged in known + ours if within(judged.peak_bytes, limit_bytes)]
    if not fitting:
        leanest = min(known + ours, key=lambda judged: judged.peak_bytes)
        raise LimitError(
            f"schedule {ZB_AUTO}: memory limit {_mib(limit_bytes)} MiB a rank: "
            f"expected at least {_mib(leanest.peak_bytes, up=True)} MiB, what {leanest.schedule.name} takes",
            leanest.peak_bytes,
        )
    best = min(fitting, key=_merit)
    best_known = min((judged for judged in known if within(judged.peak_bytes, limit_bytes)), key=_merit, default=None)
    return Found(
        Schedule(ZB_AUTO, best.schedule.rows),
        best.objective_s,
        best_known.schedule.name if best_known else "",
        best_known.objective_s if best_known else math.inf,
        limit_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    schedule: Schedule
    objective_s: float
    peak_bytes: float


def _merit(judged: _Judged) -> tuple[float, float]:
    return judged.objective_s, judged.peak_bytes


def _mib(num_bytes: float, up: bool = False) -> float:
    """Return MiB to one digit, rounded up where it is what a limit must reach."""
    tenths = num_bytes / 2**20 * 10
    return (math.ceil(tenths) if up else math.floor(tenths)) / 10


def _hand_written(task: Task) -> Iterator[Schedule]:
    for recipe in SCHEDULES.values():
        if recipe.least_chunks <= task.chunks <= (recipe.most_chunks or task.chunks):
            yield build(recipe.name, task.num_ranks, task.num_micro_batches, task.chunks)


def _candidates(task: Task) -> Iterator[Schedule]:
    """Yield orders of our own; where whole backwards are cheaper, also with parts that stand together made whole."""
    worthwhile = [s for s in range(task.num_stages) if task.costs[s, B] < task.costs[s, I] + task.costs[s, W]]
    seen = set()
    for rows in _orders(task):
        schedule = Schedule(ZB_AUTO, rows)
        if schedule.rows not in seen:
            seen.add(schedule.rows)
            yield schedule
            if worthwhile:
                yield Schedule(ZB_AUTO, [_fused(row, worthwhile) for row in schedule.rows])
    yield Schedule("one micro-batch at a time", [_one_at_a_time(task, rank) for rank in range(task.num_ranks)])


def _orders(task: Task) -> Iterator[Sequence[Sequence[Action]]]:
    if task.chunks > 2:
        return
    if task.chunks == 1:
        for rounds in product((False, True), repeat=3):
            yield from by_rounds(task, Rounds(*rounds))
    either, settled = (False, True), (False,)
    for habits in product(
        SHARES,
        SHARES,
        either if task.chunks == 2 else settled,
        either if task.chunks == 2 else settled,
        either if task.recompute != Recompute.NEVER else settled,
    ):
        yield from by_events(task, by_habits(Habits(*habits)))
    for schedule, weight_share in product(_plans(task), SHARES):
        yield from by_events(task, by_plan(schedule, weight_share))


def _plans(task: Task) -> list[Schedule]:
    """Return the hand-written schedules that place stages as the task does and take micro-batches in order."""
    placement = tuple(task.rank_of(stage) for stage in range(task.num_stages))

    def in_order(schedule: Schedule) -> bool:
        return all((np.diff(table, axis=1) > 0).all() for table in schedule.place.values())

    return [one for one in _hand_written(task) if one.stage_ranks == placement and in_order(one)]


def _one_at_a_time(task: Task, rank: int) -> list[Action]:
    stages = task.stages_of(rank)
    return [
        Action(op, stage, m)
        for m in range(task.num_micro_batches)
        for op, stage in [(F, stage) for stage in stages] + [(part, stage) for stage in stages[::-1] for part in (I, W)]
    ]


def _fused(row: Row, stages: Sequence[int]) -> list[Action]:
    """Return the row with each I that its own W follows at once made one B, at these stages."""
    fused: list[Action] = []
    for action in row:
        if action.op == W and action.stage in stages and fused[-1] == Action(I, action.stage, action.micro_batch):
            fused[-1] = Action(B, action.stage, action.micro_batch)
        else:
            fused.append(action)
    return fused


def _judge(task: Task, schedule: Schedule, objective: Callable[[Trace], float]) -> _Judged:
    schedule = with_recompute(schedule, task.recompute)
    peak = max(most_activation_bytes(schedule, row, task.activations) for row in schedule.rows)
    if not within(peak, task.limit_bytes):
        return _Judged(schedule, math.inf, peak)
    return _Judged(schedule, objective(simulate(schedule, task.costs, task.transfer_s)), peak)
