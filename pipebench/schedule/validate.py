"""Refuse a schedule before any process starts: everything present once, and able to proceed."""

from collections import Counter

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage runs every micro-batch forward and backward once, in a feasible order.

    That a backward follows its own forward, and a recompute stands between the two, is the dependency
    relation's business: rows that break it cannot proceed.
    """
    counts = Counter(schedule)
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            for op in (Op.FORWARD, Op.BACKWARD):
                action = Action(op, stage, micro_batch)
                if counts[action] != 1:
                    raise ScheduleError(
                        f"schedule {schedule.name}: {action} stands {counts[action]} times: expected once"
                    )
    doubled = next((action for action, count in counts.items() if count > 1), None)
    if doubled is not None:
        raise ScheduleError(
            f"schedule {schedule.name}: {doubled} stands {counts[doubled]} times: expected at most once"
        )
    simulate(schedule, duration_s=lambda action: 1.0)
