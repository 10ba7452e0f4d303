"""How many micro-batches, and how many bytes, a rank holds, read off the order of its row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipebench.schedule.action import OPS, Op, Row, Schedule, micro_batches_of, ops_of, stages_of


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes one stage keeps for one micro-batch.

    `full_bytes`: between a forward (or recompute) and its backward, the stage's input included.
    `input_bytes`: between a forward that will be recomputed and its recompute.
    `weight_bytes`: between the two parts of a split backward (M_W of Qi et al. 2024, table 1).
    """

    full_bytes: float
    input_bytes: float
    weight_bytes: float = 0.0


def peak_activation_bytes(schedule: Schedule, stages: Sequence[StageActivations]) -> list[float]:
    """Return each rank's peak of kept activations in bytes (GPipe, Huang et al. 2019, section 2.3)."""
    return [float(held_bytes(schedule, row, stages).max(initial=0.0)) for row in schedule.rows]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Return for each rank the most micro-batches it holds between a forward and its (input) gradient.

    With several stages on a rank, each holds its own: the unit is one stage's micro-batch.
    """
    return [round(peak) for peak in peak_activation_bytes(schedule, [StageActivations(1, 1, 0)] * schedule.num_stages)]


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
