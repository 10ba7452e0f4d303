"""Batch norm in a pipeline: what a mini-batch's statistics are when it comes in micro-batches.

Each micro-batch is normalized by its own mean and variance: those of the others are not there yet. What is a choice is
the running statistics that evaluation uses. Deferred, they are moved once a step, towards the statistics of the whole
mini-batch by count, as one device with the whole mini-batch would move them (deferred batch norm: Kim et al. 2020,
section 3). Otherwise each micro-batch moves them, as plain PyTorch does in a loop over them. A forward that is run
again for a backward, and one that only infers shapes, moves nothing either way.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(slots=True)
class _Counted:
    """What the micro-batches of a step add up to, by channel."""

    count: int
    total: Tensor
    squares: Tensor


class BatchNorms:
    """The batch norms of a stage that keep running statistics; false where there are none."""

    def __init__(self, module: nn.Module, deferred: bool) -> None:
        found = (layer for layer in module.modules() if isinstance(layer, _BatchNorm))
        self._layers = [layer for layer in found if layer.running_mean is not None]
        self._deferred = deferred
        self._counted: dict[nn.Module, _Counted] = {}
        self._moving = True
        for layer in self._layers if deferred else ():
            layer.track_running_stats = False  # in training only: evaluation uses whatever statistics there are
            layer.register_forward_pre_hook(self._count)

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Let the forwards meanwhile, be they cut short, move nothing, and save for backward what they would without.

        A layer that does not track its statistics saves two tensors less, so here it tracks them by nothing at all.
        """
        before, moved = self._moving, [] if self._deferred else self._layers
        kept = [(layer.momentum, layer.num_batches_tracked) for layer in moved]
        self._moving = False
        for layer in moved:
            layer.momentum, layer.num_batches_tracked = 0.0, torch.zeros((), dtype=torch.long)
        try:
            yield
        finally:
            self._moving = before
            for layer, (momentum, num_batches) in zip(moved, kept, strict=True):
                layer.momentum, layer.num_batches_tracked = momentum, num_batches

    @torch.no_grad()
    def commit(self) -> None:
        """Move the deferred statistics by what was counted since the last call, and count anew."""
        for layer in self._layers:
            counted = self._counted.pop(layer, None)
            if counted is not None:
                _move(layer, counted)

    def forget(self) -> None:
        """Count anew: the step's gradients are not used, so its statistics are not either."""
        self._counted.clear()

    def _count(self, layer: nn.Module, inputs: Sequence[Tensor]) -> None:
        if not (self._moving and layer.training):
            return
        x = inputs[0].detach()
        over = [dimension for dimension in range(x.dim()) if dimension != 1]
        variance, mean = (each.double() for each in torch.var_mean(x.float(), over, correction=0))
        count = x.numel() // x.shape[1]
        total, squares = mean * count, (variance + mean.square()) * count
        counted = self._counted.get(layer)
        if counted is None:
            self._counted[layer] = _Counted(count, total, squares)
        else:
            counted.count += count
            counted.total += total
            counted.squares += squares


def _move(layer: _BatchNorm, counted: _Counted) -> None:
    """Do what nn.BatchNorm does after a forward: the variance kept is the unbiased one."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    mean = counted.total / counted.count
    variance = (counted.squares / counted.count - mean.square()) * (counted.count / max(1, counted.count - 1))
    layer.num_batches_tracked += 1
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
