"""The memory model against what the profiler counts, to the rank: every recompute setting, K and order of the rows.

A rank is alone here: what it receives comes from nowhere, as large as it would be, and what it sends is gone at once,
as between ranks that share memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from ranks import CPU, SGD, sgd, unseen
from torch import Tensor

from pipebench.activations import stage_activations
from pipebench.compose import compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.costs import Profile
from pipebench.data import batches
from pipebench.engine.group import Alone
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.pipeline import Pipeline
from pipebench.engine.stage import Bundle, Bundles, Loss, Stage, TensorSpec
from pipebench.engine.stopwatch import HostStopwatch
from pipebench.engine.update import UpdateRules
from pipebench.errors import LimitError
from pipebench.harness.jobs import ProfileJob
from pipebench.harness.memory import measure_memory
from pipebench.harness.prepare import Prepared, prepare
from pipebench.harness.profile import profile_layers
from pipebench.machine import this_machine
from pipebench.models import layer_sequence
from pipebench.models.layers import build_layers, layout_of, skips_between
from pipebench.record import LayerProfile, LayerRun
from pipebench.schedule.action import Transfer
from pipebench.schedule.memory import peak_activation_bytes
from pipebench.schedule.simulate import Link

WITHIN = 0.05
MIB = 2**20

MODELS = {
    "transformer": "model=transformer model.layers=2 model.width=32 model.feed_forward=128 model.sequence=32 "
    "model.attention=explicit",
    "mlp": "model=mlp model.layers=6 model.width=64",
}
CONFIGURED = {**MODELS, "u_mlp": "model=u_mlp model.depth=3 model.width=64"}


class Nowhere:
    """A transport whose other end takes and gives at once."""

    device = CPU
    peak_bytes = 0

    def __init__(self) -> None:
        self._specs: dict[int, TensorSpec] = {}

    def send(self, transfer: Transfer, tag: int, tensor: Tensor) -> None: ...

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        self._specs[tag] = spec

    def receive(self, tag: int) -> Tensor:
        return self._specs[tag].empty(CPU).zero_()

    def settle(self, tag: int) -> None: ...

    def finish(self) -> None: ...


def configured(overrides: str) -> RunConfig:
    grid = compose_grid([*overrides.split(), "batch=32", "device=cpu", "threads=1", "partition=uniform"])
    assert grid is not None
    return resolve(grid.points[0], this_machine())


@cache
def profiled(model: str, micro: int) -> LayerProfile:
    config = configured(f"{CONFIGURED[model]} micro={micro} stages=1")
    job = ProfileJob(config, micro_batch_sizes(config.batch, config.micro)[0], timed=False, cores=())
    layers = profile_layers(job, lambda progress: None)  # type: ignore[arg-type]
    return replace(layers, forward_s=[float(size) for size in layers.saved_bytes])


def prepared_and_predicted(config: RunConfig, model: str) -> tuple[Prepared, list[float]]:
    layers = profiled(model, config.micro)
    prepared = prepare(config, Profile(layers, [0.0] * len(layers.names), Link()))
    stages = stage_activations(layers, prepared.layers_per_stage, prepared.runs)
    return prepared, peak_activation_bytes(prepared.schedule, stages)


def stages_of(config: RunConfig, prepared: Prepared) -> list[Stage]:
    model, stages, first = layer_sequence(config.model), list[Stage](), 0
    for number, count in enumerate(prepared.layers_per_stage):
        is_last = number + 1 == len(prepared.layers_per_stage)
        layers = build_layers(model, range(first, first + count), 0)
        loss = Loss(model.loss, model.count) if is_last else None
        splits = prepared.schedule.splits_backward(number)
        stages.append(Stage(layers, first, 0, CPU, None, loss, splits, True, prepared.runs[first : first + count]))
        first += count
    return stages


def bundles_of(config: RunConfig, stages: Sequence[Stage]) -> Bundles:
    sizes = micro_batch_sizes(config.batch, config.micro)
    inputs = batches(config)(0).inputs
    assert isinstance(inputs, Tensor)
    arriving = Bundle((TensorSpec((sizes[0], *inputs.shape[1:]), inputs.dtype),))
    bundles = {(-1, 0): [arriving] * len(sizes)}
    counts, last = [len(stage.module) for stage in stages], len(stages) - 1
    names = skips_between(layout_of(layer_sequence(config.model)), counts)
    for number, stage in enumerate(stages):
        sources = [source for source in range(-1, number) if (source, number) in bundles]
        leaving = stage.output_specs([bundles[source, number][0] for source in reversed(sources)])
        for target in range(number + 1, last + 2):
            if target == number + 1 or (number, target) in names:
                part = leaving.part(target == number + 1, names.get((number, target), ()))
                bundles[number, target] = [part] * len(sizes)
    return bundles


def measured(config: RunConfig, prepared: Prepared) -> list[int]:
    """Return each rank's activations at its peak, one rank after the other."""
    found, batch = [], batches(config)(0)
    stages = stages_of(config, prepared)
    bundles, schedule = bundles_of(config, stages), prepared.schedule
    for rank in range(schedule.num_ranks):
        own = {number: stages[number] for number in schedule.stages_of_rank(rank)}
        around = {edge: bundles[edge] for edge in bundles if set(edge) & set(own)}
        stopwatch = HostStopwatch()
        rules = UpdateRules(SGD, rank, schedule.num_ranks, (), Alone())
        alone = (Nowhere(), stopwatch, unseen(), config.batch, lambda sizes: bundles)
        pipeline = Pipeline(schedule, rank, own, around, sgd, rules, *alone)
        pipeline.accumulate(0, batch)
        parameters = [parameter for stage in own.values() for parameter in stage.module.parameters()]
        for parameter in parameters:
            parameter.grad = None
        memory = measure_memory(lambda p=pipeline: p.accumulate(1, batch), parameters, [], 0, CPU)  # type: ignore[misc]
        stopwatch.close()
        found.append(memory.activations_bytes)
    return found


