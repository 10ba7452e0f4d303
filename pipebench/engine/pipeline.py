"""The built-in engine: the stages a rank owns, put together from a schedule, layers and a transport."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import Executor, StepOutcome, specs_between
from pipebench.engine.stage import Bundles, Stage
from pipebench.engine.stopwatch import Stopwatch
from pipebench.engine.transport import Transport
from pipebench.engine.update import MakeOptimizer, Update, UpdateRules, probe_scale
from pipebench.engine.whereabouts import Whereabouts
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import with_optimizer, with_optimizer_last


class Pipeline:
    """One rank of the built-in engine; `stages` are the rank's own by their number in the model.

    `bundles` say what passes between each of them and its sources and targets.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        bundles: Bundles,
        make_optimizer: MakeOptimizer,
        rules: UpdateRules,
        transport: Transport,
        stopwatch: Stopwatch,
        whereabouts: Whereabouts,
    ) -> None:
        self._update = update = Update(rules, parameters_of(stages), make_optimizer)
        self.optimizers = list(update.optimizers.values())
        trained = (with_optimizer_last if update.needs_every_backward else with_optimizer)(schedule)
        around = (transport, stopwatch, whereabouts)
        self._train = Executor(trained, rank, stages, bundles, update, *around)
        self._accumulate = Executor(schedule, rank, stages, bundles, None, *around)
        self._probe_scale = probe_scale(rules.config)
        self.layers = layers_of(stages)
        self._stages = list(stages.values())
        self._transport = transport
        self.sent_bytes: int | None = sent_between_stages(schedule, rank, bundles)

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Run one whole step: gradients and update."""
        self._update.begin(step)
        factor = self._update.loss_factor
        outcome = self._train.run_step(step, batch.inputs, batch.targets, len(batch), factor)
        for stage in self._stages:
            stage.batch_norms.commit()
        return dataclasses.replace(outcome, update=self._update.done)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Add one mini-batch's gradients, times `probe_scale`, to `.grad` and leave the weights alone."""
        outcome = self._accumulate.run_step(step, batch.inputs, batch.targets, len(batch), self._probe_scale)
        for stage in self._stages:
            stage.batch_norms.forget()
        return outcome

    def gradients(self) -> dict[int, list[Tensor]]:
        summed = self._update.summed_gradients()
        return {
            index: [
                summed.get(parameter, gradient)
                for parameter, gradient in zip(self.layers[index].parameters(), gradients, strict=True)
            ]
            for index, gradients in gradients_of(self.layers).items()
        }

    def held_bytes(self) -> int:
        """Sent tensors that wait to be fetched may lie where no profiler of tensors looks."""
        return self._transport.peak_bytes


def layers_of(stages: Mapping[int, Stage]) -> dict[int, nn.Module]:
    """Return the layers of some stages by their index in the model."""
    return {stage.first_layer + index: layer for stage in stages.values() for index, layer in enumerate(stage.module)}


def parameters_of(stages: Mapping[int, Stage]) -> dict[int, list[nn.Parameter]]:
    return {number: list(stage.module.parameters()) for number, stage in stages.items()}


def gradients_of(layers: Mapping[int, nn.Module]) -> dict[int, list[Tensor]]:
    """Return the gradient of each layer's parameters where autograd leaves them; zeros where there is none."""
    return {
        index: [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
        for index, layer in layers.items()
    }


def sent_between_stages(schedule: Schedule, rank: int, bundles: Bundles) -> int:
    """Return the bytes that a rank sends in one step when it sends what its rows ask for and nothing else."""
    sent = (specs_between(t.producer, t.consumer, bundles) for t in schedule.transfers() if t.source_rank == rank)
    return sum(spec.num_bytes for specs in sent for spec in specs)
