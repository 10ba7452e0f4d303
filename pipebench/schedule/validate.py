"""Refuse a schedule before any process starts: everything present once, and able to proceed."""

import numpy as np
from numpy.typing import NDArray

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Schedule, decode
from pipebench.schedule.grid import grid
from pipebench.schedule.simulate import play


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage runs every micro-batch forward and backward once, in a feasible order.

    A backward is one `B`, or one `I` and one `W`. That a backward follows its own forward, and a recompute stands
    between the two, is the dependency relation's business: rows that break it cannot proceed. The error's `grid`
    shows the rows with the failing ones marked.
    """
    if not schedule.num_actions:
        raise ScheduleError(f"schedule {schedule.name}: has no actions: expected a row for each rank")
    _check_idle_ranks(schedule)
    _check_doubles(schedule)
    _check_complete(schedule)
    play(schedule, np.ones(schedule.num_actions))


def _check_idle_ranks(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        if not len(row):
            text = f"schedule {schedule.name}: rank {rank} has no stage: expected at least one on each rank"
            raise ScheduleError(text, grid(schedule.rows, {rank: None}))


def _check_doubles(schedule: Schedule) -> None:
    codes = schedule.codes
    distinct, first, counts = np.unique(codes, return_index=True, return_counts=True)
    doubled = np.flatnonzero(counts > 1)
    if len(doubled):
        worst = doubled[np.argmin(first[doubled])]
        action = decode(int(distinct[worst]))
        expected = "at most once" if action.op in (Op.RECOMPUTE, Op.OPTIMIZER) else "once"
        rank = schedule.rank_of(action)
        again = [place for place, other in enumerate(schedule.rows[rank]) if other == action][1]
        raise _error(schedule, action, f"{action} stands {counts[worst]} times: expected {expected}", again)


def _check_complete(schedule: Schedule) -> None:
    shape = (schedule.num_stages, schedule.num_micro_batches)
    forward, whole, of_input, of_weight = (
        schedule.place[op] >= 0 if op in schedule.place else np.zeros(shape, dtype=bool)
        for op in (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)
    )
    _refuse_first(schedule, ~forward, Op.FORWARD, "stands 0 times: expected once")
    _refuse_first(schedule, ~(whole | of_input | of_weight), Op.BACKWARD, "stands 0 times: expected once")
    _refuse_first(schedule, whole & (of_input | of_weight), Op.BACKWARD, "stands beside I or W: expected B, or I and W")
    _refuse_first(schedule, of_weight & ~of_input, Op.INPUT_GRADIENT, "stands 0 times: expected once, before its W")
    _refuse_first(schedule, of_input & ~of_weight, Op.WEIGHT_GRADIENT, "stands 0 times: expected once, after its I")


def _refuse_first(schedule: Schedule, wrong: NDArray[np.bool_], op: Op, what: str) -> None:
    if wrong.any():
        stage, micro_batch = (int(index) for index in np.argwhere(wrong)[0])
        action = Action(op, stage, micro_batch)
        raise _error(schedule, action, f"{action} {what}", None)


def _error(schedule: Schedule, action: Action, what: str, place: int | None) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: {what}", grid(schedule.rows, {schedule.rank_of(action): place}))
