"""Play a schedule's rows on ideal ranks: each action starts when its rank is free and its inputs have arrived."""

from collections.abc import Callable

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Schedule
from pipebench.trace import Span, Trace

DurationOf = Callable[[Action], float]
TransferTimeOf = Callable[[Action, Action], float]


def no_transfer_time(producer: Action, consumer: Action) -> float:
    return 0.0


def simulate(schedule: Schedule, duration_s: DurationOf, transfer_s: TransferTimeOf = no_transfer_time) -> Trace:
    """Return when every action would run.

    `duration_s(action)` occupies the action's rank; `transfer_s(producer, consumer)` is the pure latency of a
    tensor between two ranks and occupies neither. Raise ScheduleError when the rows cannot proceed.
    """
    finished: dict[Action, float] = {}
    blocked_on: dict[Action, list[int]] = {}
    position = [0] * schedule.num_ranks
    clock = [0.0] * schedule.num_ranks
    spans: list[Span] = []
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            start = clock[rank]
            missing = None
            for dependency in schedule.dependencies(action):
                if dependency not in finished:
                    missing = dependency
                    break
                crosses = schedule.rank_of(dependency) != rank
                arrival = finished[dependency] + (transfer_s(dependency, action) if crosses else 0.0)
                start = max(start, arrival)
            if missing is not None:
                blocked_on.setdefault(missing, []).append(rank)
                break
            end = start + duration_s(action)
            spans.append(Span(rank, action, start, end))
            finished[action] = clock[rank] = end
            position[rank] += 1
            runnable.extend(blocked_on.pop(action, ()))
    if blocked_on:
        stuck = ", ".join(
            f"rank {rank} at {schedule.rows[rank][position[rank]]} waits for {missing}"
            for missing, ranks in blocked_on.items()
            for rank in ranks
        )
        raise ScheduleError(f"schedule {schedule.name} cannot proceed: {stuck}")
    return Trace(tuple(spans), schedule.num_ranks)
