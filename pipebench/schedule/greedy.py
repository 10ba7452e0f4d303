"""Two greedy schedulers that build an order for given costs and a memory limit; `schedule/search.py` judges them.

One plans in rounds of one forward and one gradient a stage, the other lets every rank decide when it becomes free. Both
write into a `Board`, which knows each rank's clock, kept bytes and pending weight gradients.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipebench.schedule.action import WAITS, Action, Op, Schedule
from pipebench.schedule.builders import Recompute
from pipebench.schedule.memory import StageActivations
from pipebench.schedule.simulate import Costs
from pipebench.schedule.v_shaped import rank_of

F, I, W = Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT  # noqa: E741


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be ordered, and the seconds and bytes of it."""

    num_ranks: int
    num_micro_batches: int
    chunks: int
    costs: Costs
    activations: tuple[StageActivations, ...]
    limit_bytes: float
    transfer_s: float | Sequence[float]
    recompute: Recompute

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.num_stages) if self.chunks == 2 else stage % self.num_ranks

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def recomputes(self, micro_batch: int) -> bool:
        last = micro_batch == self.num_micro_batches - 1
        return self.recompute == Recompute.ALWAYS or (self.recompute == Recompute.EXCEPT_LAST and not last)


def _own(kept: StageActivations, op: Op) -> float:
    """Return what an action needs at most above what was there before it, as far as that is known."""
    return kept.peaks[op].activation_bytes if op in kept.peaks else 0.0


def within(num_bytes: float, limit_bytes: float) -> bool:
    """Tell whether bytes keep a limit; sums of bytes that are no whole numbers are only nearly exact."""
    return num_bytes <= limit_bytes * (1 + 1e-9)


