"""What each layer costs alone, measured once per model and micro-batch size: partition and memory model need it."""

import time
from statistics import median

import torch
from torch import Tensor

from pipebench.data import batches
from pipebench.engine.stage import Stage
from pipebench.harness.jobs import ProfileJob
from pipebench.harness.launch import Progress, Report
from pipebench.harness.setting import autocast_of, claim_cores
from pipebench.models import layer_sequence
from pipebench.models.layers import build_layers
from pipebench.record import LayerProfile

_ROUNDS = (3, 9)
"""Fewest and most timed rounds; as many as fit `_BUDGET_S`."""

_BUDGET_S = 1.0


def profile_layers(job: ProfileJob, report: Report) -> LayerProfile:
    """Measure every layer on its own, training mode, real data; runs in a worker."""
    device = claim_cores(job.config, job.cores, local_rank=0)
    report(Progress("profiling layers"))
    model = layer_sequence(job.config.model)
    stages = []
    for index, layer in enumerate(build_layers(model, range(len(model.builders)), job.config.seed)):
        stages.append(Stage([layer], index, job.config.seed, device, autocast_of(job.config), model.loss))
        stages[-1].module.to("cpu")
    batch = batches(job.config)(0).to(str(device))
    inputs, targets = batch.inputs[: job.num_samples], batch.targets[: job.num_samples]
    saved = _saved_bytes(stages, inputs, targets)
    rounds = _timed_rounds(stages, inputs, targets) if job.timed else []
    return LayerProfile(
        num_samples=job.num_samples,
        names=[type(stage.module[0]).__name__ for stage in stages],
        forward_s=[median(layer) for layer in zip(*(forward for forward, _ in rounds), strict=True)],
        backward_s=[median(layer) for layer in zip(*(backward for _, backward in rounds), strict=True)],
        parameter_bytes=[sum(p.nbytes for p in stage.module.parameters()) for stage in stages],
        saved_bytes=[size for size, _, _ in saved],
        input_bytes=[size for _, size, _ in saved],
        saves_input=[kept for _, _, kept in saved],
    )


def _timed_rounds(stages: list[Stage], inputs: Tensor, targets: Tensor) -> list[tuple[list[float], list[float]]]:
    _time_round(stages, inputs, targets)
    rounds: list[tuple[list[float], list[float]]] = []
    began = time.perf_counter()
    while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and time.perf_counter() - began < _BUDGET_S):
        rounds.append(_time_round(stages, inputs, targets))
    return rounds


def _time_round(stages: list[Stage], x: Tensor, targets: Tensor) -> tuple[list[float], list[float]]:
    """Run every layer forward and at once backward; only one layer is on the device at a time."""
    forward_s, backward_s = [], []
    for index, stage in enumerate(stages):
        stage.module.to(stage.device)
        x = x.detach().requires_grad_(x.is_floating_point())
        began = _now(stage.device)
        output = stage.forward(x, step=0, micro_batch=0)
        if index == len(stages) - 1:
            output = stage.loss_of(output, targets)
        forward_s.append(_now(stage.device) - began)
        gradient = torch.ones_like(output)
        began = _now(stage.device)
        torch.autograd.backward([output], [gradient])
        backward_s.append(_now(stage.device) - began)
        stage.module.zero_grad(set_to_none=True)
        stage.module.to("cpu")
        x = output
    return forward_s, backward_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _saved_bytes(stages: list[Stage], x: Tensor, targets: Tensor) -> list[tuple[int, int, bool]]:
    """Return for each layer the bytes it saves besides its input, its input's bytes, and whether it saves that."""
    found = []
    for index, stage in enumerate(stages):
        x = x.detach().requires_grad_(x.is_floating_point())
        stage.module.to(stage.device)
        storages: dict[int, int] = {}

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = stage.forward(x, step=0, micro_batch=0)
            if index == len(stages) - 1:
                output = stage.loss_of(output, targets)
        for parameter in stage.module.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        storages.pop(targets.untyped_storage().data_ptr(), None)
        kept = storages.pop(x.untyped_storage().data_ptr(), None) is not None
        stage.module.to("cpu")
        found.append((sum(storages.values()), x.numel() * x.element_size(), kept))
        x = output
    return found
