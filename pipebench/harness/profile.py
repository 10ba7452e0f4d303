"""What each layer costs alone, measured once per model and micro-batch size: partition and memory model need it."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipebench.data import batches
from pipebench.data.batch import MiniBatch
from pipebench.engine.backward import QueuedBackward, Root
from pipebench.engine.recompute import has_scores
from pipebench.engine.stage import Loss, Stage
from pipebench.harness.footprint import Alone, footprints_of
from pipebench.harness.jobs import ProfileJob, WeighJob
from pipebench.harness.launch import Progress, Report
from pipebench.harness.setting import autocast_of, claim_cores
from pipebench.layer import declared_by
from pipebench.linear import WeightQueue, adopt
from pipebench.models import layer_sequence
from pipebench.models.layers import Tie, build_layers, layout_of
from pipebench.record import Footprint, LayerProfile, LayerRun
from pipebench.values import Value, tensors_of

_ROUNDS = (3, 9)
"""Fewest and most timed rounds; as many as fit `_BUDGET_S`."""

_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """Seconds of one layer in one round; `selective_s` are those of a backward with selective recompute."""

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    selective_s: float


def weigh_model(job: WeighJob, report: Report) -> int:
    """Return the bytes of the model's weights without allocating any; runs in a worker."""
    report(Progress("weighing the model"))
    model = layer_sequence(job.config.model)
    with torch.device("meta"):
        layers = nn.ModuleList(build_layers(model, range(model.num_layers), job.config.seed))
    return sum(p.nbytes for p in layers.parameters())


def profile_layers(job: ProfileJob, report: Report) -> LayerProfile:
    """Measure every layer on its own, training mode, real data; runs in a worker."""
    device = claim_cores(job.config, job.cores, local_rank=0)
    report(Progress("profiling layers"))
    model = layer_sequence(job.config.model)
    loss, seed = Loss(model.loss, model.count), job.config.seed
    stages = []
    for index, layer in enumerate(build_layers(model, range(model.num_layers), seed)):
        is_last = index == model.num_layers - 1
        stages.append(Stage([layer], index, seed, device, autocast_of(job.config), loss if is_last else None))
        stages[-1].module.to("cpu")
    batch = batches(job.config)(0).to(str(device))
    [micro_batch, *_] = batch.split([job.num_samples, len(batch) - job.num_samples])
    saved = _saved_bytes(stages, micro_batch)
    rounds = _timed_rounds(stages, micro_batch) if job.timed else []
    layers = list(zip(*rounds, strict=True))
    layout = layout_of(model)
    again_s = [median(times.selective_s - times.backward_s for times in layer) for layer in layers]
    return LayerProfile(
        num_samples=job.num_samples,
        names=[type(stage.module[0]).__name__ for stage in stages],
        forward_s=[median(times.forward_s for times in layer) for layer in layers],
        backward_s=[median(times.backward_s for times in layer) for layer in layers],
        input_s=[median(times.input_s for times in layer) for layer in layers],
        weight_s=[median(times.weight_s for times in layer) for layer in layers],
        parameter_bytes=[sum(p.nbytes for p in stage.module.parameters()) for stage in stages],
        saved_bytes=[kept.saved_bytes for kept in saved],
        put_off_bytes=[kept.put_off_bytes for kept in saved],
        input_bytes=[kept.input_bytes for kept in saved],
        saves_input=[kept.saves_input for kept in saved],
        skips=[[skip.source, skip.target, saved[skip.target].popped_bytes[skip.name]] for skip in layout.skips],
        ties=[[layer for layer, _ in tie.places] for tie in layout.ties],
        tied_bytes=[_tied_bytes(stages, tie) for tie in layout.ties],
        takes_tuple=any(kept.takes_tuple for kept in saved),
        adds_to_loss=any(layout.has_auxiliary_loss),
        uneven_loss=len({int(model.count(sample.targets)) for sample in batch.split([1] * len(batch))}) > 1,
        selective_s=[max(0.0, seconds) for seconds in again_s],
        footprints=_footprints(stages, micro_batch, saved),
    )


