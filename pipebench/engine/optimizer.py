"""The configured optimizer over some parameters, with groups of their own for those that do not decay."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipebench.config import OptimizerConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of these parameters, which need a gradient."""
    settings: dict[str, Any] = {"lr": config.lr, "fused": True}
    if config.momentum:
        settings["momentum"] = config.momentum
    if config.weight_decay is not None:
        settings["weight_decay"] = config.weight_decay
    return OPTIMIZERS[config.name](_groups(config.decay, parameters), **settings)


def _groups(decay: str, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Biases and the scales of norms have one dimension: `matrices` leaves them as they are."""
    if decay == "all":
        return [{"params": list(parameters)}]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
