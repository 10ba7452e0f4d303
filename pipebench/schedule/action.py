"""What a schedule is: rows of actions, and the one relation that says what an action waits for.

A row lists what one rank does, in order. Nothing else is stored: no times, idle slots, sends or peers;
those follow from the rows and from `Schedule.dependencies`, which executor, simulator, validator,
memory model and pictures all ask.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from pipebench.errors import ScheduleError


class Op(StrEnum):
    """One kind of work a stage does."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"
    OPTIMIZER = "O"


ALL_MICRO_BATCHES = -1
"""`Action.micro_batch` of an action that concerns the whole mini-batch (the optimizer)."""

_ACTION_TEXT = re.compile(r"(\d+)([FBRO])(\d*)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One op of one stage on one micro-batch, printed `2F0`; the optimizer step of stage 2 is `2O`."""

    op: Op
    stage: int
    micro_batch: int = ALL_MICRO_BATCHES

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch == ALL_MICRO_BATCHES else self.micro_batch
        return f"{self.stage}{self.op}{micro_batch}"

    @staticmethod
    def parse(text: str) -> "Action":
        """Read `2F0` or `2O`; raise ScheduleError for any other text."""
        match = _ACTION_TEXT.fullmatch(text.strip())
        if match is None or (match[2] == Op.OPTIMIZER) != (match[3] == ""):
            raise ScheduleError(f"action {text!r}: expected stage, op and micro-batch such as 2F0, or 2O")
        return Action(Op(match[2]), int(match[1]), int(match[3]) if match[3] else ALL_MICRO_BATCHES)


Row = tuple[Action, ...]
Rows = tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that crosses ranks because `consumer` waits for `producer`."""

    producer: Action
    consumer: Action
    source_rank: int
    target_rank: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of actions per rank. Which rank owns a stage is read off the rows."""

    name: str
    rows: Rows
    num_micro_batches: int = field(init=False)
    stage_ranks: tuple[int, ...] = field(init=False)
    recomputed: frozenset[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        ranks: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                if ranks.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"schedule {self.name}: {action} stands on rank {rank}, "
                        f"but stage {action.stage} belongs to rank {ranks[action.stage]}"
                    )
        if sorted(ranks) != list(range(len(ranks))):
            raise ScheduleError(
                f"schedule {self.name}: stages {sorted(ranks)}: expected all of 0 to {max(ranks, default=0)}"
            )
        micro_batches = [action.micro_batch for action in self if action.op != Op.OPTIMIZER]
        recomputed = {(action.stage, action.micro_batch) for action in self if action.op == Op.RECOMPUTE}
        object.__setattr__(self, "num_micro_batches", max(micro_batches, default=-1) + 1)
        object.__setattr__(self, "stage_ranks", tuple(ranks[stage] for stage in range(len(ranks))))
        object.__setattr__(self, "recomputed", frozenset(recomputed))

    def __iter__(self) -> Iterator[Action]:
        for row in self.rows:
            yield from row

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    def rank_of(self, action: Action) -> int:
        return self.stage_ranks[action.stage]

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return what must have finished before `action` may start, besides its rank being free.

        This is the only place that knows. A dependency on another rank's action is a transfer.
        """
        stage, micro_batch = action.stage, action.micro_batch
        match action.op:
            case Op.FORWARD:
                return (Action(Op.FORWARD, stage - 1, micro_batch),) if stage > 0 else ()
            case Op.RECOMPUTE:
                return (Action(Op.FORWARD, stage, micro_batch),)
            case Op.BACKWARD:
                recomputed = (stage, micro_batch) in self.recomputed
                own = Action(Op.RECOMPUTE if recomputed else Op.FORWARD, stage, micro_batch)
                if stage == self.num_stages - 1:
                    return (own,)
                return (own, Action(Op.BACKWARD, stage + 1, micro_batch))
            case Op.OPTIMIZER:
                return tuple(Action(Op.BACKWARD, stage, micro_batch) for micro_batch in range(self.num_micro_batches))

    def transfers(self) -> Iterator[Transfer]:
        """Yield every tensor that crosses ranks, in the order in which the consumers' rows need it."""
        for consumer in self:
            for producer in self.dependencies(consumer):
                source, target = self.rank_of(producer), self.rank_of(consumer)
                if source != target:
                    yield Transfer(producer, consumer, source, target)