def _tied_bytes(stages: list[Stage], tie: Tie) -> int:
    layer, name = tie.places[0]
    return stages[layer].module[0].get_parameter(name).nbytes


def _footprints(stages: list[Stage], micro_batch: MiniBatch, saved: Sequence["_Saved"]) -> dict[str, list[Footprint]]:
    """Measure what layers allocate, those that look and save alike once, in every way in which they differ."""
    looks, found = [], dict[tuple[Any, ...], Alone]()
    for (stage, one), kept in zip(_walk(stages, micro_batch), saved, strict=True):
        one.forward()
        arrived = one.arrived if stage.first_layer else _Travelling(micro_batch.inputs, {})
        look = _look(stage, arrived, kept)
        looks.append({run: (look, run if _differs(stage, run) else LayerRun.KEEP) for run in LayerRun})
        for key in looks[-1].values():
            found.setdefault(key, Alone(stage, key[1], arrived.value, arrived.kept, one.targets))
    measured = dict(zip(found, footprints_of(list(found.values())), strict=True))
    return {run.value: [measured[keys[run]] for keys in looks] for run in LayerRun}


def _differs(stage: Stage, run: LayerRun) -> bool:
    return run != LayerRun.SELECTIVE or has_scores(stage.module)


def _look(stage: Stage, arrived: "_Travelling", kept: "_Saved") -> tuple[Any, ...]:
    """Return what layers have in common that allocate the same."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in stage.module.named_parameters()]
    tensors = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in arrived.tensors]
    sizes = (kept.saved_bytes, kept.saves_input, kept.put_off_bytes)
    return (repr(stage.module), tuple(parameters), tuple(tensors), sizes, stage.loss is None)


@dataclass(slots=True)
class _Travelling:
    """What the layers hand on: a value, detached from the layer that made it, and the skips on their way."""

    value: Value
    kept: dict[str, Tensor]

    def arrives(self, stage: Stage) -> "_Travelling":
        """Take away what the stage's layer is called with."""
        popped = {name: _leaf(self.kept.pop(name)) for name in declared_by(stage.module[0]).pops}
        value = self.value
        return _Travelling(_leaf(value) if isinstance(value, Tensor) else tuple(map(_leaf, value)), popped)

    @property
    def tensors(self) -> list[Tensor]:
        return [*tensors_of(self.value), *self.kept.values()]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _walk(stages: list[Stage], micro_batch: MiniBatch) -> Iterator[tuple[Stage, "_Pass"]]:
    """Yield each layer, on its device, with what it is to be run on; only one layer is there at a time."""
    travelling = _Travelling(micro_batch.inputs, {})
    for stage in stages:
        stage.module.to(stage.device)
        one = _Pass(stage, travelling.arrives(stage), micro_batch.targets)
        yield stage, one
        stage.module.zero_grad(set_to_none=True)
        stage.module.to("cpu")
        travelling = _Travelling(one.value, {**travelling.kept, **one.stashed})


class _Pass:
    """One layer's forward on what arrives, any number of times."""

    def __init__(self, stage: Stage, arrived: _Travelling, targets: Value) -> None:
        self.stage = stage
        self.arrived = arrived
        self.targets = targets
        self.value: Value = ()
        self.stashed: dict[str, Tensor] = {}

    def forward(self) -> list[Tensor]:
        """Return all that a gradient may come back to: the last layer's is the loss."""
        output = self.stage.run(self.arrived.value, dict(self.arrived.kept), 0, 0, again=False)
        self.value, self.stashed = output.value, output.kept
        if self.stage.loss is not None:
            self.value = self.stage.loss_of(output.value, self.targets)
        outputs = [*tensors_of(self.value), *self.stashed.values()]
        if output.auxiliary is not None:
            outputs.append(output.auxiliary)
        return [tensor for tensor in outputs if tensor.requires_grad]


