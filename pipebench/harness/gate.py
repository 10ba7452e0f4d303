"""The gradient gate: a point's gradients against plain single-process PyTorch.

A fast pipeline with wrong gradients is worth nothing, and several published engines were wrong with a
healthy-looking loss. So every point's own K, M, schedule and recompute setting is checked, dropout on.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.stage import default_generator
from pipebench.layer import declared_by, run_layer, take_auxiliary_loss
from pipebench.models.layers import LayerSequence, build_layers
from pipebench.seeds import Purpose, seed_of

_FLOOR = 1e-2
"""A parameter whose gradient is zero but for rounding (the bias of attention keys) is measured against this
share of the model's root-mean-square gradient instead of its own."""


def plain_gradients(
    model: LayerSequence,
    batch: MiniBatch,
    num_micro_batches: int,
    seed: int,
    step: int,
    device: torch.device,
    autocast: torch.dtype | None,
    loss_factor: float,
) -> list[nn.Module]:
    """Return freshly built layers that hold the gradients of one mini-batch's mean loss times a factor.

    No engine code: a loop over micro-batches and layers, each loss weighted by its share of what is counted.
    """
    layers = [layer.to(device) for layer in build_layers(model, range(model.num_layers), seed)]
    declared = [declared_by(layer) for layer in layers]
    pieces = batch.split(micro_batch_sizes(len(batch), num_micro_batches))
    counts = [model.count(piece.targets) for piece in pieces]
    generator = default_generator(device)
    for micro_batch, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        value, kept, auxiliary = piece.inputs, dict[str, Tensor](), list[Tensor]()
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            for index, layer in enumerate(layers):
                generator.manual_seed(seed_of(seed, Purpose.DROPOUT, step, micro_batch, index))
                value = run_layer(layer, declared[index], value, kept)
                added = take_auxiliary_loss(declared[index])
                if added is not None:
                    auxiliary.append(added * (len(piece) / len(batch)))
            if count:
                auxiliary.append(model.loss(value, piece.targets) * (count / sum(counts)))
        if any(loss.requires_grad for loss in auxiliary):
            (torch.stack(auxiliary).sum() * loss_factor).backward()
    return layers


def largest_error(
    own: Mapping[int, Sequence[Tensor]], reference: list[nn.Module] | None, owners: list[int], rank: int
) -> float:
    """Return the largest relative error over all parameters of all ranks; the same number on every rank.

    `own` holds this rank's gradients by layer. Rank 0 passes the reference layers and sends every other rank its
    share; `owners[i]` is the rank of layer i.
    The error of a parameter is |g - g'| / |g'|, Euclidean norms.
    """
    scale = torch.zeros(1, dtype=torch.float64)
    if reference is not None:
        gradients = [_gradient(p) for layer in reference for p in layer.parameters()]
        elements = sum(gradient.numel() for gradient in gradients)
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
        scale[0] = (squares / max(1, elements)) ** 0.5
    dist.broadcast(scale, src=0)
    worst = torch.zeros(1, dtype=torch.float64)
    for index, owner in enumerate(owners):
        expected = [_gradient(p) for p in reference[index].parameters()] if reference is not None else []
        if rank == 0 and owner != 0:
            for gradient in expected:
                dist.send(gradient, dst=owner)
        elif rank == owner:
            for place, gradient in enumerate(map(_on_host, own[index])):
                if owner != 0:
                    expected.append(torch.empty_like(gradient))
                    dist.recv(expected[place], src=0)
                error = _relative_error(gradient, expected[place], float(scale))
                worst[0] = max(float(worst), error)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _relative_error(gradient: Tensor, expected: Tensor, scale: float) -> float:
    """Return |g - g'| / |g'|; not-a-number counts as infinitely wrong."""
    floor = _FLOOR * scale * expected.numel() ** 0.5
    error = float((gradient.double() - expected.double()).norm())
    size = max(float(expected.double().norm()), floor)
    if error == 0.0:
        return 0.0
    return error / size if size > 0 and math.isfinite(error) else math.inf


def _gradient(parameter: nn.Parameter) -> Tensor:
    return _on_host(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))


def _on_host(gradient: Tensor) -> Tensor:
    return gradient.detach().cpu().contiguous()
