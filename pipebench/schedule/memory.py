"""How many micro-batches, and how many bytes, a rank holds, read off the order of its row.

GPipe's model (Huang et al. 2019, section 2.3) counts what is kept from forward to backward: with recompute, O(N) for
the inputs of the N samples of a mini-batch and O((L/K)(N/M)) for the layers of one micro-batch. On top of that an
action has a peak of its own while its layers run: what they allocate and let go of again, the gradient that arrives,
and the gradients of weights before they are added to those there are. A rank's peak is the most of both together with
the gradients that earlier actions have left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipebench.schedule.action import OPS, Op, Row, Schedule, micro_batches_of, ops_of, stages_of


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at a moment when there are most: of gradients of parameters that stay, and all else."""

    activation_bytes: float = 0
    gradient_bytes: float = 0

    @property
    def total_bytes(self) -> float:
        return self.activation_bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes one stage keeps for one micro-batch, and those it needs while it works on it.

    `full_bytes`: between a forward (or recompute) and its backward, the stage's input included.
    `input_bytes`: between a forward that will be recomputed and its recompute.
    `weight_bytes`: between the two parts of a split backward (M_W of Qi et al. 2024, table 1).
    `peaks`: what an action needs at most above what the rank held before it, where that is known.
    `first_peaks`: the same for the first action of an op in a step, which allocates the parameters' gradients;
    `gradient_bytes`: what it leaves of those.
    """

    full_bytes: float
    input_bytes: float
    weight_bytes: float = 0.0
    peaks: Mapping[Op, Peak] = field(default_factory=dict)
    first_peaks: Mapping[Op, Peak] = field(default_factory=dict)
    gradient_bytes: Mapping[Op, float] = field(default_factory=dict)


def peak_activation_bytes(schedule: Schedule, stages: Sequence[StageActivations]) -> list[float]:
    """Return each rank's activations in bytes at the moment when it holds most, gradients of parameters counted."""
    return [peak_bytes(schedule, row, stages).activation_bytes for row in schedule.rows]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Return for each rank the most micro-batches it holds between a forward and its (input) gradient.

    With several stages on a rank, each holds its own: the unit is one stage's micro-batch.
    """
    return [round(peak) for peak in peak_activation_bytes(schedule, [StageActivations(1, 1, 0)] * schedule.num_stages)]


def peak_bytes(schedule: Schedule, row: Row, stages: Sequence[StageActivations]) -> Peak:
    """Return the most that a rank holds within an action or after one, gradients of parameters counted."""
    if not row:
        return Peak()
    held, gradients = held_bytes(schedule, row, stages), _gradient_bytes(row, stages)
    held_within, gradients_within = _within(row, stages)
    activations = np.concatenate([held, _before(held) + held_within])
    beside = np.concatenate([gradients, _before(gradients) + gradients_within])
    most = int(np.argmax(activations + beside))
    return Peak(float(activations[most]), float(beside[most]))


def most_activation_bytes(schedule: Schedule, row: Row, stages: Sequence[StageActivations]) -> float:
    """Return the most activations that a rank holds at any time, be its peak with gradients another."""
    if not row:
        return 0.0
    held = held_bytes(schedule, row, stages)
    return float(np.concatenate([held, _before(held) + _within(row, stages)[0]]).max())


def _before(after: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([[0.0], after[:-1]])


def _within(row: Row, stages: Sequence[StageActivations]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what each action needs at most above what was there before: activations, and gradients that stay."""
    peaks = [[kept.peaks for kept in stages], [kept.first_peaks for kept in stages]]
    nothing = Peak()
    numbers = [
        [[(peak.activation_bytes, peak.gradient_bytes) for peak in (of.get(op, nothing) for op in OPS)] for of in which]
        for which in peaks
    ]
    table = np.array(numbers, dtype=np.float64)
    found = table[_is_first(row).astype(np.int64), stages_of(row.codes), ops_of(row.codes)]
    return found[:, 0], found[:, 1]


def _gradient_bytes(row: Row, stages: Sequence[StageActivations]) -> NDArray[np.float64]:
    """Return the gradients of parameters that there are after each action of a step that began without any.

    A stage that has backwards in one piece beside split ones gets them from whichever is first.
    """
    total = np.zeros(len(row))
    first = _is_first(row)
    for stage in np.unique(stages_of(row.codes)):
        left = np.array([stages[stage].gradient_bytes.get(op, 0.0) for op in OPS])
        own = np.where(first & (stages_of(row.codes) == stage), left[ops_of(row.codes)], 0.0)
        total += np.minimum(np.cumsum(own), left[OPS.index(Op.BACKWARD)])
    return total


def _is_first(row: Row) -> NDArray[np.bool_]:
    """Tell of each action whether it is the first of its op at its stage."""
    kinds = stages_of(row.codes) * len(OPS) + ops_of(row.codes)
    first = np.zeros(len(kinds), dtype=np.bool_)
    first[np.unique(kinds, return_index=True)[1]] = True
    return first


def held_bytes(schedule: Schedule, row: Row, stages: Sequence[StageActivations]) -> NDArray[np.float64]:
    """Return what the rank holds from the beginning of each action of its row until that of the next."""
    codes = row.codes
    stage = stages_of(codes)
    full, of_input, of_weight = (
        np.array([getattr(kept, name) for kept in stages], dtype=np.float64)[stage]
        for name in ("full_bytes", "input_bytes", "weight_bytes")
    )
    recomputed = np.zeros(len(codes), dtype=bool)
    if Op.RECOMPUTE in schedule.place:
        recomputed = schedule.place[Op.RECOMPUTE][stage, micro_batches_of(codes)] >= 0
    change = {
        Op.FORWARD: np.where(recomputed, of_input, full),
        Op.RECOMPUTE: full - of_input,
        Op.BACKWARD: -full,
        Op.INPUT_GRADIENT: of_weight - full,
        Op.WEIGHT_GRADIENT: -of_weight,
        Op.OPTIMIZER: np.zeros(len(codes)),
    }
    return np.cumsum(np.choose(ops_of(codes), [change[op] for op in OPS]))
