"""The real engine on threads: every rank builds its stage, and the world carries tensors between them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from in_process import InProcessGroup, InProcessTransport, LockedStage, run_ranks
from plain import SEED, Model, build, mini_batch, sequence_of
from torch import Tensor, nn

from pipebench.config import OptimizerConfig
from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.group import Alone
from pipebench.engine.microbatch import micro_batch_sizes, passes_of
from pipebench.engine.optimizer import make_optimizer as configured
from pipebench.engine.partition import split_uniformly
from pipebench.engine.pipeline import Pipeline, eval_mode, layers_of
from pipebench.engine.stage import Bundle, Loss, TensorSpec
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.engine.update import MakeOptimizer, UpdateRules
from pipebench.engine.whereabouts import RECORD_BYTES, Whereabouts
from pipebench.harness.update_rules import tied_on
from pipebench.models.layers import LayerSequence, Layout, layout_of, skips_between
from pipebench.record import LayerRun, UpdateRecord
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import Recompute, with_recompute
from pipebench.schedule.catalogue import build as build_schedule
from pipebench.trace import Span
from pipebench.values import tensors_of

CPU = torch.device("cpu")

SGD = OptimizerConfig(name="sgd", lr=0.1)


def unseen() -> Whereabouts:
    return Whereabouts(memoryview(bytearray(RECORD_BYTES)))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def alone(optimizer: OptimizerConfig = SGD) -> UpdateRules:
    return UpdateRules(optimizer, 0, 1, (), Alone())


@dataclass(frozen=True)
class Evaluation:
    loss: float
    metrics: dict[str, float]


@dataclass
class Outcome:
    """All ranks together: every layer in order, a loss and an update for each step, each rank's spans of the last step,
    and each layer's gradients as an engine tells them.

    `evaluations` are those after the first step, then those after the second, and so on.
    """

    layers: list[nn.Module]
    losses: list[float]
    spans: list[tuple[Span, ...]]
    updates: list[UpdateRecord | None]
    gradients: list[list[Tensor]]
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    model: Model | LayerSequence
    name: str = "gpipe"
    recompute: Recompute = Recompute.NEVER
    num_stages: int = 2
    num_micro_batches: int = 3
    num_samples: int = 11
    autocast: torch.dtype | None = None
    chunks: int | None = None
    rows: Schedule | None = None
    data: Callable[[int, int], MiniBatch] | None = None
    deferred: bool = True
    runs: tuple[LayerRun, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The rows given, or those of the named schedule; `num_stages` are ranks, each with `chunks` of the model's."""
        named = self.rows or build_schedule(self.name, self.num_stages, self.num_micro_batches, self.chunks)
        far = [edge for edge in self.names_between(named.num_stages) if edge[1] - edge[0] > 1]
        return with_recompute(Schedule(named.name, named.rows, far), self.recompute)

    def names_between(self, num_stages: int) -> dict[tuple[int, int], tuple[str, ...]]:
        """The skips that pass between two stages."""
        sequence = sequence_of(self.model)
        return skips_between(layout_of(sequence), split_uniformly(sequence.num_layers, num_stages))

    def _runs(self, num_layers: int) -> tuple[LayerRun, ...]:
        """Return those given, or those of the setting; a budget's are every other layer's here."""
        again, keep, selective = LayerRun.AGAIN, LayerRun.KEEP, LayerRun.SELECTIVE
        inside = {Recompute.LAYER: (again,), Recompute.BUDGET: (again, keep), Recompute.SELECTIVE: (selective,)}
        return self.runs or (inside.get(self.recompute, (keep,)) * num_layers)[:num_layers]

    def stages(self, layers: list[nn.Module], loss: Callable[[Any, Any], Tensor]) -> list[LockedStage]:
        schedule = self.schedule
        counts = split_uniformly(len(layers), schedule.num_stages)
        stages = []
        for number, count in enumerate(counts):
            first = sum(counts[:number])
            is_last = number == schedule.num_stages - 1
            own = layers[first : first + count]
            splits = schedule.splits_backward(number)
            runs = self._runs(len(layers))[first : first + count]
            sequence = sequence_of(self.model)
            weighed = Loss(loss, sequence.count, sequence.metrics) if is_last else None
            stages.append(LockedStage(own, first, SEED, CPU, self.autocast, weighed, splits, self.deferred, runs))
        return stages

    def bundles(self, stages: list[LockedStage]) -> dict[tuple[int, int], list[Bundle]]:
        return self.bundles_for(stages, micro_batch_sizes(self.num_samples, self.num_micro_batches))

    def bundles_for(self, stages: list[LockedStage], sizes: Sequence[int]) -> dict[tuple[int, int], list[Bundle]]:
        """Return what passes around every stage by micro-batch; equal micro-batches share theirs."""
        inputs = self.mini_batch(0).inputs
        schedule, names = self.schedule, self.names_between(self.schedule.num_stages)
        specs = {size: tuple(TensorSpec((size, *x.shape[1:]), x.dtype) for x in tensors_of(inputs)) for size in sizes}
        found = {(-1, 0): {size: Bundle(specs[size], isinstance(inputs, tuple)) for size in sizes}}
        for number, stage in enumerate(stages):
            sources = schedule.sources_of(number) or [-1]
            leaving = {size: stage.output_specs([found[s, number][size] for s in sources]) for size in set(sizes)}
            for target in schedule.targets_of(number) or [number + 1]:
                skipped = names.get((number, target), ())
                found[number, target] = {n: each.part(target == number + 1, skipped) for n, each in leaving.items()}
        return {edge: [of_size[size] for size in sizes] for edge, of_size in found.items()}

    def mini_batch(self, step: int) -> MiniBatch:
        if self.data is not None:
            return self.data(step, self.num_samples)
        assert not isinstance(self.model, LayerSequence)
        return mini_batch(self.model, step, self.num_samples)


