"""What a model is to the bench: layers that can be built one by one, and a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipebench.seeds import Purpose, seed_of

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerSequence:
    """A model whose layer i eats what layer i-1 returns (one tensor, samples first).

    `builders` make one layer each, so that a stage builds only its own. `loss(output, target)` is the mean
    over the samples it is given.
    """

    builders: tuple[Callable[[], nn.Module], ...]
    loss: Loss


def build_layers(model: LayerSequence, indices: Sequence[int], seed: int) -> list[nn.Module]:
    """Build the layers at `indices`; each layer's weights depend on the seed and its own index alone."""
    layers = []
    for index in indices:
        torch.default_generator.manual_seed(seed_of(seed, Purpose.WEIGHTS, index))
        layers.append(model.builders[index]())
    return layers