class Board:
    """The rows so far, with each rank's clock, idle time, kept bytes and pending weight gradients.

    Micro-batches go in order through each op of a stage, so the next action of (op, stage) is known.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        ranks, stages = range(task.num_ranks), range(task.num_stages)
        self.rank = [task.rank_of(stage) for stage in stages]
        self.stages = [[stage for stage in stages if self.rank[stage] == rank] for rank in ranks]
        self.clock_s = [0.0 for _ in ranks]
        self.idle_s = [0.0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
        self.hop_s: list[float] = np.broadcast_to(np.asarray(task.transfer_s, dtype=np.float64), len(stages)).tolist()
        self.ends: dict[Op, list[list[float]]] = {op: [[] for _ in stages] for op in (F, I)}
        self.inputs = {(op, stage): self._inputs(op, stage) for op in (F, I) for stage in stages}
        self.seconds = {op: [task.costs[stage, op] for stage in stages] for op in (F, I, W, Op.RECOMPUTE)}
        self.again = [task.recomputes(m) for m in range(task.num_micro_batches + 1)]  # one more: asked after the last
        self.spare = [self._spare(stage) for stage in stages]

    def _inputs(self, op: Op, stage: int) -> list[tuple[list[float], float]]:
        """Return the ends of what the actions of (op, stage) wait for, each with the seconds it then travels."""
        inputs = []
        for wait in WAITS[op]:
            near = stage + wait.stage_offset
            if 0 <= near < len(self.rank):
                source = next(other for other in wait.ops if other in self.ends)
                crosses = self.rank[near] != self.rank[stage]
                inputs.append((self.ends[source][near], self.hop_s[max(near, stage)] if crosses else 0.0))
        return inputs

    def _spare(self, stage: int) -> float:
        """Return the bytes a forward must leave free, so that the oldest micro-batch always finds room to go on.

        That is what a gradient takes while it runs, and on a V's first half a forward of the rank's other stage.
        """
        kept = [self.task.activations[own] for own in self.stages[self.rank[stage]]]
        recomputing = self.task.recompute != Recompute.NEVER
        gradient = max(
            max(
                one.full_bytes - one.input_bytes if recomputing else 0.0,
                one.weight_bytes - one.full_bytes,
                _own(one, I),
            )
            for one in kept
        )
        other_forward = kept[-1].full_bytes if len(kept) == 2 and stage < self.task.num_ranks else 0.0
        return gradient + other_forward

    def count(self, op: Op, stage: int) -> int:
        return len(self.ends[op][stage])

    def arrival_s(self, op: Op, stage: int) -> float:
        """Return when the next action of (op, stage) has its input; inf while that is not known, and after the last."""
        m = self.count(op, stage)
        if m == self.task.num_micro_batches:
            return math.inf
        return max(
            (ends[m] + hop_s if m < len(ends) else math.inf for ends, hop_s in self.inputs[op, stage]), default=0.0
        )

    def again_s(self, op: Op, stage: int) -> float:
        """Return the seconds of the recompute that comes before the next action of (op, stage)."""
        return self.seconds[Op.RECOMPUTE][stage] if op == I and self.again[self.count(op, stage)] else 0.0

    def ready_s(self, op: Op, stage: int) -> float:
        """Return from when on the next action of (op, stage), its recompute first, would not have to wait."""
        return self.arrival_s(op, stage) - self.again_s(op, stage)

    def changes(self, op: Op, stage: int) -> tuple[float, float]:
        """Return how many more bytes the next action of (op, stage) keeps while it runs, and after it."""
        kept = self.task.activations[stage]
        from_forward = kept.input_bytes if self.again[self.count(op, stage)] else kept.full_bytes
        if op == F:
            return max(from_forward, _own(kept, F)), from_forward
        after = kept.weight_bytes - from_forward
        return max(kept.full_bytes - from_forward + max(0.0, _own(kept, I)), after), after

    def fits(self, op: Op, stage: int, spare: float = 0.0) -> bool:
        """Tell whether the next action of (op, stage) keeps the limit and leaves `spare` bytes."""
        during, _ = self.changes(op, stage)
        return within(self.held[self.rank[stage]] + during + spare, self.task.limit_bytes)

    def run(self, op: Op, stage: int) -> None:
        """Append the next F or I of a stage, with its recompute where there is one."""
        rank = self.rank[stage]
        wait_s = max(0.0, self.ready_s(op, stage) - self.clock_s[rank])
        if self.rows[rank]:  # what passes before its first action is no idle time of a rank's own
            self.idle_s[rank] += wait_s
        self.clock_s[rank] += wait_s + self.again_s(op, stage) + self.seconds[op][stage]
        self.held[rank] += self.changes(op, stage)[1]
        self.rows[rank].append(Action(op, stage, self.count(op, stage)))
        if op == I:
            self.pending[rank].append((stage, self.count(op, stage)))
        self.ends[op][stage].append(self.clock_s[rank])

    def next_weight_s(self, rank: int) -> float:
        stage, _ = self.pending[rank][0]
        return self.seconds[W][stage]

    def run_weight(self, rank: int) -> None:
        """Append the oldest pending weight gradient."""
        stage, m = self.pending[rank].popleft()
        self.clock_s[rank] += self.seconds[W][stage]
        self.held[rank] -= self.task.activations[stage].weight_bytes
        self.rows[rank].append(Action(W, stage, m))

    def allowance_s(self, rank: int) -> float:
        """Return how long the rank may idle before it becomes the one that idles most."""
        return max(self.idle_s) - self.idle_s[rank]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Variants of planning in rounds.

    `overrun`: a warm-up forward may still run when the first gradient arrives. `hold_back`: a stage that is ahead
    of the next leaves out a round's forward where that costs it no idle time that counts. `always_fill`: a weight
    gradient starts in any wait, though it ends after it, and not only where the wait would count.
    """

    overrun: bool
    hold_back: bool
    always_fill: bool


def by_rounds(task: Task, rules: Rounds) -> Iterator[list[list[Action]]]:
    """Yield the order that comes of one F and one I of every stage a round, with W in the waits; nothing if stuck.

    The idea is the heuristic of Qi et al. 2024 (arXiv:2401.10241, section 3.1): warm up as far as memory and the first
    gradient's arrival allow, and let no stage idle that has a weight gradient to run, unless another idles more.
    """
    board = Board(task)
    stages = range(task.num_stages)
    for stage in stages:
        if not board.fits(F, stage):
            return
        board.run(F, stage)
    for stage, more in enumerate(_warm_up(board, rules)):
        for _ in range(more):
            board.run(F, stage)
    for stage in stages[::-1]:
        board.run(I, stage)
    for _ in range(1, task.num_micro_batches):
        steps = [(F, stage) for stage in _forwarding(board, rules)] + [(I, stage) for stage in stages[::-1]]
        for op, stage in steps:
            if not _make_room(board, op, stage):
                return
            _fill_wait(board, op, stage, rules)
            if op == I and stage == 0 and board.count(F, 0) == task.num_micro_batches:
                _run_weights(board, 0)
            board.run(op, stage)
    for rank in range(task.num_ranks):
        _run_weights(board, rank)
    yield board.rows


