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
from pipebench.models.layers import LayerSequence


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleep(nn.Module):
    """A linear map that takes `forward_s` and `backward_s` seconds for each sample."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.linear = nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        if x_BD.device.type != "meta":  # shape inference takes no time
            time.sleep(self.forward_s * len(x_BD))
        y_BD: Tensor = self.linear(x_BD)
        result: Tensor = _SleepInBackward.apply(y_BD, self.backward_s * len(x_BD))  # type: ignore[no-untyped-call]
        return result


def synthetic(config: SyntheticConfig) -> LayerSequence:
    """The last layer takes (1 + imbalance) times as long as the others."""
    factors = [1.0] * (config.layers - 1) + [1.0 + config.imbalance]
    return LayerSequence(
        tuple(
            partial(Sleep, config.width, config.forward_s * factor, config.backward_s * factor) for factor in factors
        ),
        functional.mse_loss,
    )
