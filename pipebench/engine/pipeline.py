"""The built-in engine: the stages a rank owns, put together from a schedule, layers and a transport."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import Executor, StepOutcome
from pipebench.engine.stage import Stage, TensorSpec
from pipebench.engine.stopwatch import Stopwatch
from pipebench.engine.transport import Transport
from pipebench.engine.whereabouts import Whereabouts
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import with_optimizer

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Pipeline:
    """One rank of the built-in engine; `stages` are the rank's own by their number in the model.

    `boundary_specs[s]` describes the tensor between stages s-1 and s for each micro-batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        boundary_specs: dict[int, list[TensorSpec]],
        make_optimizer: MakeOptimizer,
        transport: Transport,
        stopwatch: Stopwatch,
        whereabouts: Whereabouts,
    ) -> None:
        parameters = {number: list(stage.module.parameters()) for number, stage in stages.items()}
        optimizers = {number: make_optimizer(own) for number, own in parameters.items() if own}
        self.optimizers = list(optimizers.values())
        trained, around = with_optimizer(schedule), (transport, stopwatch, whereabouts)
        self._train = Executor(trained, rank, stages, boundary_specs, optimizers, *around)
        self._accumulate = Executor(schedule, rank, stages, boundary_specs, {}, *around)
        self.layers = {
            stage.first_layer + index: layer for stage in stages.values() for index, layer in enumerate(stage.module)
        }

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Run one whole step: gradients and update."""
        return self._train.run_step(step, batch.inputs, batch.targets, len(batch.inputs))

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Add one mini-batch's gradients to `.grad` and leave the weights alone."""
        return self._accumulate.run_step(step, batch.inputs, batch.targets, len(batch.inputs))
