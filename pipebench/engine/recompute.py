"""Recompute inside a stage: a layer's forward, or its attention scores alone, run again when its backward needs them.

An `R` of the rows runs a whole stage again while its gradient is on its way. Here the second forward is part of the
backward: each layer that is to run again keeps its input, and the first of its tensors that the backward asks for
brings all of them back. So of a stage's layers one at a time holds what it would keep without recompute. It is
torch.utils.checkpoint, not the reentrant one, for which parameters would be no part of the graph: gradients are added
up in the order of a plain backward and come out equal to the last bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipebench.linear import Linear
from pipebench.record import LayerRun

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
                module.forward = partial(_selectively, module.forward)  # type: ignore[method-assign]


def run_again(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Return `forward(*inputs)`, which is called once more in the backward and has to seed what it draws itself."""
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def _selectively(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A module in the middle of a layer may go on with the layer's random numbers, so their state is brought back."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT_BY_SELECTIVE)
    scored: Tensor = checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)
    return scored
