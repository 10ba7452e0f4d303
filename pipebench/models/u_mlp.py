"""U-shaped multi-layer perceptron: each layer up takes what its counterpart on the way down has kept for it.

Shape suffixes: B samples, W the width at the layer's own level, halved at each level down.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import UMlpConfig
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence, one_by_one


class Down(nn.Module):
    """Half the width; what came in is kept for the layer up at the same level."""

    def __init__(self, level: int, width: int, dropout: float) -> None:
        super().__init__()
        self.stashes = (f"level {level}",)
        self.linear = Linear(width, width // 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BW: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(functional.gelu(self.linear(x_BW))), x_BW


class Up(nn.Module):
    """Twice the width, joined with what was kept at this level."""

    def __init__(self, level: int, width: int, dropout: float) -> None:
        super().__init__()
        self.pops = (f"level {level}",)
        self.widen = Linear(width // 2, width)
        self.join = Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BW: Tensor, kept_BW: Tensor) -> Tensor:
        wide_BW = functional.gelu(self.widen(x_BW))
        joined_BW: Tensor = self.dropout(self.join(torch.cat([wide_BW, kept_BW], dim=1)))
        return joined_BW


def u_mlp(config: UMlpConfig) -> LayerSequence:
    levels = [(level, config.width >> level, config.dropout) for level in range(config.depth)]
    narrowest = config.width >> config.depth
    makers: tuple[Callable[[], nn.Module], ...] = (
        partial(Linear, config.inputs, config.width),
        *(partial(Down, *level) for level in levels),
        partial(Linear, narrowest, narrowest),
        *(partial(Up, *level) for level in reversed(levels)),
        partial(Linear, config.width, config.outputs),
    )
    return LayerSequence(config.num_layers, one_by_one(makers), functional.mse_loss)
