"""What the bench gives an engine, and what it asks of one: the same for the built-in engine and for all others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pipebench.config import RunConfig
from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import BundlesFor
from pipebench.engine.stage import Bundles, Stage
from pipebench.engine.stopwatch import Stopwatch
from pipebench.engine.transport import Transport
from pipebench.engine.update import MakeOptimizer, UpdateRules
from pipebench.engine.whereabouts import Whereabouts
from pipebench.schedule.action import Schedule


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's share of a point, ready for an engine.

    `stages` are those this process is to hold, by number, on its device: the rank's own where rows of a schedule say
    so, all of them for the engines that get the whole model. `bundles` say what passes between the stages held and
    their sources and targets, the mini-batch (from stage -1) and the last stage's output (to the stage after it)
    included; `bundles_for` says the same of micro-batches of other sizes.
    `make_optimizer` builds the configured optimizer, `rules` say what happens to gradients before it steps.
    `transport` joins the ranks as the rows want it; `whereabouts` is told of every action by whoever can.
    """

    config: RunConfig
    schedule: Schedule
    rank: int
    device: torch.device
    stages: Mapping[int, Stage]
    bundles: Bundles
    make_optimizer: MakeOptimizer
    rules: UpdateRules
    transport: Transport
    stopwatch: Stopwatch
    whereabouts: Whereabouts
    bundles_for: BundlesFor


class Engine(Protocol):
    """One rank of any engine on the bench.

    `layers` holds this rank's layers by their index in the model; `optimizers` one for each of its stages that has
    parameters. `sent_bytes` are the bytes of tensors this rank hands to others in one step, None where nobody knows.
    Both methods that step take the whole mini-batch; `accumulate` leaves gradients in `.grad`,
    times the configuration's `probe_scale`. A step's spans are in
    the order in which the rank ran its actions, the same in every step, or empty where the engine cannot tell.
    """

    layers: dict[int, nn.Module]
    optimizers: list[torch.optim.Optimizer]
    sent_bytes: int | None

    def train(self, step: int, batch: MiniBatch) -> StepOutcome: ...

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome: ...

    def gradients(self) -> dict[int, list[Tensor]]:
        """Return the whole gradients in `.grad` of this rank's layers by index, one for each parameter in its order.

        The whole group calls this: an engine that cuts its parameters up has to gather them.
        """

    def held_bytes(self) -> int:
        """Return the bytes of tensors kept from step to step besides parameters, gradients and optimizer state.

        The measurement of a step's memory sees what the step allocates, not what was there before.
        """
