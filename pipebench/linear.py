"""The linear layer whose weight gradient can wait.

A split backward computes the gradient of a stage's input first and those of its weights later. Almost all of the
latter is one matrix product per linear layer, which needs the layer's input and its output's gradient and nothing
else; so a linear layer can put those two aside and let the rest of the graph go.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(slots=True)
class PutOff:
    """One product that waits: `x` (..., in) and `gradient` (..., out) of the layer's output."""

    linear: "Linear"
    x: Tensor
    gradient: Tensor


@dataclass(slots=True)
class WeightQueue:
    """Where a stage's linear layers put their products off to; while `waiting` is None they compute at once."""

    waiting: list[PutOff] | None = field(default=None)


class Linear(nn.Linear):
    """nn.Linear; with a `queue`, its weight gradient waits whenever the queue is open. The bias's never does."""

    queue: WeightQueue | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.queue is None or not torch.is_grad_enabled():
            return functional.linear(x, self.weight, self.bias)
        result: Tensor = _Product.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """Add gradient^T x, summed over all leading dimensions, to the weight's `.grad`."""
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        if self.weight.grad is None:
            self.weight.grad = (gradient.t() @ x).to(self.weight.dtype)
        elif self.weight.grad.dtype == gradient.dtype:
            self.weight.grad.addmm_(gradient.t(), x)
        else:
            self.weight.grad += gradient.t() @ x


def adopt(module: nn.Module, queue: WeightQueue | None) -> int:
    """Let the linear layers inside `module` use `queue`, plain nn.Linear ones too; return how many have work for it.

    Subclasses of nn.Linear other than ours are left alone: what they compute is theirs to know.
    """
    num_adopted = 0
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
        if isinstance(layer, Linear):
            layer.queue = queue
            num_adopted += layer.weight.requires_grad
    return num_adopted


@torch.no_grad()
def catch_up(waiting: list[PutOff]) -> None:
    """Compute what was put off, oldest first, and let each pair of tensors go as soon as it is used."""
    waiting.reverse()
    while waiting:
        product = waiting.pop()
        product.linear.add_weight_gradient(product.x, product.gradient)


class _Product(torch.autograd.Function):
    """x W^T + b, computed as autocast would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        ctx.linear = linear
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        waiting = ctx.linear.queue.waiting if ctx.linear.queue is not None else None
        of_weight = None
        if wants_weight and waiting is not None:
            waiting.append(PutOff(ctx.linear, x, gradient))
        elif wants_weight:
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
        of_x = gradient @ weight.to(gradient.dtype) if wants_x else None
        of_bias = gradient.flatten(0, -2).sum(0) if wants_bias else None
        return of_x, of_weight, of_bias, None
