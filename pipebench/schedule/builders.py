"""The schedules, each one function from (K, M) to rows, and the transforms that apply to any of them."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from pipebench.errors import ConfigError, ScheduleError
from pipebench.schedule.action import Action, Op, Row, Rows, Schedule

Builder = Callable[[int, int], Rows]

SCHEDULES: dict[str, Builder] = {}


class Recompute(Enum):
    """Which micro-batches run their forward again before their backward."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"


def schedule(name: str) -> Callable[[Builder], Builder]:
    """Register a builder under the name that users write."""

    def register(builder: Builder) -> Builder:
        SCHEDULES[name] = builder
        return builder

    return register


@schedule("gpipe")
def gpipe(num_stages: int, num_micro_batches: int) -> Rows:
    """All forwards, then all backwards, last micro-batch first (Huang et al. 2019, fig. 2c).

    The reverse order frees the newest activations first and lets `except_last` pay.
    """
    return tuple(
        tuple(Action(Op.FORWARD, stage, m) for m in range(num_micro_batches))
        + tuple(Action(Op.BACKWARD, stage, m) for m in reversed(range(num_micro_batches)))
        for stage in range(num_stages)
    )


@schedule("naive")
def naive(num_stages: int, num_micro_batches: int) -> Rows:
    """One micro-batch through all stages and back at a time: layer-wise model parallelism, no overlap."""
    return tuple(
        tuple(Action(op, stage, m) for m in range(num_micro_batches) for op in (Op.FORWARD, Op.BACKWARD))
        for stage in range(num_stages)
    )


@schedule("1f1b")
def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Rows:
    """Warm up, then alternate, then drain (PipeDream-Flush; Narayanan et al. 2021, fig. 4 top).

    Same bubble as GPipe, but stage s holds at most num_stages - s micro-batches.
    """

    def row(stage: int) -> Row:
        warm_up = min(num_micro_batches, num_stages - 1 - stage)
        forwards = [Action(Op.FORWARD, stage, m) for m in range(num_micro_batches)]
        backwards = [Action(Op.BACKWARD, stage, m) for m in range(num_micro_batches)]
        steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
        return (*forwards[:warm_up], *steady, *backwards[num_micro_batches - warm_up :])

    return tuple(row(stage) for stage in range(num_stages))


def build(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """Build the named schedule; raise ConfigError for an unknown name."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}")
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"schedule {name}: {num_stages} stages, {num_micro_batches} micro-batches: expected at least 1 of each"
        )
    return Schedule(name, SCHEDULES[name](num_stages, num_micro_batches))


def with_recompute(schedule: Schedule, recompute: Recompute) -> Schedule:
    """Put an `R` right before the backward of every micro-batch that `recompute` names.

    It waits for nothing from another rank, so it runs while the gradient is still on its way.
    """
    num_recomputed = {
        Recompute.NEVER: 0,
        Recompute.EXCEPT_LAST: schedule.num_micro_batches - 1,
        Recompute.ALWAYS: schedule.num_micro_batches,
    }[recompute]

    def expand(action: Action) -> Row:
        if action.op == Op.BACKWARD and action.micro_batch < num_recomputed:
            return (replace(action, op=Op.RECOMPUTE), action)
        return (action,)

    return Schedule(
        schedule.name, tuple(tuple(new for action in row for new in expand(action)) for row in schedule.rows)
    )


def with_optimizer(schedule: Schedule) -> Schedule:
    """Let each stage step its optimizer as soon as its last backward is done."""

    def expand(row: Row) -> Row:
        last_backward = {action.stage: action for action in row if action.op == Op.BACKWARD}
        done = set(last_backward.values())
        return tuple(
            new
            for action in row
            for new in ((action, Action(Op.OPTIMIZER, action.stage)) if action in done else (action,))
        )

    return Schedule(schedule.name, tuple(expand(row) for row in schedule.rows))
