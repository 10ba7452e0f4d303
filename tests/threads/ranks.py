"""The real engine on threads: every rank builds its stage, and the world carries tensors between them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from in_process import InProcessGroup, InProcessTransport, LockedStage, run_ranks
from plain import SEED, Model, build, mini_batch
from torch import Tensor, nn

from pipebench.config import OptimizerConfig
from pipebench.engine.group import Alone
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.optimizer import make_optimizer as configured
from pipebench.engine.partition import split_uniformly
from pipebench.engine.pipeline import Pipeline, layers_of
from pipebench.engine.stage import TensorSpec
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.engine.update import MakeOptimizer, UpdateRules
from pipebench.engine.whereabouts import RECORD_BYTES, Whereabouts
from pipebench.harness.update_rules import tied_on
from pipebench.models import layer_sequence
from pipebench.models.layers import Layout, layout_of
from pipebench.record import UpdateRecord
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import Recompute, with_recompute
from pipebench.schedule.catalogue import build as build_schedule
from pipebench.trace import Span

CPU = torch.device("cpu")

SGD = OptimizerConfig(name="sgd", lr=0.1)


def unseen() -> Whereabouts:
    return Whereabouts(memoryview(bytearray(RECORD_BYTES)))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def alone(optimizer: OptimizerConfig = SGD) -> UpdateRules:
    return UpdateRules(optimizer, 0, 1, (), Alone())


@dataclass
class Outcome:
    """All ranks together: every layer in order, a loss and an update for each step, each rank's spans of the last step,
    and each layer's gradients as an engine tells them."""

    layers: list[nn.Module]
    losses: list[float]
    spans: list[tuple[Span, ...]]
    updates: list[UpdateRecord | None]
    gradients: list[list[Tensor]]


@dataclass(frozen=True)
class Point:
    model: Model
    name: str = "gpipe"
    recompute: Recompute = Recompute.NEVER
    num_stages: int = 2
    num_micro_batches: int = 3
    num_samples: int = 11
    autocast: torch.dtype | None = None
    chunks: int | None = None
    rows: Schedule | None = None

    @property
    def schedule(self) -> Schedule:
        """The rows given, or those of the named schedule; `num_stages` are ranks, each with `chunks` of the model's."""
        if self.rows is not None:
            return with_recompute(self.rows, self.recompute)
        named = build_schedule(self.name, self.num_stages, self.num_micro_batches, self.chunks)
        return with_recompute(named, self.recompute)

    def stages(self, layers: list[nn.Module], loss: Callable[[Tensor, Tensor], Tensor]) -> list[LockedStage]:
        schedule = self.schedule
        counts = split_uniformly(len(layers), schedule.num_stages)
        stages = []
        for number, count in enumerate(counts):
            first = sum(counts[:number])
            is_last = number == schedule.num_stages - 1
            own = layers[first : first + count]
            splits = schedule.splits_backward(number)
            stages.append(LockedStage(own, first, SEED, CPU, self.autocast, loss if is_last else None, splits))
        return stages

    def boundary_specs(self, stages: list[LockedStage]) -> dict[int, list[TensorSpec]]:
        """Return the specs around every stage by micro-batch; equal micro-batches share theirs."""
        inputs = mini_batch(self.model, 0, self.num_samples).inputs
        sizes = micro_batch_sizes(self.num_samples, self.num_micro_batches)
        specs = {0: {size: TensorSpec((size, *inputs.shape[1:]), inputs.dtype) for size in sizes}}
        for rank, stage in enumerate(stages):
            specs[rank + 1] = {size: stage.output_spec(spec) for size, spec in specs[rank].items()}
        return {boundary: [of_size[size] for size in sizes] for boundary, of_size in specs.items()}


_KNOWN_SPECS: dict[tuple[object, ...], dict[int, list[TensorSpec]]] = {}


def _known_specs(point: Point, stages: list[LockedStage]) -> dict[int, list[TensorSpec]]:
    """Learn boundaries once for all schedules of the same (model, K, M): most of a small run's time."""
    key = (id(point.model), len(stages), point.num_micro_batches, point.num_samples, point.autocast)
    if key not in _KNOWN_SPECS:
        _KNOWN_SPECS[key] = point.boundary_specs(stages)
    return _KNOWN_SPECS[key]


def run(
    point: Point,
    num_steps: int = 1,
    train: bool = False,
    optimizer: OptimizerConfig = SGD,
    make_optimizer: MakeOptimizer | None = None,
    prepare: Callable[[list[nn.Module]], None] | None = None,
) -> Outcome:
    """Accumulate (or train) `num_steps` mini-batches on a thread for each rank, each with copies of what is tied."""
    layers, loss = build(point.model)
    if prepare is not None:
        prepare(layers)
    schedule = point.schedule
    layout = layout_of(layer_sequence(point.model))
    counts = split_uniformly(len(layers), schedule.num_stages)
    owners = [rank for rank, count in zip(schedule.stage_ranks, counts, strict=True) for _ in range(count)]
    _copy_ties(layers, layout, owners)
    stages = point.stages(layers, loss)
    specs = point.boundary_specs(stages) if prepare is not None else _known_specs(point, stages)

    def work(rank: int, transport: InProcessTransport) -> _OfRank:
        stopwatch = HostStopwatch()  # it times the thread that makes it
        try:
            own = {number: stages[number] for number in schedule.stages_of_rank(rank)}
            around = {boundary: specs[boundary] for number in own for boundary in (number, number + 1)}
            group = InProcessGroup(transport.world, rank)
            tied = tied_on(rank, layout, owners, layers_of(own))
            rules = UpdateRules(optimizer, rank, schedule.num_ranks, tied, group)
            make = make_optimizer or partial(configured, optimizer)
            pipeline = Pipeline(schedule, rank, own, around, make, rules, transport, stopwatch, unseen())
            one_step = pipeline.train if train else pipeline.accumulate
            outcomes = [one_step(step, mini_batch(point.model, step, point.num_samples)) for step in range(num_steps)]
            losses, updates = [each.loss for each in outcomes], [each.update for each in outcomes]
            return _OfRank(losses, updates, outcomes[-1].spans(), pipeline.gradients())
        finally:
            stopwatch.close()

    results = run_ranks(schedule.num_ranks, work)
    last_rank = schedule.stage_ranks[-1]
    others = [result.losses for rank, result in enumerate(results) if rank != last_rank]
    assert all(loss is None for losses in others for loss in losses)
    told = {repr(result.updates) for result in results}  # an overflowed norm may be not-a-number, which equals nothing
    assert len(told) == 1, f"ranks disagree on an update: {told}"
    gradients = {index: own for result in results for index, own in result.gradients.items()}
    return Outcome(
        layers=[layer for stage in stages for layer in stage.module],
        losses=[loss for loss in results[last_rank].losses if loss is not None],
        spans=[result.spans for result in results],
        updates=results[0].updates,
        gradients=[gradients[index] for index in range(len(layers))],
    )


@dataclass
class _OfRank:
    losses: list[float | None]
    updates: list[UpdateRecord | None]
    spans: tuple[Span, ...]
    gradients: dict[int, list[Tensor]]


def _copy_ties(layers: list[nn.Module], layout: Layout, owners: list[int]) -> None:
    """Give every rank a copy of its own of each tied parameter, as ranks that build their own layers have."""
    for tie in layout.ties:
        copies: dict[int, nn.Parameter] = {}
        for index, name in tie.places:
            owner, _, last = name.rpartition(".")
            parameter = copies.setdefault(owners[index], copy.deepcopy(layers[index].get_parameter(name)))
            setattr(layers[index].get_submodule(owner), last, parameter)
