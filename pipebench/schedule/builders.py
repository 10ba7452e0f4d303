"""The schedules that cut the model straight or loop it, and the transforms that apply to any schedule.

A builder is one function from (K ranks, M micro-batches, stages per rank) to rows. `schedule/v_shaped.py` holds the
folded ones, `schedule/catalogue.py` knows them all. Zero-bubble schedules split the backward, so that weight gradients
fill what would be idle.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pipebench.errors import ScheduleError
from pipebench.schedule.action import (
    OPS,
    Codes,
    Op,
    Row,
    Rows,
    Schedule,
    encode,
    micro_batches_of,
    ops_of,
    stages_of,
)

Builder = Callable[[int, int, int], Rows]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named builder and the numbers of stages per rank (`chunks`) it is defined for; `most_chunks` None: any."""

    name: str
    build: Builder
    least_chunks: int
    most_chunks: int | None
    usual_chunks: int


SCHEDULES: dict[str, Recipe] = {}


class Recompute(Enum):
    """What runs its forward again: whole stages before their backward, of which micro-batches, or layers inside it."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"
    LAYER = "layer"
    SELECTIVE = "selective"
    BUDGET = "budget"


IN_ROWS = (Recompute.EXCEPT_LAST, Recompute.ALWAYS)
"""Settings that put an `R` into the rows; with all others the rows are those of `never`."""


def schedule(
    name: str, least_chunks: int = 1, most_chunks: int | None = 1, usual_chunks: int = 1
) -> Callable[[Builder], Builder]:
    """Register a builder under the name that users write."""

    def register(builder: Builder) -> Builder:
        SCHEDULES[name] = Recipe(name, builder, least_chunks, most_chunks, usual_chunks)
        return builder

    return register


@schedule("gpipe")
def gpipe(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """All forwards, then all backwards, last micro-batch first (Huang et al. 2019, fig. 2c).

    The reverse order frees the newest activations first and lets `except_last` pay.
    """
    forwards = range(num_micro_batches)
    return tuple(
        Row.of(np.concatenate([encode(Op.FORWARD, stage, forwards), encode(Op.BACKWARD, stage, forwards[::-1])]))
        for stage in range(num_ranks)
    )


@schedule("naive")
def naive(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """One micro-batch through all stages and back at a time: layer-wise model parallelism, no overlap."""
    one_by_one = range(num_micro_batches)
    return tuple(
        Row.of(alternate(encode(Op.FORWARD, stage, one_by_one), encode(Op.BACKWARD, stage, one_by_one)))
        for stage in range(num_ranks)
    )


@schedule("1f1b")
def one_forward_one_backward(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """Warm up, then alternate, then drain (PipeDream-Flush; Narayanan et al. 2021, fig. 4 top).

    Same bubble as GPipe, but stage s holds at most num_ranks - s micro-batches.
    """
    in_order = range(num_micro_batches)
    return tuple(
        Row.of(
            warm_up_then_alternate(
                encode(Op.FORWARD, stage, in_order), encode(Op.BACKWARD, stage, in_order), num_ranks - 1 - stage
            )
        )
        for stage in range(num_ranks)
    )


@schedule("interleaved", most_chunks=None, usual_chunks=2)
def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """1F1B over `chunks` stages a rank, stage c*K + r on rank r (Narayanan et al. 2021, section 2.2.2, fig. 4 bottom).

    Micro-batches go in groups of K, each group through one chunk after the other; backwards likewise, last chunk first.
    Where K does not divide M, it is the order for the next multiple with the surplus micro-batches taken out, which
    leaves every wait as it was. The bubble is 1F1B's divided by `chunks`.
    """
    groups = [range(first, first + num_ranks) for first in range(0, num_micro_batches, num_ranks)]

    def in_groups(op: Op, rank: int, order: range) -> Codes:
        return np.concatenate([encode(op, chunk * num_ranks + rank, group) for group in groups for chunk in order])

    def row(rank: int) -> Row:
        to_the_last = num_ranks - 1 - rank
        codes = warm_up_then_alternate(
            in_groups(Op.FORWARD, rank, range(chunks)),
            in_groups(Op.BACKWARD, rank, range(chunks)[::-1]),
            2 * to_the_last + (chunks - 1) * num_ranks if chunks > 1 else to_the_last,  # one chunk: plain 1F1B
        )
        return Row.of(codes[micro_batches_of(codes) < num_micro_batches])

    return tuple(row(rank) for rank in range(num_ranks))


@schedule("looped_bfs", most_chunks=None, usual_chunks=2)
def looped_bfs(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """GPipe over `chunks` stages a rank, all micro-batches through one chunk before the next (Lamy-Poirier 2023).

    The bubble is GPipe's divided by `chunks`; everything is in flight at once.
    """
    forwards = range(num_micro_batches)
    return tuple(
        Row.of(
            np.concatenate(
                [encode(Op.FORWARD, chunk * num_ranks + rank, forwards) for chunk in range(chunks)]
                + [encode(Op.BACKWARD, chunk * num_ranks + rank, forwards[::-1]) for chunk in range(chunks)[::-1]]
            )
        )
        for rank in range(num_ranks)
    )


@schedule("zb_h1")
def zb_h1(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """1F1B's memory, about a third of its bubble (Qi et al. 2024, section 2.3, fig. 3 top)."""
    return tuple(_handcrafted(rank, num_micro_batches, num_ranks - rank, rank) for rank in range(num_ranks))