_KNOWN_BUNDLES: dict[tuple[object, ...], dict[tuple[int, int], list[Bundle]]] = {}


def _known_bundles(point: Point, stages: list[LockedStage]) -> dict[tuple[int, int], list[Bundle]]:
    """Learn what passes between stages once for all schedules of the same (model, K, M): most of a small run's time."""
    key = (id(point.model), len(stages), point.num_micro_batches, point.num_samples, point.autocast)
    if key not in _KNOWN_BUNDLES:
        _KNOWN_BUNDLES[key] = point.bundles(stages)
    return _KNOWN_BUNDLES[key]


def run(
    point: Point,
    num_steps: int = 1,
    train: bool = False,
    optimizer: OptimizerConfig = SGD,
    make_optimizer: MakeOptimizer | None = None,
    prepare: Callable[[list[nn.Module]], None] | None = None,
    evaluated: Sequence[MiniBatch] = (),
    first_step: int = 0,
    load: Callable[[Pipeline], None] = lambda pipeline: None,
    save: Callable[[Pipeline], None] = lambda pipeline: None,
) -> Outcome:
    """Accumulate (or train) `num_steps` mini-batches on a thread for each rank, each with copies of what is tied.

    Some are evaluated after each of them; each rank calls `load` before the first and `save` after the last.
    """
    layers, loss = build(point.model)
    if prepare is not None:
        prepare(layers)
    schedule, layout = point.schedule, layout_of(sequence_of(point.model))
    counts = split_uniformly(len(layers), schedule.num_stages)
    owners = [rank for rank, count in zip(schedule.stage_ranks, counts, strict=True) for _ in range(count)]
    _copy_ties(layers, layout, owners)
    stages = point.stages(layers, loss)
    bundles = point.bundles(stages) if prepare is not None else _known_bundles(point, stages)
    most_samples = micro_batch_sizes(point.num_samples, point.num_micro_batches)[0]
    sizes = {tuple(s) for each in evaluated for s in passes_of(len(each), point.num_micro_batches, most_samples)}
    with eval_mode(stage.module for stage in stages):  # batch norm trains on no single sample
        of_sizes = {each: point.bundles_for(stages, each) for each in sizes}

    def work(rank: int, transport: InProcessTransport) -> _OfRank:
        stopwatch = HostStopwatch()  # it times the thread that makes it
        try:
            own = {number: stages[number] for number in schedule.stages_of_rank(rank)}
            around = {edge: bundles[edge] for edge in bundles if set(edge) & set(own)}
            tied = tied_on(rank, layout, owners, layers_of(own))
            rules = UpdateRules(optimizer, rank, schedule.num_ranks, tied, InProcessGroup(transport.world, rank))
            make = make_optimizer or partial(configured, optimizer)
            by_sizes = (most_samples, lambda sizes: of_sizes[tuple(sizes)])
            pipeline = Pipeline(schedule, rank, own, around, make, rules, transport, stopwatch, unseen(), *by_sizes)
            one_step = pipeline.train if train else pipeline.accumulate
            outcomes, evaluations = list[StepOutcome](), list[StepOutcome]()
            load(pipeline)
            for step in range(first_step, first_step + num_steps):
                outcomes.append(one_step(step, point.mini_batch(step)))
                evaluations += map(pipeline.evaluate, evaluated)
            save(pipeline)
            losses, updates = [each.loss for each in outcomes], [each.update for each in outcomes]
            return _OfRank(losses, updates, outcomes[-1].spans(), pipeline.gradients(), evaluations)
        finally:
            stopwatch.close()

    results = run_ranks(schedule.num_ranks, work)
    parts = zip(*(result.losses for result in results), strict=True)
    told = {repr(result.updates) for result in results}  # an overflowed norm may be not-a-number, which equals nothing
    assert len(told) == 1, f"ranks disagree on an update: {told}"
    gradients = {index: own for result in results for index, own in result.gradients.items()}
    return Outcome(
        layers=[layer for stage in stages for layer in stage.module],
        losses=[sum(part for part in of_step if part is not None) for of_step in parts],
        spans=[result.spans for result in results],
        updates=results[0].updates,
        gradients=[gradients[index] for index in range(len(layers))],
        evaluations=[_joined(of_ranks) for of_ranks in zip(*(each.evaluations for each in results), strict=True)],
    )


def _joined(of_ranks: Sequence[StepOutcome]) -> Evaluation:
    losses = [outcome.loss for outcome in of_ranks if outcome.loss is not None]
    return Evaluation(sum(losses), {name: value for each in of_ranks for name, value in each.metrics.items()})


@dataclass
class _OfRank:
    losses: list[float | None]
    updates: list[UpdateRecord | None]
    spans: tuple[Span, ...]
    gradients: dict[int, list[Tensor]]
    evaluations: list[StepOutcome]


def _copy_ties(layers: list[nn.Module], layout: Layout, owners: list[int]) -> None:
    """Give every rank a copy of its own of each tied parameter, as ranks that build their own layers have."""
    for tie in layout.ties:
        copies: dict[int, nn.Parameter] = {}
        for index, name in tie.places:
            owner, _, last = name.rpartition(".")
            parameter = copies.setdefault(owners[index], copy.deepcopy(layers[index].get_parameter(name)))
            setattr(layers[index].get_submodule(owner), last, parameter)
