"""What a schedule is: rows of actions, and the one relation that says what an action waits for.

A row lists what one rank does, in order. Nothing else is stored: no times, idle slots, sends or peers;
those follow from the rows and from the relation `WAITS`, which executor, simulator, validator, memory model
and pictures all ask. Rows are kept as arrays of eight bytes an action, so that a schedule of millions of
actions can be built and played; whoever looks at one sees `Action`s.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pipebench.errors import ScheduleError
from pipebench.schedule.grid import grid


class Op(StrEnum):
    """One kind of work a stage does; a backward is one `B`, or its two parts `I` and `W`."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    OPTIMIZER = "O"


OPS = tuple(Op)

ALL_MICRO_BATCHES = -1
"""`Action.micro_batch` of an action that concerns the whole mini-batch (the optimizer)."""

_ACTION_TEXT = re.compile(r"(\d+)([FBIWRO])(\d*)")
_MICRO_BITS = 24
_STAGE_BITS = 24
_MOST = 1 << _MICRO_BITS
"""Stages and micro-batches that fit a code."""


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
        stage, micro_batch = int(match[1]), int(match[3]) if match[3] else ALL_MICRO_BATCHES
        if max(stage, micro_batch + 1) >= _MOST:
            raise ScheduleError(f"action {text!r}: expected stages and micro-batches below {_MOST - 1}")
        return Action(Op(match[2]), stage, micro_batch)


@dataclass(frozen=True, slots=True)
class Wait:
    """What an op waits for: the first of `ops` that the schedule runs, `stage_offset` stages further on."""

    ops: tuple[Op, ...]
    stage_offset: int = 0


_OWN_ACTIVATIONS = Wait((Op.RECOMPUTE, Op.FORWARD))
_GRADIENT = Wait((Op.INPUT_GRADIENT, Op.BACKWARD), +1)

WAITS: dict[Op, tuple[Wait, ...]] = {
    Op.FORWARD: (Wait((Op.FORWARD,), -1),),
    Op.RECOMPUTE: (Wait((Op.FORWARD,)),),
    Op.BACKWARD: (_OWN_ACTIVATIONS, _GRADIENT),
    Op.INPUT_GRADIENT: (_OWN_ACTIVATIONS, _GRADIENT),
    Op.WEIGHT_GRADIENT: (Wait((Op.INPUT_GRADIENT,)),),
    Op.OPTIMIZER: (Wait((Op.WEIGHT_GRADIENT, Op.BACKWARD)),),
}
"""The dependency relation, for the same micro-batch; the optimizer waits for that of every micro-batch.

Stages outside the model are not waited for. What waits for a stage's neighbour waits for the stages that skips join to
it, too. This is the only place that knows; `Schedule.dependencies` and `Schedule.producers` read it.
"""


Codes = NDArray[np.int64]
"""Actions packed into integers: op, stage and micro-batch + 1 (0 for all of them)."""


def encode(op: Op, stage: int | NDArray[np.int64], micro_batch: int | range | NDArray[np.int64]) -> Codes:
    """Return codes of one op; stage and micro-batch may be arrays that broadcast."""
    micro_batches = np.atleast_1d(np.asarray(micro_batch, dtype=np.int64))
    return (OPS.index(op) << (_STAGE_BITS + _MICRO_BITS)) + (np.asarray(stage) << _MICRO_BITS) + micro_batches + 1


def ops_of(codes: Codes) -> NDArray[np.int64]:
    """Return indices into `OPS`."""
    return codes >> (_STAGE_BITS + _MICRO_BITS)


def stages_of(codes: Codes) -> NDArray[np.int64]:
    return (codes >> _MICRO_BITS) & (_MOST - 1)


def micro_batches_of(codes: Codes) -> NDArray[np.int64]:
    return (codes & (_MOST - 1)) - 1


def decode(code: int) -> Action:
    op, stage, micro_batch = code >> (_STAGE_BITS + _MICRO_BITS), code >> _MICRO_BITS, code & (_MOST - 1)
    return Action(OPS[op], stage & (_MOST - 1), micro_batch - 1)


