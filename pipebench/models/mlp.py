"""Residual multi-layer perceptron for regression or classification.

Shape suffixes: B samples, I inputs, D width, C outputs.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import MlpConfig
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence, one_by_one
from pipebench.models.losses import cross_entropy, mean_squared_error


class Residual(nn.Module):
    """x + dropout(linear(gelu(norm(x)))); the norm is over the width (layer) or over the samples (batch)."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.norm = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[config.norm](config.width)
        self.linear = Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        update_BD: Tensor = self.dropout(self.linear(functional.gelu(self.norm(x_BD))))
        return x_BD + update_BD


def mlp(config: MlpConfig) -> LayerSequence:
    residuals = (partial(Residual, config),) * config.layers
    makers: tuple[Callable[[], nn.Module], ...] = (
        partial(Linear, config.inputs, config.width),
        *residuals,
        partial(Linear, config.width, config.outputs),
    )
    loss = {"regression": mean_squared_error, "classification": cross_entropy}[config.task]
    return LayerSequence(config.num_layers, one_by_one(makers), loss.mean, loss.count, loss.metrics)