def _timed_rounds(stages: list[Stage], micro_batch: MiniBatch) -> list[list[_LayerTimes]]:
    _time_round(stages, micro_batch)
    rounds: list[list[_LayerTimes]] = []
    began = time.perf_counter()
    while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and time.perf_counter() - began < _BUDGET_S):
        rounds.append(_time_round(stages, micro_batch))
    return rounds


def _time_round(stages: list[Stage], micro_batch: MiniBatch) -> list[_LayerTimes]:
    """Run every layer forward and at once backward, split and whole."""
    return [_time_layer(one) for _, one in _walk(stages, micro_batch)]


def _time_layer(one: "_Pass") -> _LayerTimes:
    forward_s, backward_s = _time_whole(one)
    input_s, weight_s = _time_split(one)
    selective_s = backward_s
    if has_scores(one.stage.module):
        one.stage.arrange([LayerRun.SELECTIVE])
        _, selective_s = _time_whole(one)
        one.stage.arrange([LayerRun.KEEP])
    return _LayerTimes(forward_s, backward_s, input_s, weight_s, selective_s)


def _time_whole(one: _Pass) -> tuple[float, float]:
    began = _now(one.stage.device)
    outputs = one.forward()
    forward_s = _now(one.stage.device) - began
    gradients = _ones(outputs)
    began = _now(one.stage.device)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return forward_s, _now(one.stage.device) - began


def _time_split(one: _Pass) -> tuple[float, float]:
    """Return the seconds of the input's and of the weights' part, as in a stage that has linear layers."""
    with _queued(one.stage) as split:
        outputs = one.forward()
        gradients, roots = _ones(outputs), _roots(split, outputs)
        began = _now(one.stage.device)
        put_off = split.of_input(roots, one.arrived.tensors, gradients)
        of_input = _now(one.stage.device)
        split.of_weights(put_off)
        return of_input - began, _now(one.stage.device) - of_input


@contextlib.contextmanager
def _queued(stage: Stage) -> Iterator[QueuedBackward]:
    queue = WeightQueue()
    adopt(stage.module, queue)
    yield QueuedBackward(queue)
    adopt(stage.module, None)


def _ones(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(output) for output in outputs]


def _roots(split: QueuedBackward, outputs: Sequence[Tensor]) -> list[Root]:
    return [split.root_of(output) for output in outputs]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class _Saved:
    """Bytes of one layer: what it saves besides its inputs, its value's and whether it saves that, what it keeps
    between the two parts of a split backward, each skip's that it pops; and whether it takes several tensors."""

    saved_bytes: int
    input_bytes: int
    saves_input: bool
    put_off_bytes: int
    popped_bytes: dict[str, int]
    takes_tuple: bool


def _saved_bytes(stages: list[Stage], micro_batch: MiniBatch) -> list[_Saved]:
    return [_saved_by(one) for _, one in _walk(stages, micro_batch)]


def _saved_by(one: _Pass) -> _Saved:
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        one.forward()
    for known in (*one.stage.module.parameters(), *one.stage.module.buffers(), *tensors_of(one.targets)):
        storages.pop(known.untyped_storage().data_ptr(), None)
    values = tensors_of(one.arrived.value)
    kept = [storages.pop(tensor.untyped_storage().data_ptr(), None) is not None for tensor in one.arrived.tensors]
    return _Saved(
        saved_bytes=sum(storages.values()),
        input_bytes=sum(tensor.nbytes for tensor in values),
        saves_input=any(kept[: len(values)]),
        put_off_bytes=_put_off_bytes(one),
        popped_bytes={name: tensor.nbytes for name, tensor in one.arrived.kept.items()},
        takes_tuple=isinstance(one.arrived.value, tuple),
    )


def _put_off_bytes(one: _Pass) -> int:
    with _queued(one.stage) as split:
        outputs = one.forward()
        put_off = split.of_input(_roots(split, outputs), one.arrived.tensors, _ones(outputs))
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in put_off for t in (p.x, p.gradient)
        }
        return sum(storages.values())
