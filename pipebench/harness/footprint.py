"""What a layer holds and allocates alone, to the byte: the memory model puts stages together from it.

Each layer is run as a stage of its own under the profiler of `memory`: two micro-batches with a backward in one piece,
then two with a split one. The first of each pair allocates the gradients of the parameters, the second adds to them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipebench.engine.backward import QueuedBackward, Root, run_whole
from pipebench.engine.stage import Stage
from pipebench.harness.memory import Change, allocations, peak_of, storages
from pipebench.linear import PutOff, WeightQueue, adopt
from pipebench.record import Footprint

_FORTH = ("input", "F", "input goes", "output goes")
_WHOLE, _SPLIT = (*_FORTH, "B"), (*_FORTH, "I", "W")
"""The steps of a pass; the gradient of the output is there before the backward, as one that a rank receives."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One layer as a stage, its input, and how its output, or the loss on the last layer, is made of that."""

    stage: Stage
    x: Tensor
    forward: Callable[[Tensor], Tensor]


def footprints_of(layers: Sequence[Alone]) -> list[Footprint]:
    """Measure the layers in one run of the profiler: to start it takes longer than most layers do.

    Gradients are dropped.
    """
    passes = [_Passes(layer) for layer in layers]
    phases: dict[str, Callable[[], object]] = {}
    for number, own in enumerate(passes):
        phases |= {f"{number} {name}": step for name, step in own.phases().items()}
    changes = allocations(phases, layers[0].stage.device)
    return [
        own.footprint({name: changes[f"{number} {name}"] for name in own.phases()}) for number, own in enumerate(passes)
    ]


class _Passes:
    """The four micro-batches of one layer, each phase under a name."""

    def __init__(self, layer: Alone) -> None:
        self._module = layer.stage.module
        self._device = layer.stage.device
        self._queue = WeightQueue()
        self._of_whole = [_Pass(layer, self._queue) for _ in range(2)]
        self._of_split = [_Pass(layer, self._queue) for _ in range(2)]

    def phases(self) -> dict[str, Callable[[], object]]:
        phases: dict[str, Callable[[], object]] = {"arrives": partial(self._begin, None)}
        for i, one in enumerate(self._of_whole):
            phases |= {f"whole {i} {step}": one.steps[step] for step in _WHOLE}
        phases["splits"] = partial(self._begin, self._queue)
        for i, one in enumerate(self._of_split):
            phases |= {f"split {i} {step}": one.steps[step] for step in _SPLIT}
        return {**phases, "leaves": self._leave}

    def footprint(self, changes: Mapping[str, Sequence[Change]]) -> Footprint:
        whole, split = self._of_whole[0], self._of_split[0]
        where = {"F": "whole {} F", "B": "whole {} B", "I": "split {} I", "W": "split {} W"}
        gradients: dict[str, dict[int, int]] = {"F": {}, **whole.gradients, **split.gradients}
        return Footprint(
            kept_bytes=_left(changes["whole 1 F"]) - whole.output_bytes,
            keeps_input=_left(changes["whole 1 input goes"]) == 0,
            keeps_output=_left(changes["whole 1 output goes"]) == whole.output_bytes,  # its gradient, as large, is made
            put_off_bytes=split.put_off_bytes,
            peaks={op: peak_of(changes[name.format(1)], ()) for op, name in where.items()},
            first_peaks={op: peak_of(changes[name.format(0)], gradients[op]) for op, name in where.items()},
            gradient_bytes={op: sum(found.values()) for op, found in gradients.items()},
        )

    def _begin(self, queue: WeightQueue | None) -> None:
        self._module.to(self._device).zero_grad(set_to_none=True)
        adopt(self._module, queue)

    def _leave(self) -> None:
        self._begin(None)
        self._module.to("cpu")


class _Pass:
    """One micro-batch through a layer and back, in steps between which what is held can be told.

    `gradients` are those of parameters that each part of the backward leaves, by address.
    """

    def __init__(self, layer: Alone, queue: WeightQueue) -> None:
        self.gradients: dict[str, dict[int, int]] = {}
        self.output_bytes = self.put_off_bytes = 0
        self.steps: dict[str, Callable[[], None]] = {
            "input": self._make_input,
            "F": self._run_forward,
            "input goes": self._let_input_go,
            "output goes": self._let_output_go,
            "B": self._run_backward,
            "I": self._run_input_part,
            "W": self._run_weight_part,
        }
        self._layer = layer
        self._backward = QueuedBackward(queue)
        self._leaf = torch.empty(())
        self._input: Tensor | None = None
        self._root: Root = None
        self._output: Tensor | None = None
        self._gradient: Tensor | None = None
        self._put_off: list[PutOff] = []

    def _make_input(self) -> None:
        x = self._layer.x
        self._leaf = x.detach().requires_grad_(x.is_floating_point())
        self._input = _Fresh.apply(self._leaf)

    def _run_forward(self) -> None:
        assert self._input is not None
        output = self._layer.forward(self._input)
        self._root = self._backward.root_of(output)
        self._output = output.detach()
        self.output_bytes = output.nbytes

    def _let_input_go(self) -> None:
        self._input = None

    def _let_output_go(self) -> None:
        assert self._output is not None
        self._gradient = torch.ones_like(self._output)
        self._output = None

    def _run_backward(self) -> None:
        assert self._gradient is not None
        run_whole(self._root, self._gradient)
        self._end("B")

    def _run_input_part(self) -> None:
        assert self._gradient is not None
        self._put_off = self._backward.of_input(self._root, self._leaf, self._gradient)
        kept = storages([tensor for product in self._put_off for tensor in (product.x, product.gradient)])
        self.put_off_bytes = sum(kept.values())
        self._end("I")

    def _run_weight_part(self) -> None:
        self._backward.of_weights(self._put_off)
        self._end("W")

    def _end(self, op: str) -> None:
        """Note the gradients of parameters that this part has left, and let all else go, as a rank does that sends."""
        known = {address for earlier in self.gradients.values() for address in earlier}
        there = storages([p.grad for p in self._layer.stage.module.parameters() if p.grad is not None])
        self.gradients[op] = {address: size for address, size in there.items() if address not in known}
        self._gradient = self._root = self._leaf.grad = None


class _Fresh(torch.autograd.Function):
    """A copy that passes its gradient on as it is, so that no leaf holds what a layer is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _left(changes: Sequence[Change]) -> int:
    return sum(change.num_bytes for change in changes)
