"""What a model is to the bench: layers (see `pipebench.layer`) that can be built apart from one another, and a loss."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipebench.errors import ConfigError
from pipebench.layer import declared_by
from pipebench.seeds import Purpose, seed_of
from pipebench.values import num_samples

Loss = Callable[[Any, Any], Tensor]
"""(output, target) to the mean over what `LayerSequence.count` counts."""


@dataclass(frozen=True, slots=True)
class LayerSequence:
    """A model whose layer i eats what layer i-1 returns.

    `build(indices, seed)` makes some of its layers anew, with weights that depend on the seed and the model alone.
    `loss(output, target)` is a mean over `count(target)` things: samples, or what else a mini-batch's loss is the mean
    of, such as tokens that are no padding; it may be anything where that count is 0. So are `metrics`, what an
    evaluation tells besides the loss.
    """

    num_layers: int
    build: Callable[[Sequence[int], int], list[nn.Module]]
    loss: Loss
    count: Callable[[Any], Tensor | int] = num_samples
    metrics: Mapping[str, Loss] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Skip:
    """A tensor that layer `source` stashes and layer `target` pops."""

    name: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter in several places, each a layer's index and the parameter's name in it, first layer first."""

    name: str
    places: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the layers say of themselves: `names` are their classes'."""

    names: tuple[str, ...]
    skips: tuple[Skip, ...]
    ties: tuple[Tie, ...]
    has_auxiliary_loss: tuple[bool, ...]


def one_by_one(makers: Iterable[Callable[[], nn.Module]]) -> Callable[[Sequence[int], int], list[nn.Module]]:
    """Return the `build` of a model whose layers are made singly: weights depend on the layer's index and the seed."""
    made_by = tuple(makers)

    def build(indices: Sequence[int], seed: int) -> list[nn.Module]:
        layers = []
        for index in indices:
            torch.default_generator.manual_seed(seed_of(seed, Purpose.WEIGHTS, index))
            layers.append(made_by[index]())
        return layers

    return build


def build_layers(model: LayerSequence, indices: Sequence[int], seed: int) -> list[nn.Module]:
    """Build the layers at `indices`; tied parameters among them are one object, valued as at their first place."""
    ties = [tie for tie in layout_of(model).ties if any(layer in indices for layer, _ in tie.places)]
    wanted = sorted({*indices, *(tie.places[0][0] for tie in ties)})
    layers = dict(zip(wanted, model.build(wanted, seed), strict=True))
    for tie in ties:
        (first, name), *others = tie.places
        parameter = layers[first].get_parameter(name)
        for layer, other in others:
            if layer in layers:
                _put(layers[layer], other, parameter, tie)
    return [layers[index] for index in indices]


@cache
def layout_of(model: LayerSequence) -> Layout:
    """Return what a model's layers say of themselves; raise ConfigError, one line, for what does not fit together."""
    with torch.device("meta"):
        layers = model.build(range(model.num_layers), 0)
    return Layout(
        tuple(type(layer).__name__ for layer in layers),
        _skips(layers),
        _ties(layers),
        tuple(bool(declared_by(layer).adding) for layer in layers),
    )


def skips_between(layout: Layout, layers_per_stage: Sequence[int]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the names of the skips that pass from one stage to another, by the pair of them."""
    stage_of = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    between: dict[tuple[int, int], tuple[str, ...]] = {}
    for skip in layout.skips:
        edge = (stage_of[skip.source], stage_of[skip.target])
        if edge[0] != edge[1]:
            between[edge] = (*between.get(edge, ()), skip.name)
    return between


def _skips(layers: Sequence[nn.Module]) -> tuple[Skip, ...]:
    skips, waiting = list[Skip](), dict[str, int]()
    for index, layer in enumerate(layers):
        for name in declared_by(layer).pops:
            if name not in waiting:
                raise ConfigError(f"{_told(index, layer)} pops {name!r}: expected an earlier layer that stashes it")
            skips.append(Skip(name, waiting.pop(name), index))
        for name in declared_by(layer).stashes:
            if name in waiting:
                raise ConfigError(
                    f"{_told(index, layer)} stashes {name!r}, as layer {waiting[name]} does: expected another name, "
                    "or a layer between them that pops it"
                )
            waiting[name] = index
    if waiting:
        name, index = next(iter(waiting.items()))
        raise ConfigError(f"{_told(index, layers[index])} stashes {name!r}: expected a later layer that pops it")
    return tuple(skips)


def _ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    places: dict[str, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for parameter, name in declared_by(layer).ties.items():
            if parameter not in dict(layer.named_parameters(remove_duplicate=False)):
                raise ConfigError(f"{_told(index, layer)} ties {parameter!r}: expected the name of its parameter")
            places.setdefault(name, []).append((index, parameter))
    return tuple(Tie(name, tuple(found)) for name, found in places.items() if len(found) > 1)


def _put(layer: nn.Module, name: str, parameter: nn.Parameter, tie: Tie) -> None:
    owner, _, last = name.rpartition(".")
    module = layer.get_submodule(owner)
    own = getattr(module, last)
    if own.shape != parameter.shape or own.dtype != parameter.dtype:
        raise ConfigError(
            f"tie {tie.name!r}: {name} is {tuple(own.shape)} {own.dtype}: expected {tuple(parameter.shape)} "
            f"{parameter.dtype}, as in layer {tie.places[0][0]}"
        )
    setattr(module, last, parameter)


def _told(index: int, layer: nn.Module) -> str:
    return f"layer {index} ({type(layer).__name__})"