def _warm_up(board: Board, rules: Rounds) -> list[int]:
    """Return how many forwards each stage runs beyond its first before its first gradient arrives."""
    task, num_stages = board.task, board.task.num_stages
    more = [0] * num_stages
    back_s = -math.inf
    for stage in reversed(range(num_stages)):
        forward_s, clock_s = board.seconds[F][stage], board.clock_s[stage]
        per_forward = board.changes(F, stage)[0]
        arrival_s = back_s + (board.hop_s[stage + 1] if stage + 1 < num_stages else 0.0)
        while (
            board.count(F, stage) + more[stage] < task.num_micro_batches
            and board.fits(F, stage, board.spare[stage] + more[stage] * per_forward)
            and (clock_s < arrival_s if rules.overrun else clock_s + forward_s <= arrival_s)
        ):
            more[stage] += 1
            clock_s += forward_s
        back_s = max(clock_s, arrival_s) + board.seconds[I][stage]
    for stage in range(1, num_stages):
        ahead = more[stage - 1]
        has_all = ahead + 1 == task.num_micro_batches
        more[stage] = min(more[stage], ahead if has_all else max(ahead - 1, 0))
    return more


def _forwarding(board: Board, rules: Rounds) -> list[int]:
    """Return the stages that run a forward in this round; one does so only if the next does, or has run all."""
    num_stages, num_micro_batches = board.task.num_stages, board.task.num_micro_batches
    chosen: list[int] = []
    for stage in reversed(range(num_stages)):
        left = board.count(F, stage) < num_micro_batches
        follows = stage + 1 == num_stages or stage + 1 in chosen
        if left and follows and not (rules.hold_back and _better_held_back(board, stage)):
            chosen.append(stage)
    return chosen[::-1]


def _better_held_back(board: Board, stage: int) -> bool:
    """Tell whether a stage two forwards ahead of the next would come late for its gradient and may as well wait."""
    following = stage + 1
    if following == board.task.num_stages or board.count(F, stage) < board.count(F, following) + 2:
        return False
    gradient_s = (
        board.clock_s[following] + board.seconds[F][following] + board.seconds[I][following] + board.hop_s[following]
    )
    clock_s = board.clock_s[stage]
    freed = board.task.activations[stage].weight_bytes
    num_weights = 0
    while not board.fits(F, stage, -num_weights * freed) and num_weights < len(board.pending[stage]):
        num_weights += 1
    ends_s = clock_s + board.seconds[F][stage] + num_weights * board.seconds[W][stage]
    if clock_s >= gradient_s:
        return True
    return ends_s > gradient_s and gradient_s - clock_s <= board.allowance_s(stage)


def _make_room(board: Board, op: Op, stage: int) -> bool:
    rank = board.rank[stage]
    spare = board.spare[stage] if op == F else 0.0
    while not board.fits(op, stage, spare):
        if not board.pending[rank]:
            return False
        board.run_weight(rank)
    return True


def _fill_wait(board: Board, op: Op, stage: int, rules: Rounds) -> None:
    """Run weight gradients until the input is there, and one that ends later where the rest of the wait would count."""
    rank, ready_s = board.rank[stage], board.ready_s(op, stage)
    while board.pending[rank] and board.clock_s[rank] + board.next_weight_s(rank) <= ready_s:
        board.run_weight(rank)
    wait_s = ready_s - board.clock_s[rank]
    if board.pending[rank] and wait_s > 0 and (rules.always_fill or wait_s > board.allowance_s(rank)):
        board.run_weight(rank)


def _run_weights(board: Board, rank: int) -> None:
    while board.pending[rank]:
        board.run_weight(rank)


@dataclass(frozen=True, slots=True)
class Habits:
    """Variants of deciding when a rank becomes free.

    A forward (a weight gradient) starts only if the next gradient (the next action that has room) is known to arrive
    no sooner than this share of its seconds from now. `later_...`: of two stages that are ready the later one goes
    first. `early_recompute`: a recompute starts before its gradient is there, so as to end when it arrives.
    """

    forward_share: float
    weight_share: float
    later_forward_first: bool
    later_gradient_first: bool
    early_recompute: bool