@schedule("zb_h2")
def zb_h2(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """No bubble but the fill, for about twice 1F1B's memory (Qi et al. 2024, section 2.3, fig. 3 bottom)."""
    return tuple(
        _handcrafted(rank, num_micro_batches, 2 * (num_ranks - rank) - 1, 2 * rank) for rank in range(num_ranks)
    )


def _handcrafted(stage: int, num_micro_batches: int, num_warm_up: int, lag: int) -> Row:
    """Return `num_warm_up` forwards, rounds of I, the W of `lag` micro-batches ago and the next F, and the W left.

    Each action gets the place it would have if no round lacked anything, and the order follows from that.
    """
    m = np.arange(num_micro_batches)
    place = np.concatenate([3 * (m - num_warm_up) + 2, 3 * m, 3 * (m + lag) + 1])
    codes = np.concatenate([encode(op, stage, m) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)])
    return Row.of(codes[np.argsort(place, kind="stable")])


def alternate(first: Codes, second: Codes) -> Codes:
    """Return first[0], second[0], first[1], second[1], ... of arrays of equal length."""
    return np.stack([first, second], axis=1).ravel()


def warm_up_then_alternate(forwards: Codes, backwards: Codes, num_warm_up: int) -> Codes:
    """Return `num_warm_up` forwards, then pairs of forward and backward, then the remaining backwards."""
    warm_up = min(num_warm_up, len(forwards))
    paired = len(forwards) - warm_up
    return np.concatenate([forwards[:warm_up], alternate(forwards[warm_up:], backwards[:paired]), backwards[paired:]])


def with_recompute(schedule: Schedule, recompute: Recompute) -> Schedule:
    """Put an `R` right before the backward (or its input gradient) of every micro-batch that `recompute` names.

    It waits for nothing from another rank, so it runs while the gradient is still on its way. Raise ScheduleError
    for rows that hold recomputes of their own. What recomputes inside a backward leaves the rows alone.
    """
    if recompute not in IN_ROWS:
        return schedule
    if Op.RECOMPUTE in schedule.place:
        raise ScheduleError(f"schedule {schedule.name}: has recomputes of its own: expected recompute=never")
    most = schedule.num_micro_batches - (recompute == Recompute.EXCEPT_LAST)

    def expand(codes: Codes) -> Codes:
        uses_activations = np.isin(ops_of(codes), [OPS.index(Op.BACKWARD), OPS.index(Op.INPUT_GRADIENT)])
        chosen = np.flatnonzero(uses_activations & (micro_batches_of(codes) < most))
        again = encode(Op.RECOMPUTE, stages_of(codes[chosen]), micro_batches_of(codes[chosen]))
        return np.insert(codes, chosen, again)

    return Schedule(schedule.name, tuple(Row.of(expand(row.codes)) for row in schedule.rows), schedule.skips)


def with_skips(schedule: Schedule, skips: Iterable[tuple[int, int]]) -> Schedule:
    """Let tensors pass straight from one stage to another, source before target, past at least one between."""
    return Schedule(schedule.name, schedule.rows, skips)


def only_forwards(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """Return the forwards of the first `num_micro_batches` alone, in their order: what an evaluation runs."""

    def kept(codes: Codes) -> Codes:
        wanted = (ops_of(codes) == OPS.index(Op.FORWARD)) & (micro_batches_of(codes) < num_micro_batches)
        return np.extract(wanted, codes)

    return Schedule(schedule.name, tuple(Row.of(kept(row.codes)) for row in schedule.rows), schedule.skips)


def with_optimizer_last(schedule: Schedule) -> Schedule:
    """Let each rank step its optimizers at its row's end, for updates that need the gradients of all its stages.

    Where ranks wait for one another before they update, an optimizer amid a row would wait for ranks that wait for it.
    """

    def reorder(codes: Codes) -> Codes:
        return codes[np.argsort(ops_of(codes) == OPS.index(Op.OPTIMIZER), kind="stable")]

    stepped = with_optimizer(schedule)
    return Schedule(schedule.name, tuple(Row.of(reorder(row.codes)) for row in stepped.rows), schedule.skips)


def with_optimizer(schedule: Schedule) -> Schedule:
    """Let each stage step its optimizer as soon as its last gradient is there."""

    def expand(codes: Codes) -> Codes:
        stages = stages_of(codes)
        gives_gradients = np.isin(ops_of(codes), [OPS.index(Op.BACKWARD), OPS.index(Op.WEIGHT_GRADIENT)])
        last = [
            np.flatnonzero(gives_gradients & (stages == stage)).max() for stage in np.unique(stages[gives_gradients])
        ]
        steps = [encode(Op.OPTIMIZER, int(stages[place]), -1)[0] for place in last]
        return np.insert(codes, np.array(last, dtype=np.int64) + 1, steps)

    return Schedule(schedule.name, tuple(Row.of(expand(row.codes)) for row in schedule.rows), schedule.skips)
