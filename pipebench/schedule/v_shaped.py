"""Schedules whose ranks hold two half-size stages each, folded like a V: rank r has stages r and 2K-1-r.

The last rank holds the two stages in the middle, so it turns a micro-batch around without a transfer, and all ranks
keep a micro-batch for about the same total time. The backward is split; an order is planned in unit slots, as if
F, I and W cost the same, and kept whatever they cost.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipebench.schedule.action import WAITS, Op, Row, Rows, Schedule, encode
from pipebench.schedule.builders import schedule
from pipebench.schedule.simulate import play

F, I, W = Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT  # noqa: E741

Slots = dict[Op, NDArray[np.int64]]
"""By op, the slot in which each stage runs each micro-batch: one line per stage."""

_CODE = {F: 1, I: 2, W: 3}
"""What a slot of a `_Lane` holds; 0 where it is free."""

INTERVAL = 6
"""Slots from one micro-batch to the next: F, I and W of two stages."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Slots from one pass of a micro-batch to the next, on its way along the V and back.

    `first` leads from rank to rank on the first half of the V, `turn` across the last rank, `second` back to rank 0,
    each as (forward, backward); `top` leads from the last forward to the first backward, both on rank 0.
    """

    first: tuple[int, int]
    turn: tuple[int, int]
    second: tuple[int, int]
    top: int

    def slots(self, num_ranks: int, num_micro_batches: int) -> Slots:
        """Return the slots of forwards and of input gradients when the pattern repeats for every micro-batch."""
        forward, backward = (
            [first] * (num_ranks - 1) + [turn] + [second] * (num_ranks - 1)
            for first, turn, second in zip(self.first, self.turn, self.second, strict=True)
        )
        along = np.cumsum([0, *forward, self.top, *backward])
        later = INTERVAL * np.arange(num_micro_batches)
        return {F: along[: 2 * num_ranks, None] + later, I: along[: 2 * num_ranks - 1 : -1, None] + later}


@schedule("zb_v", 2, 2, 2)
def zb_v(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """1F1B's memory and no bubble but the fill: ZB-V and V-ZB (Qi et al. 2024, arXiv:2405.15362, table 1).

    The offsets are our own: all ranks repeat F F I I W W, three slots after their neighbour. Makespan and peaks are
    those of the published greedy order.
    """
    return _from_pattern(Pattern((3, 3), (1, 1), (3, 3), top=1), num_ranks, num_micro_batches)


@schedule("v_half", 2, 2, 2)
def v_half(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """Towards half of 1F1B's memory and of its bubble (Qi et al. 2024, arXiv:2405.15362, table 9)."""
    top = 4 if num_ranks % 2 == 0 else 1
    return _from_pattern(Pattern((2, 2), (2, 1), (1, 1), top), num_ranks, num_micro_batches)