Decide = Callable[[Board, int], float]
"""Run one action on a rank that is free, and return when to look again: inf where nothing to come is known."""


def by_events(task: Task, decide: Decide) -> Iterator[list[list[Action]]]:
    """Yield the order that comes of each rank deciding when it is free and something may have come; nothing if stuck.

    A rank that waits is asked again when a neighbour has finished something.
    """
    board = Board(task)
    neighbours = [
        {board.rank[near] for stage in own for near in (stage - 1, stage + 1) if 0 <= near < task.num_stages} - {rank}
        for rank, own in enumerate(board.stages)
    ]
    agenda = [(0.0, rank) for rank in range(task.num_ranks)]
    waits_until_s = [0.0] * task.num_ranks
    while agenda:
        now_s, rank = heapq.heappop(agenda)
        if now_s < board.clock_s[rank]:
            continue  # it was asked before, and is busy now
        num_run = len(board.rows[rank])
        board.clock_s[rank] = now_s
        waits_until_s[rank] = decide(board, rank)
        if waits_until_s[rank] < math.inf:
            heapq.heappush(agenda, (waits_until_s[rank], rank))
        if len(board.rows[rank]) > num_run:
            for other in neighbours[rank]:
                if waits_until_s[other] > board.clock_s[rank]:
                    heapq.heappush(agenda, (board.clock_s[rank], other))
    if sum(map(len, board.rows)) == 3 * task.num_stages * task.num_micro_batches:
        yield board.rows


def by_habits(habits: Habits) -> Decide:
    """Return the decision for a gradient, else a forward, else a weight gradient."""

    def decide(board: Board, rank: int) -> float:
        now_s, stages = board.clock_s[rank], board.stages[rank]
        ready_s = board.ready_s if habits.early_recompute else board.arrival_s
        gradients = {stage: ready_s(I, stage) for stage in stages if board.fits(I, stage)}
        forwards = {stage: ready_s(F, stage) for stage in stages if board.fits(F, stage, board.spare[stage])}
        gradient_s, forward_s = (min(each.values(), default=math.inf) for each in (gradients, forwards))
        if gradient_s <= now_s:
            ready = [stage for stage, from_s in gradients.items() if from_s <= now_s]
            return _run(board, I, max(ready) if habits.later_gradient_first else min(ready))
        if forward_s <= now_s:
            ready = [stage for stage, from_s in forwards.items() if from_s <= now_s]
            stage = max(ready) if habits.later_forward_first else min(ready)
            if gradient_s >= now_s + habits.forward_share * board.seconds[F][stage]:
                return _run(board, F, stage)
            forward_s = math.inf
        lacks_room = len(gradients) + len(forwards) < 2 * len(stages)
        return _weight_or_wait(board, rank, min(gradient_s, forward_s), lacks_room, habits.weight_share)

    return decide


def by_plan(schedule: Schedule, weight_share: float) -> Decide:
    """Return the decision that keeps a schedule's order of forwards and gradients and deals out the W anew."""
    plans = [deque((F if a.op == F else I, a.stage) for a in row if a.op != W) for row in schedule.rows]

    def decide(board: Board, rank: int) -> float:
        if not plans[rank]:
            return _weight_or_wait(board, rank, math.inf, False, weight_share)
        op, stage = plans[rank][0]
        fits, ready_s = board.fits(op, stage), board.ready_s(op, stage)
        if fits and ready_s <= board.clock_s[rank]:
            plans[rank].popleft()
            return _run(board, op, stage)
        return _weight_or_wait(board, rank, ready_s if fits else math.inf, not fits, weight_share)

    return decide


def _run(board: Board, op: Op, stage: int) -> float:
    board.run(op, stage)
    return board.clock_s[board.rank[stage]]


def _weight_or_wait(board: Board, rank: int, next_s: float, lacks_room: bool, weight_share: float) -> float:
    now_s = board.clock_s[rank]
    if board.pending[rank] and (lacks_room or next_s >= now_s + weight_share * board.next_weight_s(rank)):
        board.run_weight(rank)
        return board.clock_s[rank]
    return next_s
