"""The grid that the pure tests walk, and what its actions cost."""

from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import Recompute, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.simulate import Costs

STRAIGHT = ["gpipe", "1f1b", "naive", "zb_h1", "zb_h2"]
"""Schedules with one stage a rank."""

LOOPED = ["interleaved", "looped_bfs"]
"""Schedules with any number of stages a rank."""

V_SHAPED = ["zb_v", "v_half", "v_min"]
"""Schedules with two stages a rank, folded."""

NAMES = [*STRAIGHT, *LOOPED, *V_SHAPED]
STAGES = [1, 2, 3, 4, 8]
MICRO_BATCHES = [1, 2, 3, 8, 13]
GRID = [(num_stages, num_micro_batches) for num_stages in STAGES for num_micro_batches in MICRO_BATCHES]


def make(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    recompute: Recompute = Recompute.NEVER,
    chunks: int | None = None,
) -> Schedule:
    return with_recompute(build(name, num_ranks, num_micro_batches, chunks), recompute)


def costs(forward: float, backward: float, recompute: float = 0.0, weight: float | None = None) -> Costs:
    """Every stage costs the same, up to 99 of them; the optimizer nothing. A split backward is half and half."""
    of_weight = backward / 2 if weight is None else weight
    of = {
        Op.FORWARD: forward,
        Op.BACKWARD: backward,
        Op.INPUT_GRADIENT: backward - of_weight,
        Op.WEIGHT_GRADIENT: of_weight,
        Op.RECOMPUTE: recompute,
    }
    return {(stage, op): seconds for stage in range(99) for op, seconds in of.items()}


UNIT = costs(forward=1.0, backward=2.0, recompute=1.0)


def actions(text: str) -> list[Action]:
    """Read `0F0 0B0` as actions."""
    return [Action.parse(word) for word in text.split()]
