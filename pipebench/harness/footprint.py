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
from pipebench.record import Footprint, LayerRun
from pipebench.values import Value, tensors_of

_FORTH = ("input", "F", "input goes", "output goes")
_WHOLE, _SPLIT = (*_FORTH, "B"), (*_FORTH, "I", "W")
"""The steps of a pass. As the output goes its gradient comes, and is there throughout the backward, as on a rank."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One layer as a stage, how to run it, what it is called with, skips by their names, and targets for a loss.

    Tensors require a gradient where the layer is to give one back.
    """

    stage: Stage
    run: LayerRun
    value: Value
    kept: Mapping[str, Tensor]
    targets: Value


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
        self._stage, self._run = layer.stage, layer.run
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
            keeps_output=_left(changes["whole 1 output goes"]) == whole.gradient_bytes,
            put_off_bytes=split.put_off_bytes,
            peaks={op: peak_of(changes[name.format(1)], ()) for op, name in where.items()},
            first_peaks={op: peak_of(changes[name.format(0)], gradients[op]) for op, name in where.items()},
            gradient_bytes={op: sum(found.values()) for op, found in gradients.items()},
        )

    def _begin(self, queue: WeightQueue | None) -> None:
        self._stage.arrange([self._run])
        self._stage.module.to(self._stage.device).zero_grad(set_to_none=True)
        adopt(self._stage.module, queue)

    def _leave(self) -> None:
        self._begin(None)
        self._stage.arrange([LayerRun.KEEP])
        self._stage.module.to("cpu")


class _Pass:
    """One micro-batch through a layer and back, in steps between which what is held can be told.

    `gradients` are those of parameters that each part of the backward leaves, by address.
    """

    def __init__(self, layer: Alone, queue: WeightQueue) -> None:
        self.gradients: dict[str, dict[int, int]] = {}
        self.output_bytes = self.gradient_bytes = self.put_off_bytes = 0
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
        self._leaves: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._roots: list[Root] = []
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._put_off: list[PutOff] = []

    def _make_input(self) -> None:
        arriving = (*tensors_of(self._layer.value), *self._layer.kept.values())
        self._leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in arriving]
        self._inputs = [_fresh(leaf) for leaf in self._leaves]

    def _run_forward(self) -> None:
        layer, num_values = self._layer, len(tensors_of(self._layer.value))
        values = tuple(self._inputs[:num_values])
        kept = dict(zip(layer.kept, self._inputs[num_values:], strict=True))
        output = layer.stage.run(values[0] if isinstance(layer.value, Tensor) else values, kept, 0, 0, again=False)
        value = output.value if layer.stage.loss is None else layer.stage.loss_of(output.value, layer.targets)
        outputs = [*tensors_of(value), *output.kept.values()]
        self._roots = [self._backward.root_of(tensor) for tensor in outputs if tensor.requires_grad]
        self._outputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
        arrived = storages(self._inputs)  # what a layer hands on untouched is no memory of its own
        self.output_bytes = sum(size for place, size in storages(outputs).items() if place not in arrived)

    def _let_input_go(self) -> None:
        self._inputs = []

    def _let_output_go(self) -> None:
        self._gradients = [torch.ones_like(tensor) for tensor in self._outputs if tensor.requires_grad]
        self.gradient_bytes = sum(gradient.nbytes for gradient in self._gradients)
        self._outputs = []

    def _run_backward(self) -> None:
        run_whole(self._roots, self._gradients)
        self._end("B")

    def _run_input_part(self) -> None:
        self._put_off = self._backward.of_input(self._roots, self._leaves, self._gradients)
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
        self._gradients, self._roots = [], []
        for leaf in self._leaves:
            leaf.grad = None


class _Fresh(torch.autograd.Function):
    """A copy that passes its gradient on as it is, so that no leaf holds what a layer is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _fresh(x: Tensor) -> Tensor:
    copy: Tensor = _Fresh.apply(x)  # type: ignore[no-untyped-call]
    return copy


def _left(changes: Sequence[Change]) -> int:
    return sum(change.num_bytes for change in changes)
