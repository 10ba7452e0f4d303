"""Play a schedule's rows on ideal ranks: each action starts when its rank is free and its inputs have arrived.

All ranks whose next action can run advance together, so a step costs numpy calls by the depth of the schedule
and not by its actions: millions of actions a second where many ranks work side by side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipebench.errors import ScheduleError
from pipebench.schedule.action import OPS, Op, Schedule, decode, ops_of, stages_of
from pipebench.schedule.grid import grid
from pipebench.trace import Trace

Costs = Mapping[tuple[int, Op], float]
"""Seconds of one action by (stage, op)."""


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between two ranks: a tensor takes `latency_s` + bytes / `bytes_per_s` and occupies neither rank."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    @staticmethod
    def through(latency_s: float, num_bytes: float, seconds: float) -> "Link":
        """Return the link of this latency over which so many bytes take so many seconds."""
        return Link(latency_s, num_bytes / (seconds - latency_s) if seconds > latency_s else math.inf)

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def simulate(schedule: Schedule, costs: Costs, transfer_s: float | Sequence[float] = 0.0) -> Trace:
    """Return when every action would run, at the same cost for all micro-batches of a stage.

    `transfer_s` is what a boundary tensor takes between two ranks (see `Link`): one number, or for each stage that
    of the boundary before it. Costs of ops that do not occur may be left out; the optimizer's default to nothing.
    Raise ScheduleError when a cost is missing or the rows cannot proceed.
    """
    return play(schedule, durations(schedule, costs), transfer_s)


def durations(schedule: Schedule, costs: Costs) -> NDArray[np.float64]:
    """Return each action's seconds, rows end to end."""
    table = np.full((len(OPS), schedule.num_stages), np.nan)
    table[OPS.index(Op.OPTIMIZER)] = 0.0
    for (stage, op), cost_s in costs.items():
        if stage < schedule.num_stages:
            table[OPS.index(op), stage] = cost_s
    codes = schedule.codes
    seconds: NDArray[np.float64] = table[ops_of(codes), stages_of(codes)]
    if np.isnan(seconds).any():
        action = decode(int(codes[np.argmax(np.isnan(seconds))]))
        raise ScheduleError(f"schedule {schedule.name}: {action}: expected a cost for ({action.stage}, {action.op})")
    return seconds


def play(schedule: Schedule, duration_s: NDArray[np.float64], transfer_s: float | Sequence[float] = 0.0) -> Trace:
    """Return when every action would run; `duration_s` holds each action's seconds, rows end to end."""
    num_actions = schedule.num_actions
    producers = schedule.producers()
    delay_s = arrival_delays(schedule, producers, transfer_s)
    end_s = np.full(num_actions + 2, math.inf)
    end_s[num_actions] = -math.inf  # nothing is waited for; the place after it stays unfinished for ever
    start_s = np.zeros(num_actions)
    lengths = np.array([len(row) for row in schedule.rows])
    stops = np.cumsum(lengths)
    place = stops - lengths
    clock_s = np.zeros(schedule.num_ranks)
    ranks = np.flatnonzero(lengths)
    while len(ranks):
        here = place[ranks]
        arrival_s = (end_s[producers[:, here]] + delay_s[:, here]).max(axis=0)
        ready = arrival_s < math.inf
        going, here = ranks[ready], here[ready]
        if not len(going):
            raise _stuck(schedule, place, ranks, end_s, producers)
        start_s[here] = np.maximum(clock_s[going], arrival_s[ready])
        clock_s[going] = end_s[here] = start_s[here] + duration_s[here]
        place[going] += 1
        if (place[going] == stops[going]).any():
            ranks = ranks[place[ranks] < stops[ranks]]
    return Trace(schedule.rows, start_s, end_s[:num_actions])


def arrival_delays(
    schedule: Schedule, producers: NDArray[np.int64], transfer_s: float | Sequence[float]
) -> NDArray[np.float64]:
    """Return what passes between a producer's end and its consumer's having the result: nothing on the same rank."""
    stages = stages_of(schedule.codes)
    owner = np.append(np.repeat(np.arange(schedule.num_ranks), [len(row) for row in schedule.rows]), [-1, -1])
    boundary_s = np.broadcast_to(np.asarray(transfer_s, dtype=np.float64), schedule.num_stages)
    delays = np.zeros(producers.shape)
    for line, producer in enumerate(producers):
        crossing = np.flatnonzero((producer < len(stages)) & (owner[producer] != owner[:-2]))
        delays[line, crossing] = boundary_s[np.maximum(stages[crossing], stages[producer[crossing]])]
    return delays


def _stuck(
    schedule: Schedule,
    place: NDArray[np.int64],
    ranks: NDArray[np.int64],
    end_s: NDArray[np.float64],
    producers: NDArray[np.int64],
) -> ScheduleError:
    codes = schedule.codes
    first = np.cumsum([0, *map(len, schedule.rows)])
    reasons, marked = [], {}
    for rank in ranks.tolist():
        action = decode(int(codes[place[rank]]))
        unfinished = [p for p in producers[:, place[rank]].tolist() if end_s[p] == math.inf]
        missing = (
            decode(int(codes[unfinished[0]]))
            if unfinished[0] < len(codes)
            else next(d for d in schedule.dependencies(action) if not schedule.runs(d.op, d.stage, d.micro_batch))
        )
        reasons.append(f"rank {rank} at {action} waits for {missing}")
        marked[rank] = int(place[rank] - first[rank])
    return ScheduleError(f"schedule {schedule.name} cannot proceed: {', '.join(reasons)}", grid(schedule.rows, marked))
