"""A stage's backward, in one piece or in two: the gradient of its input first, those of its weights later.

Three ways, chosen once per stage. A stage whose schedule never splits runs plain autograd. One with linear layers
puts their products off (`pipebench.linear`) and keeps two tensors a layer for them. One without any falls back to
the split of torch.distributed.pipelining, which keeps the whole graph and costs more, but takes any model; where it
runs layers again inside its backward, it puts nothing off and computes all with the gradient of its input.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from pipebench.linear import PutOff, WeightQueue, adopt, catch_up

Root = Tensor | GradientEdge | None
"""Where a backward starts, one of an output; None where nothing that it was made of needs a gradient."""


class Backward(Protocol):
    """Gradients of parameters add up in `.grad`; those of the inputs are left in their `.grad`."""

    def root_of(self, output: Tensor) -> Root:
        """Return what to keep of an output."""

    def of_input(self, roots: Sequence[Root], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
        """Start from each root with its output's gradient; return what `of_weights` will need."""

    def of_weights(self, put_off: Any) -> None: ...


def backward_of(module: nn.Module, split: bool, recomputed: bool) -> Backward:
    """Return the way for a stage; `split` where its schedule has an `I`, `recomputed` where a layer runs again inside.

    torch's split goes through the graph once for each group of parameters and would run such a layer again each time.
    """
    if not split:
        return WholeBackward()
    queue = WeightQueue()
    return QueuedBackward(queue) if adopt(module, queue) or recomputed else AutogradSplit(module.parameters())


def run_whole(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Run a backward in one piece, whichever way its stage would split one.

    torch.autograd.backward does the same after 65 us of looking at the root in Python, a tenth of a small stage's
    backward; the shapes of `gradients` are checked by autograd's engine all the same.
    """
    live = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if root is not None]
    if live:
        starts, seeds = zip(*live, strict=True)
        _engine_run_backward(starts, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


class WholeBackward:
    def root_of(self, output: Tensor) -> Root:
        return _edge_of(output)

    def of_input(self, roots: Sequence[Root], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        raise AssertionError("this stage's schedule has no split backward")

    def of_weights(self, put_off: None) -> None:
        raise AssertionError("this stage's schedule has no split backward")


class QueuedBackward:
    """Linear layers put their weights' gradients off; every other parameter gets its gradient with the input."""

    def __init__(self, queue: WeightQueue) -> None:
        self._queue = queue

    def root_of(self, output: Tensor) -> Root:
        return _edge_of(output)

    def of_input(self, roots: Sequence[Root], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
        put_off: list[PutOff] = []
        self._queue.waiting = put_off
        try:
            run_whole(roots, gradients)
        finally:
            self._queue.waiting = None
        return put_off

    def of_weights(self, put_off: Any) -> None:
        catch_up(put_off)


class AutogradSplit:
    """torch's own split. A stage without an input to differentiate does all its work with the weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    def root_of(self, output: Tensor) -> Root:
        return detachable(output) if output.requires_grad else None

    def of_input(self, roots: Sequence[Root], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
        from torch.distributed.pipelining._backward import stage_backward_input

        wanting = [x for x in inputs if x.requires_grad]
        live = [(root, g) for root, g in zip(roots, gradients, strict=True) if isinstance(root, Tensor)]
        if not live or not wanting:
            return lambda: run_whole(roots, gradients)
        starts, seeds = map(list, zip(*live, strict=True))
        _, groups = stage_backward_input(starts, seeds, wanting, iter(self._parameters))
        return lambda: self._finish(groups)

    def of_weights(self, put_off: Any) -> None:
        put_off()

    def _finish(self, groups: list[dict[str, Any]]) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(iter(self._parameters), groups)


def detachable(output: Tensor) -> Tensor:
    """Return a stage's output as torch's split can take it, which detaches it in place.

    A view refuses that, and it must not happen to a leaf, which is the stage's own input.
    """
    return output.clone() if output._is_view() or output.is_leaf else output


def _edge_of(output: Tensor) -> GradientEdge | None:
    """Return where backward starts. Holding the graph's edge instead of the tensor lets its memory go."""
    return get_gradient_edge(output) if output.requires_grad else None
