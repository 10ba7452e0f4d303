"""What each layer costs alone, measured once per model and micro-batch size: partition and memory model need it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from pipebench.data import batches
from pipebench.engine.backward import QueuedBackward
from pipebench.engine.stage import Stage
from pipebench.harness.jobs import ProfileJob, WeighJob
from pipebench.harness.launch import Progress, Report
from pipebench.harness.setting import autocast_of, claim_cores
from pipebench.linear import WeightQueue, adopt
from pipebench.models import layer_sequence
from pipebench.models.layers import build_layers
from pipebench.record import LayerProfile

_ROUNDS = (3, 9)
"""Fewest and most timed rounds; as many as fit `_BUDGET_S`."""

_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """Seconds of one layer in one round."""

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float


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
    stages = []
    for index, layer in enumerate(build_layers(model, range(model.num_layers), job.config.seed)):
        stages.append(Stage([layer], index, job.config.seed, device, autocast_of(job.config), model.loss))
        stages[-1].module.to("cpu")
    batch = batches(job.config)(0).to(str(device))
    inputs, targets = batch.inputs[: job.num_samples], batch.targets[: job.num_samples]
    saved = _saved_bytes(stages, inputs, targets)
    rounds = _timed_rounds(stages, inputs, targets) if job.timed else []
    layers = list(zip(*rounds, strict=True))
    return LayerProfile(
        num_samples=job.num_samples,
        names=[type(stage.module[0]).__name__ for stage in stages],
        forward_s=[median(times.forward_s for times in layer) for layer in layers],
        backward_s=[median(times.backward_s for times in layer) for layer in layers],
        input_s=[median(times.input_s for times in layer) for layer in layers],
        weight_s=[median(times.weight_s for times in layer) for layer in layers],
        parameter_bytes=[sum(p.nbytes for p in stage.module.parameters()) for stage in stages],
        saved_bytes=[size for size, _, _, _ in saved],
        put_off_bytes=[size for _, _, _, size in saved],
        input_bytes=[size for _, size, _, _ in saved],
        saves_input=[kept for _, _, kept, _ in saved],
    )


def _timed_rounds(stages: list[Stage], inputs: Tensor, targets: Tensor) -> list[list[_LayerTimes]]:
    _time_round(stages, inputs, targets)
    rounds: list[list[_LayerTimes]] = []
    began = time.perf_counter()
    while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and time.perf_counter() - began < _BUDGET_S):
        rounds.append(_time_round(stages, inputs, targets))
    return rounds


def _time_round(stages: list[Stage], x: Tensor, targets: Tensor) -> list[_LayerTimes]:
    """Run every layer forward and at once backward, whole and split; only one layer is on the device at a time."""
    times = []
    for index, stage in enumerate(stages):
        stage.module.to(stage.device)
        target = targets if index == len(stages) - 1 else None
        forward_s, output, backward_s = _time_whole(stage, x, target)
        times.append(_LayerTimes(forward_s, backward_s, *_time_split(stage, x, target)))
        stage.module.zero_grad(set_to_none=True)
        stage.module.to("cpu")
        x = output
    return times


def _time_whole(stage: Stage, x: Tensor, target: Tensor | None) -> tuple[float, Tensor, float]:
    x = x.detach().requires_grad_(x.is_floating_point())
    began = _now(stage.device)
    output = _forward(stage, x, target)
    forward_s = _now(stage.device) - began
    gradient = torch.ones_like(output)
    began = _now(stage.device)
    torch.autograd.backward([output], [gradient])
    return forward_s, output, _now(stage.device) - began


def _time_split(stage: Stage, x: Tensor, target: Tensor | None) -> tuple[float, float]:
    """Return the seconds of the input's and of the weights' part, as in a stage that has linear layers."""
    with _queued(stage) as split:
        x = x.detach().requires_grad_(x.is_floating_point())
        output = _forward(stage, x, target)
        gradient = torch.ones_like(output)
        began = _now(stage.device)
        put_off = split.of_input(split.root_of(output), x, gradient)
        of_input = _now(stage.device)
        split.of_weights(put_off)
        return of_input - began, _now(stage.device) - of_input


@contextlib.contextmanager
def _queued(stage: Stage) -> Iterator[QueuedBackward]:
    queue = WeightQueue()
    adopt(stage.module, queue)
    yield QueuedBackward(queue)
    adopt(stage.module, None)


def _forward(stage: Stage, x: Tensor, target: Tensor | None) -> Tensor:
    output = stage.forward(x, step=0, micro_batch=0)
    return output if target is None else stage.loss_of(output, target)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _saved_bytes(stages: list[Stage], x: Tensor, targets: Tensor) -> list[tuple[int, int, bool, int]]:
    """Return for each layer the bytes it saves besides its input, its input's bytes, whether it saves that, and the
    bytes it keeps between the two parts of a split backward."""
    found = []
    for index, stage in enumerate(stages):
        x = x.detach().requires_grad_(x.is_floating_point())
        stage.module.to(stage.device)
        target = targets if index == len(stages) - 1 else None
        storages: dict[int, int] = {}

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = _forward(stage, x, target)
        for parameter in stage.module.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        storages.pop(targets.untyped_storage().data_ptr(), None)
        kept = storages.pop(x.untyped_storage().data_ptr(), None) is not None
        found.append((sum(storages.values()), x.numel() * x.element_size(), kept, _put_off_bytes(stage, x, target)))
        stage.module.zero_grad(set_to_none=True)
        stage.module.to("cpu")
        x = output
    return found


def _put_off_bytes(stage: Stage, x: Tensor, target: Tensor | None) -> int:
    with _queued(stage) as split:
        output = _forward(stage, x, target)
        put_off = split.of_input(split.root_of(output), x, torch.ones_like(output))
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in put_off for t in (p.x, p.gradient)
        }
        return sum(storages.values())
