"""Write and read what training has reached: a file for each layer, so that any partition finds its own.

Each holds the layer's parameters and buffers under the model's own names, and for a parameter the optimizer's state as
`optimizer.<name>.<state>`, and as `gradient.<name>` what has been accumulated for an update to come. A parameter that
is tied to others stands in the file of its first place. The format is safetensors: reading one runs no code.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from pipebench.errors import ConfigError
from pipebench.files import put
from pipebench.models.layers import Layout
from pipebench.saved import Saved, layer_file

Place = tuple[int, str]
"""A layer's index and the name of a tensor in it."""


def save_layer(
    folder: Path,
    index: int,
    layer: nn.Module,
    optimizers: Sequence[Optimizer],
    gradients: Sequence[Tensor],
    layout: Layout,
) -> str:
    """Write a layer's file and return its hash. Raise OSError where that cannot be.

    `gradients` are those of its parameters that wait for an update, none where none do.
    """
    waiting: dict[Tensor, Tensor] = dict(zip(layer.parameters(), gradients, strict=True)) if gradients else {}
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    tensors = {}
    for name, tensor in _own_tensors(index, layer).items():
        if _home(layout, (index, name)) != (index, name):
            continue
        tensors[name] = tensor
        if tensor in waiting:
            tensors[_gradient_name(name)] = waiting[tensor]
        for key, value in states.get(tensor, {}).items():
            if value is not None:
                tensors[_state_name(name, key)] = value
    content = safetensors.torch.save({name: each.detach().cpu().clone() for name, each in tensors.items()})
    put(folder / layer_file(index), content)
    return hashlib.sha256(content).hexdigest()


def load_layers(
    folder: Path, saved: Saved, layers: Mapping[int, nn.Module], optimizers: Sequence[Optimizer], layout: Layout
) -> None:
    """Set parameters, buffers and optimizer state to what was saved.

    Raise ConfigError, one line, where files, names, shapes or dtypes are not those of the layers.
    """
    states: dict[Tensor, dict[str, Tensor]] = {}
    read = _Files(folder, saved)
    for index, layer in layers.items():
        unused = set(read(index))
        for name, tensor in _own_tensors(index, layer).items():
            home, name_there = _home(layout, (index, name))
            found = read(home)
            _check_alike(
                f"load={folder}: layer {index} ({type(layer).__name__}): {name}", tensor, found.get(name_there)
            )
            with torch.no_grad():
                tensor.copy_(found[name_there])
            prefix = _state_name(name_there, "")
            state = {key: value for key, value in found.items() if key.startswith(prefix)}
            states[tensor] = {key.removeprefix(prefix): value for key, value in state.items()}
            if (home, name_there) == (index, name):  # copies of what is tied are summed before an update
                _load_gradient(tensor, found.get(_gradient_name(name)))
                unused -= {name, _gradient_name(name), *state}
        if unused:
            raise ConfigError(
                f"load={folder}: layer {index} ({type(layer).__name__}): has {sorted(unused)[0]} in its file: "
                "expected the names of this model"
            )
    for optimizer in optimizers:
        _load_state(optimizer, states)


def _load_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and tensor.requires_grad:
        tensor.grad = gradient.to(tensor.device)


def _load_state(optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Let the optimizer put its state where it wants it; a parameter without one has never been stepped."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: dict(states[each]) for number, each in enumerate(parameters) if states.get(each)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


class _Files:
    """Reads the layers' files, each when it is first asked for, and keeps the last two: a layer's and a tie's."""

    def __init__(self, folder: Path, saved: Saved) -> None:
        self._folder = folder
        self._saved = saved
        self._read: dict[int, dict[str, Tensor]] = {}

    def __call__(self, index: int) -> dict[str, Tensor]:
        if index not in self._read:
            path = self._folder / layer_file(index)
            try:
                content = path.read_bytes()
                if hashlib.sha256(content).hexdigest() != self._saved.layers[index].sha256:
                    raise ConfigError(f"load={self._folder}: {path.name}: is of another save, or was changed since")
                found = safetensors.torch.load(content)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"load={self._folder}: {path.name}: cannot be read: {error}") from error
            self._read = {**dict(list(self._read.items())[-1:]), index: found}
        return self._read[index]


def _own_tensors(index: int, layer: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, one that has several names under its first."""
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in layer.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"layer {index} ({type(layer).__name__}): {name} is no tensor: expected tensors to save")
        if id(tensor) not in seen:
            found[name] = tensor
        seen.add(id(tensor))
    return found


def _home(layout: Layout, place: Place) -> Place:
    """Return where a tensor is saved: at the first place of those that it is tied to."""
    return next((tie.places[0] for tie in layout.ties if place in tie.places), place)


def _state_name(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _gradient_name(name: str) -> str:
    return f"gradient.{name}"


def _check_alike(where: str, own: Tensor, saved: Tensor | None) -> None:
    if saved is None:
        raise ConfigError(f"{where} was not saved: expected the names of this model")
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ConfigError(f"{where} was saved as {_told(saved)}: expected {_told(own)}, as this model has it")


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
