"""What a layer may say of itself, and how it is called; plain attributes, so that a user's layers need nothing of ours.

A layer is any nn.Module that takes one value (see `values`) and returns one. Beyond that it may have

- `stash = ("name", ...)`: it returns a tuple of its value and one more tensor for each name, kept for a later layer;
- `pop = ("name", ...)`: it is called with its value and one more tensor for each name, as an earlier layer stashed it;
- `tie = {"parameter": "name"}`: this parameter and those that other layers give the same name are one;
- `auxiliary_loss`: where it, or a module in it, has this attribute, the scalar that a forward leaves there is added to
  the loss. It is taken for a mean over the samples of that forward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipebench.values import Value


def stashed_by(layer: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(layer, "stash", ()))


def popped_by(layer: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(layer, "pop", ()))


def tied_by(layer: nn.Module) -> Mapping[str, str]:
    """Return the name of the tie of each parameter that has one."""
    return dict(getattr(layer, "tie", {}))


def run_layer(layer: nn.Module, value: Value, kept: dict[str, Tensor], call: Callable[..., Any] | None = None) -> Value:
    """Return the layer's value; what it pops is taken from `kept`, what it stashes is put there.

    `call` stands for the layer itself where it is not to be called as it is.
    """
    result = (call or layer)(value, *(kept.pop(name) for name in popped_by(layer)))
    stashed = stashed_by(layer)
    if not stashed:
        return result  # type: ignore[no-any-return]
    result, *tensors = result
    kept.update(zip(stashed, tensors, strict=True))
    return result  # type: ignore[no-any-return]


def with_auxiliary_loss(layer: nn.Module) -> list[nn.Module]:
    """Return the modules in a layer that add to the loss."""
    return [module for module in layer.modules() if hasattr(module, "auxiliary_loss")]


def take_auxiliary_loss(modules: Sequence[nn.Module]) -> Tensor | None:
    """Return what the last forward left to be added to the loss, and take it away; None where it left nothing."""
    total = None
    for module in modules:
        loss: Tensor | None = module.auxiliary_loss  # type: ignore[assignment]
        module.auxiliary_loss = None  # type: ignore[assignment]
        if loss is not None:
            total = loss if total is None else total + loss
    return total
