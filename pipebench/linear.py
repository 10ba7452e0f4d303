"""The linear layer whose weight gradient can wait.

A split backward computes the gradient of a stage's input first and those of its weights later. Almost all of the
latter is one matrix product per linear layer, which needs the layer's input and its output's gradient and nothing
else; so a linear layer can put those two aside and let the rest of the graph go.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
    """nn.Linear; with a `queue`, its weight gradient waits whenever the queue is open. The bias's never does.

    Autograd is shown a constant weight, so it computes the gradients of input and bias as ever; a hook on the output
    takes what the product needs. That costs microseconds, where an autograd function in Python costs tens of them.
    Where the layer around it is `recomputed`, such a function it has to be: only what autograd saves can be let go of
    and brought back.
    """

    queue: WeightQueue | None = None
    recomputed: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.queue is None or not self._can_put_off(x):
            return functional.linear(x, self.weight, self.bias)
        y = functional.linear(x, self.weight.detach(), self.bias)
        if self.recomputed:
            return _Taken.apply(y, x.detach(), self._take)  # type: ignore[no-any-return, no-untyped-call]
        y.register_hook(partial(self._take, x.detach()))
        return y

    def add_weight_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """Add gradient^T x, summed over all leading dimensions, to the weight's `.grad`."""
        x, gradient = x.flatten(0, -2).to(gradient.dtype), gradient.flatten(0, -2)
        if self.weight.grad is None:
            self.weight.grad = (gradient.t() @ x).to(self.weight.dtype)
        elif self.weight.grad.dtype == gradient.dtype:
            self.weight.grad.addmm_(gradient.t(), x)
        else:
            self.weight.grad += gradient.t() @ x

    def _can_put_off(self, x: Tensor) -> bool:
        """Tell whether there will be a weight gradient, and a gradient of the output to take it from."""
        has_gradient = x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        return torch.is_grad_enabled() and self.weight.requires_grad and has_gradient

    @torch.no_grad()
    def _take(self, x: Tensor, gradient: Tensor) -> None:
        assert self.queue is not None
        if self.queue.waiting is None:
            self.add_weight_gradient(x, gradient)
        else:
            self.queue.waiting.append(PutOff(self, x, gradient))


class _Taken(torch.autograd.Function):
    """The identity of `y`, whose backward hands the saved `x` and the gradient to `take`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.take = take
        ctx.mark_dirty(y)  # so that the output is no view, which a layer after it could not change in place
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.take(x, gradient)
        return gradient, None, None


def adopt(module: nn.Module, queue: WeightQueue | None) -> int:
    """Let the linear layers inside `module` use `queue`, plain nn.Linear ones too; return how many have work for it.

    Subclasses of nn.Linear other than ours are left alone, and so are layers whose weight is computed from other
    parameters (`nn.utils.weight_norm` and the like): what they compute is theirs to know.
    """
    num_adopted = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and "weight" in layer._parameters:
            layer.__class__ = Linear
        if isinstance(layer, Linear) and "weight" in layer._parameters:
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