class Row(Sequence[Action]):
    """What one rank does, in order: a sequence of actions kept as codes."""

    __slots__ = ("codes",)

    def __init__(self, actions: Iterable[Action]) -> None:
        packed = [
            (OPS.index(a.op) << (_STAGE_BITS + _MICRO_BITS)) + (a.stage << _MICRO_BITS) + a.micro_batch + 1
            for a in actions
        ]
        self.codes: Codes = np.array(packed, dtype=np.int64)

    @classmethod
    def of(cls, codes: Codes) -> "Row":
        row = cls.__new__(cls)
        row.codes = codes
        return row

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> "Row": ...
    def __getitem__(self, index: int | slice) -> "Action | Row":
        return Row.of(self.codes[index]) if isinstance(index, slice) else decode(int(self.codes[index]))

    def __iter__(self) -> Iterator[Action]:
        return map(decode, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        codes = other.codes if isinstance(other, Row) else Row(other).codes
        return np.array_equal(self.codes, codes)

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    def __repr__(self) -> str:
        return f"Row({' '.join(map(str, self))})"


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
    """One row of actions per rank. Which rank owns a stage is read off the rows.

    `skips` are the pairs of stages, source before target and no neighbours, between which tensors pass straight.
    `place[op][stage, micro_batch]` is where an action stands in the rows laid end to end, -1 where it does not.
    """

    name: str
    rows: Rows
    skips: tuple[tuple[int, int], ...]
    num_micro_batches: int = field(init=False)
    stage_ranks: tuple[int, ...] = field(init=False)
    place: dict[Op, NDArray[np.int32]] = field(init=False, repr=False, compare=False)

    def __init__(self, name: str, rows: Iterable[Iterable[Action]], skips: Iterable[tuple[int, int]] = ()) -> None:
        compact = tuple(row if isinstance(row, Row) else Row(row) for row in rows)
        codes = np.concatenate([row.codes for row in compact]) if compact else np.empty(0, dtype=np.int64)
        for attribute, value in (
            ("name", name),
            ("rows", compact),
            ("skips", tuple(sorted(skips))),
            ("num_micro_batches", int(micro_batches_of(codes).max(initial=-1)) + 1),
            ("stage_ranks", _stage_ranks(name, compact)),
        ):
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "place", _places(codes, self.num_stages, self.num_micro_batches))

    def __iter__(self) -> Iterator[Action]:
        for row in self.rows:
            yield from row

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.rows))

    @property
    def codes(self) -> Codes:
        """All rows, end to end."""
        return np.concatenate([row.codes for row in self.rows])

    def rank_of(self, action: Action) -> int:
        return self.stage_ranks[action.stage]

    def stages_of_rank(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def splits_backward(self, stage: int) -> bool:
        """Tell whether some backward of the stage is in two parts."""
        return Op.INPUT_GRADIENT in self.place and bool((self.place[Op.INPUT_GRADIENT][stage] >= 0).any())

    def runs(self, op: Op, stage: int, micro_batch: int) -> bool:
        """Tell whether the rows hold this action."""
        return op in self.place and bool(self.place[op][stage, micro_batch] >= 0)

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return what must have finished before `action` may start, besides its rank being free.

        A dependency on another rank's action is a transfer. What the rows lack is named as the relation names it last.
        """
        whole = action.op == Op.OPTIMIZER
        micro_batches = range(self.num_micro_batches) if whole else (action.micro_batch,)
        return tuple(
            Action(self._first_run(wait.ops, stage, micro_batch), stage, micro_batch)
            for wait in WAITS[action.op]
            for stage in self._joined(action.stage, wait.stage_offset)
            for micro_batch in micro_batches
        )

    def sources_of(self, stage: int) -> list[int]:
        """Return the stages from which tensors reach a stage in the forward pass, its neighbour first."""
        return self._joined(stage, -1)

    def targets_of(self, stage: int) -> list[int]:
        """Return the stages that a stage's tensors reach in the forward pass, its neighbour first."""
        return self._joined(stage, +1)

    def producers(self) -> NDArray[np.int64]:
        """Return `dependencies` of all actions at once, as places in the rows laid end to end: one line per wait.

        Where nothing is waited for, the place is `num_actions`; where the rows lack what is waited for, one more.
        The optimizer's place is that of the last it waits for: all are of its own rank.
        """
        nothing, missing = self.num_actions, self.num_actions + 1
        codes = self.codes
        ops, stages, micro_batches = ops_of(codes), stages_of(codes), micro_batches_of(codes)
        most_waits = max(map(len, WAITS.values()))
        found = np.full((most_waits + len(self.skips), len(codes)), nothing, dtype=np.int64)
        for op, waits in WAITS.items():
            chosen = np.flatnonzero(ops == OPS.index(op))
            for line, wait in enumerate(waits):
                inside = chosen[
                    (stages[chosen] + wait.stage_offset >= 0) & (stages[chosen] + wait.stage_offset < self.num_stages)
                ]
                stage = stages[inside] + wait.stage_offset
                if op == Op.OPTIMIZER:
                    of_stage = self._first_places(wait.ops, stage[:, None], np.arange(self.num_micro_batches)[None, :])
                    place = np.where((of_stage < 0).any(axis=1), -1, of_stage.max(axis=1, initial=-1))
                else:
                    place = self._first_places(wait.ops, stage, micro_batches[inside])
                found[line, inside] = np.where(place < 0, missing, place)
                for number, skip in enumerate(self.skips if wait.stage_offset else ()):
                    here, there = skip[:: wait.stage_offset]
                    joined = chosen[stages[chosen] == here]
                    place = self._first_places(wait.ops, np.full(len(joined), there), micro_batches[joined])
                    found[most_waits + number, joined] = np.where(place < 0, missing, place)
        return found

    def transfers(self) -> Iterator[Transfer]:
        """Yield every tensor that crosses ranks, in the order in which the consumers' rows need it."""
        for consumer in self:
            for producer in self.dependencies(consumer):
                source, target = self.rank_of(producer), self.rank_of(consumer)
                if source != target:
                    yield Transfer(producer, consumer, source, target)

    def _joined(self, stage: int, offset: int) -> list[int]:
        """Return the stage so far away, and for a neighbour those that skips join on the same side; only real ones."""
        neighbours = [stage + offset] if 0 <= stage + offset < self.num_stages else []
        if offset and self.skips:
            neighbours += [there for here, there in (skip[::offset] for skip in self.skips) if here == stage]
        return neighbours

    def _first_run(self, ops: tuple[Op, ...], stage: int, micro_batch: int) -> Op:
        return next((op for op in ops if self.runs(op, stage, micro_batch)), ops[-1])

    def _first_places(
        self, ops: tuple[Op, ...], stages: NDArray[np.int64], micro_batches: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        place = np.full(np.broadcast_shapes(stages.shape, micro_batches.shape), -1, dtype=np.int64)
        for op in ops:
            if op in self.place:
                place = np.where(place < 0, self.place[op][stages, micro_batches], place)
        return place


def _stage_ranks(name: str, rows: Rows) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        stages = stages_of(row.codes)
        distinct, first = np.unique(stages, return_index=True)
        for stage, index in sorted(zip(distinct.tolist(), first.tolist(), strict=True), key=lambda pair: pair[1]):
            if ranks.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"schedule {name}: {row[index]} stands on rank {rank}, "
                    f"but stage {stage} belongs to rank {ranks[stage]}",
                    grid(rows, {rank: index}),
                )
    if sorted(ranks) != list(range(len(ranks))):
        last = max(ranks, default=0)
        marked = {ranks[last]: None} if ranks else {}
        raise ScheduleError(f"schedule {name}: stages {sorted(ranks)}: expected all of 0 to {last}", grid(rows, marked))
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _places(codes: Codes, num_stages: int, num_micro_batches: int) -> dict[Op, NDArray[np.int32]]:
    places: dict[Op, NDArray[np.int32]] = {}
    ops = ops_of(codes)
    for index, op in enumerate(OPS):
        standing = np.flatnonzero(ops == index)
        if len(standing) and op != Op.OPTIMIZER:
            place = np.full((num_stages, num_micro_batches), -1, dtype=np.int32)
            place[stages_of(codes[standing]), micro_batches_of(codes[standing])] = standing
            places[op] = place
    return places
