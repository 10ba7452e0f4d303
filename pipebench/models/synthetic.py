"""Layers that take a given time by sleeping: schedules show truly on any K, with fewer cores than stages.

Each layer also holds a small linear map, so that gradients flow and can be checked.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import SyntheticConfig
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes `seconds_of()` for each of `num_samples`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds_of: Callable[[], float], num_samples: int) -> Tensor:
        ctx.seconds_of, ctx.num_samples = seconds_of, num_samples
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds_of() * ctx.num_samples)
        return gradients[0], None, None


class _SleepyLinear(Linear):
    """A linear map whose weight gradient, where a queue makes it work of its own, takes `weight_s` a sample."""

    def __init__(self, width: int, weight_s: float) -> None:
        super().__init__(width, width)
        self.weight_s = weight_s

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None:
        time.sleep(self.weight_s * len(x))
        super().add_weight_gradient(x, gradient)


class Sleep(nn.Module):
    """A linear map that takes `forward_s`, `input_s` and `weight_s` seconds for each sample.

    Where the backward is one piece it takes the last two together.
    """

    def __init__(self, width: int, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.input_s = input_s
        self.linear = _SleepyLinear(width, weight_s)

    def forward(self, x_BD: Tensor) -> Tensor:
        if x_BD.device.type != "meta":  # shape inference takes no time
            time.sleep(self.forward_s * len(x_BD))
        y_BD: Tensor = self.linear(x_BD)
        result: Tensor = _SleepInBackward.apply(y_BD, self._backward_s, len(x_BD))  # type: ignore[no-untyped-call]
        return result

    def _backward_s(self) -> float:
        """Return a sample's seconds besides those that the linear map's weight gradient takes by itself."""
        return self.input_s + (self.linear.weight_s if self.linear.queue is None else 0.0)


def synthetic(config: SyntheticConfig) -> LayerSequence:
    """The last layer takes (1 + imbalance) times as long as the others."""
    weight_s = config.backward_s * config.weight_share
    input_s = config.backward_s - weight_s
    factors = [1.0] * (config.layers - 1) + [1.0 + config.imbalance]
    return LayerSequence(
        tuple(
            partial(Sleep, config.width, config.forward_s * factor, input_s * factor, weight_s * factor)
            for factor in factors
        ),
        functional.mse_loss,
    )
