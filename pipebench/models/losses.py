"""What models are trained for, by name: each a mean, and what it is the mean over.

A mini-batch's loss is the mean over all its samples, or over whatever else counts in it: padding does not. So each loss
says how many things count, for micro-batches to be weighed by that. A user's own loss is a function of (output, target)
to a mean over samples; one that is a mean over something else has an attribute `count`, a function of a target, and one
with an attribute `metrics`, functions like itself by their names, has those told by an evaluation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional

from pipebench.target import load
from pipebench.values import Value, num_samples

PADDING = -100
"""The target that counts nothing, PyTorch's own default."""


@dataclass(frozen=True, slots=True)
class Mean:
    """`mean(output, target)` over `count(target)` things, and so are `metrics`, what an evaluation tells besides."""

    mean: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor | int] = num_samples
    metrics: Mapping[str, Callable[[Any, Any], Tensor]] = field(default_factory=dict)


def _classes(logits_BC: Tensor, targets_B: Tensor) -> Tensor:
    """Mean cross-entropy over targets that are no padding: classes [B, ...] of logits [B, C, ...]; or probabilities."""
    return functional.cross_entropy(logits_BC, targets_B, ignore_index=PADDING)


def _next_tokens(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over tokens that are no padding."""
    return _classes(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _accuracy(logits_BC: Tensor, targets_B: Tensor) -> Tensor:
    """Share of targets, those that are no padding, whose class has the highest logit; or the highest probability."""
    if targets_B.is_floating_point():
        return (logits_BC.argmax(1) == targets_B.argmax(1)).float().mean()
    valid = targets_B != PADDING
    return ((logits_BC.argmax(1) == targets_B) & valid).sum() / valid.sum()


def _token_accuracy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return _accuracy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _num_valid(targets: Tensor) -> Tensor | int:
    return num_samples(targets) if targets.is_floating_point() else (targets != PADDING).sum()


mean_squared_error = Mean(functional.mse_loss)
cross_entropy = Mean(_classes, _num_valid, {"accuracy": _accuracy})
next_token = Mean(_next_tokens, _num_valid, {"accuracy": _token_accuracy})

_LOSSES = {"mean_squared_error": mean_squared_error, "cross_entropy": cross_entropy, "next_token": next_token}


def loss_named(name: str) -> Mean:
    """Return the loss of that name, or a user's own, `package.module:function`."""
    if name in _LOSSES:
        return _LOSSES[name]
    function = load("model.loss", name)
    count: Callable[[Value], Tensor | int] = getattr(function, "count", num_samples)
    return Mean(function, count, getattr(function, "metrics", {}))