def against(model: str, recompute: str, stages: int, schedule: str, budget: str = "") -> tuple[Prepared, list[float]]:
    """Hold measured activations against predicted ones, which are returned."""
    point = f"micro=4 stages={stages} schedule={schedule} recompute={recompute} {budget}"
    config = configured(f"{CONFIGURED[model]} {point}")
    prepared, predicted = prepared_and_predicted(config, model)
    assert measured(config, prepared) == pytest.approx(predicted, rel=WITHIN)
    return prepared, predicted


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always", "layer", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_the_model_foretells_what_is_measured(model: str, recompute: str, stages: int, schedule: str) -> None:
    against(model, recompute, stages, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("recompute", ["never", "always", "layer"])
def test_skips_are_in_the_model_while_they_are_held(recompute: str, stages: int, schedule: str) -> None:
    against("u_mlp", recompute, stages, schedule)


def predicted_by(model: str, overrides: str) -> list[float]:
    return prepared_and_predicted(configured(f"{CONFIGURED[model]} micro=4 {overrides}"), model)[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_budget_between_none_and_all_is_kept_by_running_some_layers_again(
    model: str, stages: int, schedule: str
) -> None:
    alike = f"stages={stages} schedule={schedule}"
    whole, least = (max(predicted_by(model, f"{alike} recompute={how}")) for how in ("never", "layer"))
    budget_mib = (whole + least) / 2 / MIB
    prepared, predicted = against(model, "budget", stages, schedule, f"recompute_budget={budget_mib}")
    assert max(predicted) <= budget_mib * MIB
    assert LayerRun.AGAIN in prepared.runs
    assert LayerRun.KEEP in prepared.runs


def test_a_budget_that_nothing_keeps_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(LimitError, match=r"recompute_budget=0.001: rank 0 holds .* when every layer runs ag") as told:
        predicted_by("mlp", "stages=1 recompute=budget recompute_budget=0.001")
    enough = told.value.needed_bytes
    [held] = predicted_by("mlp", f"stages=1 recompute=budget recompute_budget={enough / MIB}")
    assert held <= enough


@pytest.mark.parametrize("model", MODELS)
def test_selective_recompute_never_holds_more(model: str) -> None:
    never, selective = (predicted_by(model, f"stages=2 recompute={how}") for how in ("never", "selective"))
    assert selective <= never
    assert (selective < never) == (model == "transformer")
