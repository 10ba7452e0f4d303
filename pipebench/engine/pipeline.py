"""The built-in engine: the stages a rank owns, put together from a schedule, layers and a transport."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import Executor, StepOutcome, specs_between
from pipebench.engine.microbatch import passes_of
from pipebench.engine.stage import Bundles, Stage
from pipebench.engine.stopwatch import Stopwatch, no_spans
from pipebench.engine.transport import Transport
from pipebench.engine.update import MakeOptimizer, Update, UpdateRules, probe_scale
from pipebench.engine.whereabouts import Whereabouts
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import only_forwards, with_optimizer, with_optimizer_last

BundlesFor = Callable[[Sequence[int]], Bundles]
"""Finds out what passes around this rank's stages for micro-batches of such sizes; all ranks ask together."""


class Pipeline:
    """One rank of the built-in engine; `stages` are the rank's own by their number in the model.

    `bundles` say what passes between each of them and its sources and targets in a training step, whose micro-batches
    have at most `most_samples`; `bundles_for` says it of an evaluation's.
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
        most_samples: int,
        bundles_for: BundlesFor,
    ) -> None:
        self.update = update = Update(rules, parameters_of(stages), make_optimizer)
        self.optimizers = list(update.optimizers.values())
        trained = (with_optimizer_last if update.needs_every_backward else with_optimizer)(schedule)
        around = (transport, stopwatch, whereabouts)
        self._train = Executor(trained, rank, stages, bundles, update, *around)
        self._accumulate = Executor(schedule, rank, stages, bundles, None, *around)
        self._probe_scale = probe_scale(rules.config)
        self.layers = layers_of(stages)

        def evaluating(sizes: tuple[int, ...]) -> Executor:
            return Executor(only_forwards(schedule, len(sizes)), rank, stages, bundles_for(sizes), None, *around)

        self._evaluating = cache(evaluating)
        self._passes_of = partial(passes_of, num_micro_batches=schedule.num_micro_batches, most_samples=most_samples)
        self._stages = list(stages.values())
        self._transport = transport
        self.sent_bytes: int | None = sent_between_stages(schedule, rank, bundles)

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Run one whole step: gradients and update."""
        self.update.begin(step)
        factor = self.update.loss_factor
        outcome = self._train.run_step(step, batch.inputs, batch.targets, len(batch), factor)
        for stage in self._stages:
            stage.batch_norms.commit()
        return dataclasses.replace(outcome, update=self.update.done)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Add one mini-batch's gradients, times `probe_scale`, to `.grad` and leave the weights alone."""
        outcome = self._accumulate.run_step(step, batch.inputs, batch.targets, len(batch), self._probe_scale)
        for stage in self._stages:
            stage.batch_norms.forget()
        return outcome

    def evaluate(self, batch: MiniBatch) -> StepOutcome:
        """Return the loss and metrics of a batch of any size: forwards alone, in eval mode, nothing kept or changed.

        No micro-batch is larger than those of training, and no pass has more, so that there is room for all of them.
        """
        passes = self._passes_of(len(batch))
        with eval_mode(stage.module for stage in self._stages):
            counted = self._train.count(batch.targets)
            parts = batch.split([sum(sizes) for sizes in passes])
            outcomes = [
                self._evaluating(tuple(sizes)).run_pass(0, part.inputs, part.targets, sizes, len(batch), counted, 1.0)
                for sizes, part in zip(passes, parts, strict=True)
            ]
        losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
        names = {name for outcome in outcomes for name in outcome.metrics}
        metrics = {name: sum(outcome.metrics.get(name, 0.0) for outcome in outcomes) for name in sorted(names)}
        return StepOutcome(no_spans, sum(losses) if losses else None, metrics=metrics)

    def gradients(self) -> dict[int, list[Tensor]]:
        summed = self.update.summed_gradients()
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


@contextlib.contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and afterwards those that were not there back into training mode."""
    training = [each for module in modules for each in module.modules() if each.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