@schedule("v_min", 2, 2, 2)
def v_min(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """Towards a third of 1F1B's memory, two thirds of its bubble (Qi et al. 2024, arXiv:2405.15362, table 8)."""
    top = 3 if num_ranks % 3 == 0 else 1
    return _from_pattern(Pattern((1, 1), (1, 1), (1, 1), top), num_ranks, num_micro_batches)


def _from_pattern(pattern: Pattern, num_ranks: int, num_micro_batches: int) -> Rows:
    """Repeat a pattern and pull its warm-up and cool-down together without raising the peak.

    Weight gradients take the slots that are left. In the first round they move too, so that forwards may come
    earlier where memory is freed earlier; in the second they are only counted, and dealt out anew after it.
    """
    slots = pattern.slots(num_ranks, num_micro_batches)
    slots = _squeeze(_pull(slots | {W: _weights_between(slots, oldest_first=True)}))
    slots = _squeeze(_pull({F: slots[F], I: slots[I]}))
    return _rows(slots | {W: _weights_between(slots, oldest_first=False)})


def rank_of(stage: int, num_stages: int) -> int:
    """Return the rank of a stage that stands on a V of `num_stages`."""
    return min(stage, num_stages - 1 - stage)


def _weights_between(slots: Slots, oldest_first: bool) -> NDArray[np.int64]:
    """Return slots for the weight gradients: each rank's free ones, as soon as one is pending.

    Of several pending, the oldest goes first, or that of the V's second half.
    """
    num_stages = len(slots[F])
    weights = np.zeros_like(slots[F])
    for rank in range(num_stages // 2):
        stages = [rank, num_stages - 1 - rank]
        forwards = set(slots[F][stages].ravel().tolist())
        gradients = {slot: (stage, m) for stage in stages for m, slot in enumerate(slots[I][stage].tolist())}
        pending: list[tuple[int, int, int]] = []
        slot = 0
        while pending or gradients:
            if slot in gradients:
                stage, m = gradients.pop(slot)
                heapq.heappush(pending, (slot if oldest_first else -stage, stage, m))
            elif pending and slot not in forwards:
                _, stage, m = heapq.heappop(pending)
                weights[stage, m] = slot
            slot += 1
    return weights


def _pull(slots: Slots) -> Slots:
    """Move each pass of warm-up and cool-down, oldest first, to the first free slot that its waits and the peak allow.

    The warm-up ends with the first input gradient of stage 0, the cool-down begins after its last forward; what
    stands between repeats the pattern and stays. Without weight gradients only the cool-down moves.
    """
    slots = {op: table.copy() for op, table in slots.items()}
    num_stages = len(slots[F])
    lanes = [_Lane(slots, [rank, num_stages - 1 - rank]) for rank in range(num_stages // 2)]
    most = max(lane.peak() for lane in lanes)
    steady_from, steady_until = slots[I][0, 0] if W in slots else 0, slots[F][0, -1]
    passes = sorted(
        (int(slot), rank_of(stage, num_stages), op, stage, m)
        for op, table in slots.items()
        for (stage, m), slot in np.ndenumerate(table)
        if slot > steady_until or slot < steady_from
    )
    for slot, rank, op, stage, m in passes:
        slots[op][stage, m] = lanes[rank].move(op, slot, _earliest(slots, op, stage, m), most)
    return slots


def _earliest(slots: Slots, op: Op, stage: int, micro_batch: int) -> int:
    """Return the slot after all that a pass waits for, and after its stage's pass of the micro-batch before."""
    before = [slots[op][stage, micro_batch - 1]] if micro_batch else []
    for wait in WAITS[op]:
        if 0 <= stage + wait.stage_offset < len(slots[op]):
            producer = next(other for other in wait.ops if other in slots)
            before.append(slots[producer][stage + wait.stage_offset, micro_batch])
    return int(max(before, default=-1)) + 1


class _Lane:
    """What one rank runs in each slot, and how many passes' activations it holds.

    Weight gradients that have no slot are counted as if they ran in free ones.
    """

    def __init__(self, slots: Slots, stages: list[int]) -> None:
        self.codes = np.zeros(1 + max(int(table[stages].max()) for table in slots.values()), dtype=np.int64)
        for op, table in slots.items():
            self.codes[table[stages]] = _CODE[op]
        self.has_weights = W in slots

    def peak(self) -> int:
        forward, gradient = self.codes == _CODE[F], self.codes == _CODE[I]
        if self.has_weights:
            freed = np.cumsum(self.codes == _CODE[W])
        else:
            pending = np.cumsum(gradient.astype(np.int64) - (self.codes == 0))
            pending -= np.minimum(np.minimum.accumulate(pending), 0)  # a free slot with none pending stays free
            freed = np.cumsum(gradient) - pending
        return int((np.cumsum(forward) - freed).max())

    def move(self, op: Op, slot: int, earliest: int, most: int) -> int:
        """Move what stands in `slot` to the first free one from `earliest` that keeps the peak, and return it."""
        self.codes[slot] = 0
        for free in (earliest + np.flatnonzero(self.codes[earliest:slot] == 0)).tolist():
            self.codes[free] = _CODE[op]
            if self.peak() <= most:
                return int(free)
            self.codes[free] = 0
        self.codes[slot] = _CODE[op]
        return slot


def _squeeze(slots: Slots) -> Slots:
    """Return the slots of F and I when each pass runs as soon as its rank is free and what it waits for is done."""
    if W not in slots:
        slots = slots | {W: _weights_between(slots, oldest_first=True)}
    planned = Schedule("planned", _rows(slots))
    start = play(planned, np.ones(planned.num_actions)).start_s.astype(np.int64)
    return {op: start[planned.place[op]] for op in (F, I)}


def _rows(slots: Slots) -> Rows:
    """Return each rank's passes in the order of their slots."""
    num_stages, num_micro_batches = slots[F].shape
    rows = []
    for rank in range(num_stages // 2):
        passes = [(op, stage) for op in (F, I, W) for stage in (rank, num_stages - 1 - rank)]
        codes = np.concatenate([encode(op, stage, range(num_micro_batches)) for op, stage in passes])
        rows.append(Row.of(codes[np.argsort(np.concatenate([slots[op][stage] for op, stage in passes]))]))
    return tuple(rows)
