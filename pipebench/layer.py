"""What a layer may say of itself, and how it is called; plain attributes, so that a user's layers need nothing of ours.

A layer is any nn.Module that takes one value (see `values`) and returns one. Beyond that it may have

- `stashes = ("name", ...)`: it returns a tuple of its value and one tensor more for each name, kept for a later layer;
- `pops = ("name", ...)`: it is called with its value and one tensor more for each name, as an earlier layer stashed it;
- `ties = {"parameter": "name"}`: this parameter and those that other layers give the same name are one;
- `auxiliary_loss`: where it, or a module in it, has this attribute, the scalar that a forward leaves there is added to
  the loss. It is taken for a mean over the samples of that forward;
- `scores = True`: a module in it with this attribute computes attention scores, their softmax and the weighted sum, and
  nothing else, from tensors to a tensor; `recompute=selective` runs it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipebench.values import Value


@dataclass(frozen=True, slots=True)
class Declared:
    """What one layer says of itself; `adding` are the modules in it that add to the loss."""

    pops: tuple[str, ...]
    stashes: tuple[str, ...]
    ties: dict[str, str]
    adding: tuple[nn.Module, ...]


PLAIN = Declared((), (), {}, ())
"""What most layers say: nothing."""


def declared_by(layer: nn.Module) -> Declared:
    declared = Declared(
        pops=tuple(getattr(layer, "pops", ())),
        stashes=tuple(getattr(layer, "stashes", ())),
        ties=dict(getattr(layer, "ties", {})),
        adding=tuple(module for module in layer.modules() if hasattr(module, "auxiliary_loss")),
    )
    return PLAIN if declared == PLAIN else declared


def run_layer(call: Callable[..., Any], declared: Declared, value: Value, kept: dict[str, Tensor]) -> Any:
    """Return the value of a layer, or of what stands for it; `kept` gives what it pops and takes what it stashes."""
    result = call(value, *[kept.pop(name) for name in declared.pops]) if declared.pops else call(value)
    if not declared.stashes:
        return result
    result, *tensors = result
    kept.update(zip(declared.stashes, tensors, strict=True))
    return result


def take_auxiliary_loss(declared: Declared) -> Tensor | None:
    """Return what the last forward left to be added to the loss, and take it away; None where it left nothing."""
    total = None
    for module in declared.adding:
        loss: Any = module.auxiliary_loss
        module.auxiliary_loss = None  # type: ignore[assignment]
        if loss is not None:
            total = loss if total is None else total + loss
    return total
