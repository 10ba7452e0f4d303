"""Where a step's seconds went: named parts that add up to the measured median step, each the difference of two replays.

All replays play the point's own rows. The first knows equal stages and nothing else; each further one switches one
effect on and leaves those before it on. The order is fixed: what the schedule is designed for comes first, what the
model and the link add next, what only a real machine does last. So a part says how much more its effect cost on top of
those before it, and one that hides behind them shows as less.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipebench.metrics import step_costs
from pipebench.record import RunResult, step_times, traces, transfer_times
from pipebench.schedule.action import OPS, Op, Schedule, ops_of
from pipebench.schedule.simulate import durations, play
from pipebench.trace import Trace


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds of the median step by what they went to; the fields add up to it.

    `compute_s`: forwards and backwards, with what recomputes inside these, spread evenly over the ranks.
    `fill_and_drain_s`: what the schedule idles with equal stages, which is the bound. `recompute_s`, `imbalance_s`,
    `transfers_s`, `optimizer_s`: what each adds. `jitter_s`: what comes of a stage's actions of one kind not all taking
    the same time. `overhead_s`: the rest, what happens between actions and while ranks wait for a core.
    """

    compute_s: float
    fill_and_drain_s: float
    recompute_s: float
    imbalance_s: float
    transfers_s: float
    optimizer_s: float
    jitter_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        return float(sum(astuple(self)))


PARTS = tuple(entry.name for entry in fields(Ledger))


def ledger_of(result: RunResult) -> Ledger | None:
    """Return the ledger of a measured point, None where no spans were recorded.

    Every step is taken apart on its own and each part's median taken, but for the overhead: it is what the others
    leave of the median step.
    """
    schedule, transfer_s = result.schedule, transfer_times(result)
    steps = [trace for repeat in result.repeats for trace in traces(result, repeat)]
    if not steps:
        return None
    step_s = median(time for repeat in result.repeats for time in step_times(repeat.ranks))
    taken_apart = [_replayed(schedule, step, transfer_s) for step in steps]
    parts = [median(part) for part in zip(*taken_apart, strict=True)]
    return Ledger(**dict(zip(PARTS, [*parts, step_s - sum(parts)], strict=True)))


def _replayed(schedule: Schedule, step: Trace, transfer_s: Sequence[float]) -> list[float]:
    """Return the parts of one step up to jitter: the first replay, and what each further one adds."""
    costs_s = durations(schedule, step_costs(step))
    ops = ops_of(schedule.codes)
    of_recompute, of_optimizer = (ops == OPS.index(op) for op in (Op.RECOMPUTE, Op.OPTIMIZER))
    equal_s = _mean_by_op(costs_s, ops)
    bare_s = np.where(of_recompute | of_optimizer, 0.0, equal_s)
    with_recompute_s = np.where(of_optimizer, 0.0, equal_s)
    uneven_s = np.where(of_optimizer, 0.0, costs_s)
    makespans_s = [
        float(bare_s.sum()) / schedule.num_ranks,
        play(schedule, bare_s).makespan_s,
        play(schedule, with_recompute_s).makespan_s,
        play(schedule, uneven_s).makespan_s,
        play(schedule, uneven_s, transfer_s).makespan_s,
        play(schedule, costs_s, transfer_s).makespan_s,
        play(schedule, step.duration_s - step.delay_s, transfer_s).makespan_s,
    ]
    return np.diff(makespans_s, prepend=0.0).tolist()


def _mean_by_op(costs_s: NDArray[np.float64], ops: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return every action at the mean cost of its op over all stages."""
    means = np.bincount(ops, costs_s) / np.maximum(np.bincount(ops), 1)
    return np.asarray(means[ops])


_WORTH_NAMING = 0.01
"""Share above the mean from which one rank is the slow one."""


def part_name(part: str) -> str:
    """Return what a sentence calls one of `PARTS`."""
    return "overhead and contention" if part == "overhead_s" else part.removesuffix("_s").replace("_", " ")


def in_words(ledger: Ledger, rank_times_s: Sequence[float]) -> str:
    """Return the ledger as a sentence: what of the step went beyond forwards and backwards, largest part first.

    `rank_times_s`, each rank's seconds of work, name the slowest where imbalance costs something. Parts below a
    hundredth of the step are left to the table.
    """
    lost = {part: getattr(ledger, part) for part in PARTS if part != "compute_s"}
    told = sorted((part for part in lost if lost[part] > ledger.step_s / 100), key=lambda part: -lost[part])
    parts = []
    for part in told:
        text = f"{lost[part] * 1e3:.1f} {part_name(part)}"
        if part == "imbalance_s":
            slowest = max(range(len(rank_times_s)), key=rank_times_s.__getitem__)
            mean = sum(rank_times_s) / len(rank_times_s)
            excess = rank_times_s[slowest] / mean - 1
            if excess > _WORTH_NAMING:
                text += f" (rank {slowest} takes {excess:.0%} more than the mean)"
            else:
                text += " (now one rank is slower, now another)"
        parts.append(text)
    beyond_s = ledger.step_s - ledger.compute_s
    listed = ", ".join(parts) or "nothing large"
    return f"{beyond_s * 1e3:.1f} ms of {ledger.step_s * 1e3:.1f} ms beyond forward and backward: {listed}"
