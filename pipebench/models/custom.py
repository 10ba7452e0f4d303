"""A user's own model: whatever their function returns, as layers.

Their function makes all layers at once, so every rank builds the whole model under the same seed and keeps its own
layers; only those weights stay in memory.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipebench.config import CustomConfig
from pipebench.errors import ConfigError
from pipebench.layer import declared_by
from pipebench.models.layers import LayerSequence
from pipebench.models.losses import loss_named
from pipebench.seeds import Purpose, seed_of
from pipebench.target import call, check_unedited

_WANTED = "expected an nn.Sequential, or a list of layers, each called with what the one before it returned"


def custom(config: CustomConfig) -> LayerSequence:
    assert config.target is not None
    check_unedited("model.target", config.target, config.source)

    def build(indices: Sequence[int], seed: int) -> list[nn.Module]:
        layers = all_layers(config, seed)
        return [layers[index] for index in indices]

    loss = loss_named(config.loss)
    return LayerSequence(config.num_layers, build, loss.mean, loss.count, loss.metrics)


def all_layers(config: CustomConfig, seed: int) -> list[nn.Module]:
    """Call the user's function and return its layers; raise ConfigError where it returns something else.

    On the meta device too, where torch was told to build there; a function that needs numbers is let have them.
    """
    if torch.get_default_device().type != "meta":
        return _called(config, seed)
    try:
        return _called(config, seed)
    except ConfigError:
        with torch.device("cpu"):
            layers = _called(config, seed)
        return list(nn.ModuleList(layers).to("meta"))


def _called(config: CustomConfig, seed: int) -> list[nn.Module]:
    _seed(seed_of(seed, Purpose.WEIGHTS))
    assert config.target is not None
    layers = _layers_of(call("model", config.target, (), config.arguments), f"model.target={config.target}")
    _refuse_shared(layers)
    return layers


def _seed(seed: int) -> None:
    """Seed whatever their initialization may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _layers_of(made: object, written: str) -> list[nn.Module]:
    if isinstance(made, nn.Sequential) and type(made).forward is not nn.Sequential.forward:
        raise ConfigError(f"{written}: returned a {type(made).__name__} with a forward of its own: {_WANTED}")
    if not isinstance(made, (nn.Sequential, nn.ModuleList, list, tuple)):
        raise ConfigError(f"{written}: returned a {type(made).__name__}: {_WANTED}")
    layers = list(made)
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"{written}: item {index} is a {type(layer).__name__}, no nn.Module: {_WANTED}")
        if any(map(is_lazy, (*layer.parameters(), *layer.buffers()))):
            raise ConfigError(
                f"layer {index} ({type(layer).__name__}) has parameters without a shape: expected a layer that is not "
                "lazy, such as nn.Linear(inputs, outputs) in the place of nn.LazyLinear(outputs)"
            )
    if not layers:
        raise ConfigError(f"{written}: returned no layers: {_WANTED}")
    return layers


def _refuse_shared(layers: Sequence[nn.Module]) -> None:
    """Raise where layers share a parameter, or what else they save, and do not say so: on two ranks it would part."""
    seen: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, tensor in layer.state_dict(keep_vars=True).items():
            other, others_name = seen.setdefault(id(tensor), (index, name))
            tie = declared_by(layer).ties.get(name)
            if other != index and (tie is None or tie != declared_by(layers[other]).ties.get(others_name)):
                raise ConfigError(
                    f"layer {index} ({type(layer).__name__}): its {name!r} is {others_name!r} of layer {other} "
                    f"({type(layers[other]).__name__}) as well: expected ties = {{{name!r}: 'a name'}} on the one and "
                    f"{{{others_name!r}: 'a name'}} on the other, or a layer of its own"
                )
