"""Recompute inside a stage: a layer's forward, or its attention scores alone, run again when its backward needs them.

An `R` of the rows runs a whole stage again while its gradient is on its way. Here the second forward is part of the
backward: each layer that is to run again keeps its input, and the first of its tensors that the backward asks for
brings all of them back. So of a stage's layers one at a time holds what it would keep without recompute. It is
torch.utils.checkpoint, not the reentrant one, for which parameters would be no part of the graph: gradients are added
up in the order of a plain backward and come out equal to the last bit.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipebench.engine.batch_norm import BatchNorms
from pipebench.layer import Declared, take_auxiliary_loss
from pipebench.linear import Linear
from pipebench.record import LayerRun
from pipebench.values import Value, tensors_of

RunLayer = Callable[[Value, dict[str, Tensor]], tuple[Value, Tensor | None]]
"""Returns a layer's value and what it adds to the loss; the skips lose what it pops and gain what it stashes."""

KEPT_BY_SELECTIVE = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
"""What the second forward of attention scores takes from the first: products with weights, which no score is."""


def arrange(layer: nn.Module, how: LayerRun) -> None:
    """Prepare a layer for the way it is to be run; undoes what another way had prepared."""
    for module in layer.modules():
        if isinstance(module, Linear):
            module.recomputed = how == LayerRun.AGAIN
        if getattr(module, "scores", False):
            module.__dict__.pop("forward", None)
            if how == LayerRun.SELECTIVE:
                module.forward = partial(_selectively, module.forward)


def has_scores(layer: nn.Module) -> bool:
    """Tell whether selective recompute finds anything in a layer."""
    return any(getattr(module, "scores", False) for module in layer.modules())


def run_again(
    once: RunLayer, declared: Declared, batch_norms: BatchNorms, value: Value, kept: dict[str, Tensor]
) -> tuple[Value, Tensor | None]:
    """Do what `once(value, kept)` does, which runs once more in the backward and has to seed what it draws itself."""
    is_tuple, pops = not isinstance(value, Tensor), declared.pops

    def forward(*tensors: Tensor) -> tuple[Value, list[Tensor], Tensor | None]:
        own = dict(zip(pops, tensors[len(tensors) - len(pops) :], strict=True))
        values = tensors[: len(tensors) - len(pops)]
        result, added = once(values if is_tuple else values[0], own)
        return result, [own[name] for name in declared.stashes], added

    value, stashed, added = checkpoint(
        forward,
        *tensors_of(value),
        *[kept.pop(name) for name in pops],
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), _second(declared, batch_norms)),
    )
    kept.update(zip(declared.stashes, stashed, strict=True))
    return value, added


@contextlib.contextmanager
def _second(declared: Declared, batch_norms: BatchNorms) -> Iterator[None]:
    """A second forward moves no statistics, adds nothing to the loss, and ends once the backward has its tensors."""
    with batch_norms.still():
        try:
            yield
        finally:
            take_auxiliary_loss(declared)


def _selectively(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A module in the middle of a layer may go on with the layer's random numbers, so their state is brought back."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT_BY_SELECTIVE)
    scored: Tensor = checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)
    return scored
