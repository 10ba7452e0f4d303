"""How many micro-batches, and how many bytes, a stage holds, read off the order of its row."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.schedule.action import Op, Row, Schedule


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes one stage keeps for one micro-batch.

    `full_bytes`: between a forward (or recompute) and its backward, the stage's input included.
    `input_bytes`: between a forward that will be recomputed and its recompute.
    """

    full_bytes: float
    input_bytes: float


def peak_activation_bytes(schedule: Schedule, stages: Sequence[StageActivations]) -> list[float]:
    """Return each rank's peak of kept activations in bytes (GPipe, Huang et al. 2019, section 2.3)."""
    return [_peak(row, schedule, stages) for row in schedule.rows]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Return for each rank the most micro-batches it holds between their forward and their backward."""
    one_each = [StageActivations(1, 1)] * schedule.num_stages
    return [int(peak) for peak in peak_activation_bytes(schedule, one_each)]


def _peak(row: Row, schedule: Schedule, stages: Sequence[StageActivations]) -> float:
    held = peak = 0.0
    for action in row:
        kept = stages[action.stage]
        match action.op:
            case Op.FORWARD:
                recomputed = (action.stage, action.micro_batch) in schedule.recomputed
                held += kept.input_bytes if recomputed else kept.full_bytes
            case Op.RECOMPUTE:
                held += kept.full_bytes - kept.input_bytes
            case Op.BACKWARD:
                held -= kept.full_bytes
            case Op.OPTIMIZER:
                pass
        peak = max(peak, held)
    return peak
