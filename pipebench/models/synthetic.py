"""Layers that take a given time by sleeping: schedules show truly on any K, with fewer cores than stages.

Each layer also holds a small linear map, so that gradients flow and can be checked.
"""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import SyntheticConfig
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence, one_by_one


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _SleepyLinear(Linear):
    """A linear map whose weight gradient takes `weight_s` a sample, whether autograd computes it or a queue."""

    def __init__(self, width: int, weight_s: float) -> None:
        super().__init__(width, width)
        self.weight_s = weight_s

    def forward(self, x: Tensor) -> Tensor:
        if self.queue is not None:
            return super().forward(x)
        weight: Tensor = _SleepInBackward.apply(self.weight, self.weight_s * len(x))  # type: ignore[no-untyped-call]
        return functional.linear(x, weight, self.bias)

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None:
        time.sleep(self.weight_s * len(x))
        super().add_weight_gradient(x, gradient)


class Sleep(nn.Module):
    """A linear map that takes `forward_s`, `input_s` and `weight_s` seconds for each sample."""

    def __init__(self, width: int, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.input_s = input_s
        self.linear = _SleepyLinear(width, weight_s)

    def forward(self, x_BD: Tensor) -> Tensor:
        ends = time.perf_counter() + self.forward_s * len(x_BD)
        y_BD: Tensor = self.linear(x_BD)
        if x_BD.device.type != "meta":  # shape inference takes no time
            time.sleep(max(0.0, ends - time.perf_counter()))
        result: Tensor = _SleepInBackward.apply(y_BD, self.input_s * len(x_BD))  # type: ignore[no-untyped-call]
        return result


def synthetic(config: SyntheticConfig) -> LayerSequence:
    """The last layer takes (1 + imbalance) times as long as the others."""
    weight_s = config.backward_s * config.weight_share
    input_s = config.backward_s - weight_s
    factors = [1.0] * (config.layers - 1) + [1.0 + config.imbalance]
    makers = (
        partial(Sleep, config.width, config.forward_s * factor, input_s * factor, weight_s * factor)
        for factor in factors
    )
    return LayerSequence(config.num_layers, one_by_one(makers), functional.mse_loss)
