"""The grid that the pure tests walk, and what its actions cost."""

from collections.abc import Callable

from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import Recompute, build, with_recompute

NAMES = ["gpipe", "1f1b", "naive"]
STAGES = [1, 2, 3, 4, 8]
MICRO_BATCHES = [1, 2, 3, 5, 8, 16]
GRID = [(num_stages, num_micro_batches) for num_stages in STAGES for num_micro_batches in MICRO_BATCHES]


def make(name: str, num_stages: int, num_micro_batches: int, recompute: Recompute = Recompute.NEVER) -> Schedule:
    return with_recompute(build(name, num_stages, num_micro_batches), recompute)


def costs(forward: float, backward: float, recompute: float = 0.0) -> Callable[[Action], float]:
    """Every stage and micro-batch costs the same; the optimizer nothing."""
    of = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.RECOMPUTE: recompute, Op.OPTIMIZER: 0.0}
    return lambda action: of[action.op]


UNIT = costs(forward=1.0, backward=2.0, recompute=1.0)


def actions(text: str) -> list[Action]:
    """Read `0F0 0B0` as actions."""
    return [Action.parse(word) for word in text.split()]
