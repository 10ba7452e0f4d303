"""One stage: its layers, run so that dropout depends on (seed, step, micro-batch, layer) alone."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipebench.engine.backward import backward_of
from pipebench.engine.batch_norm import BatchNorms
from pipebench.engine.recompute import arrange, run_again
from pipebench.layer import PLAIN, Declared, declared_by, run_layer, take_auxiliary_loss
from pipebench.record import LayerRun
from pipebench.seeds import Purpose, seeds_of
from pipebench.values import Value, num_samples, tensors_of


@dataclass(frozen=True, slots=True)
class Loss:
    """`mean(output, target)` is a mean over `count(target)` things, see `models.layers.LayerSequence`.

    So are `metrics`, which an evaluation tells besides.
    """

    mean: Callable[[Any, Any], Tensor]
    count: Callable[[Any], Tensor | int] = num_samples
    metrics: Mapping[str, Callable[[Any, Any], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that passes between stages, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What passes from one stage to another for a micro-batch: to the next one the value, and skips by their names."""

    value: tuple[TensorSpec, ...] = ()
    is_tuple: bool = False
    names: tuple[str, ...] = ()
    kept: tuple[TensorSpec, ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """In the order in which they travel."""
        return self.value + self.kept

    def part(self, has_value: bool, names: Sequence[str]) -> "Bundle":
        """Return what goes to one of several stages: the value or not, and some of the skips."""
        chosen = [self.kept[self.names.index(name)] for name in names]
        return Bundle(self.value if has_value else (), has_value and self.is_tuple, tuple(names), tuple(chosen))

    @property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """Those for which a gradient travels back."""
        return tuple(spec for spec in self.tensors if spec.requires_grad)


Bundles = Mapping[tuple[int, int], Sequence[Bundle]]
"""For a pair of stages, source and target, what passes for each micro-batch. The mini-batch comes from stage -1."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """`kept` are the tensors stashed for later stages, `auxiliary` what the layers add to the micro-batch's loss."""

    value: Value
    kept: dict[str, Tensor]
    auxiliary: Tensor | None


class Stage:
    """Layers `first_layer` and following, on one device; `loss` is set on the last stage alone.

    `splits_backward` where the schedule computes the gradients of input and weights apart; `deferred_batch_norm` see
    `engine.batch_norm`; `runs` says which layers run their forward again in their backward, by default none.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
        loss: Loss | None = None,
        splits_backward: bool = False,
        deferred_batch_norm: bool = True,
        runs: Sequence[LayerRun] = (),
    ) -> None:
        self.module = nn.ModuleList(layers).to(device)
        self.first_layer = first_layer
        self.seed = seed
        self.device = device
        self.loss = loss
        self.batch_norms = BatchNorms(self.module, deferred_batch_norm)
        self._layers = list(self.module)
        self.backward = backward_of(self.module, splits_backward, LayerRun.AGAIN in runs)
        self.arrange(runs or [LayerRun.KEEP] * len(self._layers))  # after it: plain linear layers have become ours
        self._declared = [declared_by(layer) for layer in self._layers]
        self.has_auxiliary_loss = any(declared.adding for declared in self._declared)
        self._indices = range(first_layer, first_layer + len(self._layers))
        self._autocast = autocast
        self._generator = default_generator(device)

    def arrange(self, runs: Sequence[LayerRun]) -> None:
        """Say of each layer whether its forward runs again in its backward."""
        self._runs = list(runs)
        for layer, how in zip(self._layers, self._runs, strict=True):
            arrange(layer, how)

    def forward(self, x: Value, step: int, micro_batch: int) -> Any:
        """Return the last layer's value, for a stage that no skip enters or leaves."""
        return self.run(x, {}, step, micro_batch, again=False).value

    def run(self, value: Value, kept: dict[str, Tensor], step: int, micro_batch: int, again: bool) -> StageOutput:
        """Run the layers; `kept` holds what they pop of earlier stages and is used up, `again` says it is a recompute.

        The default random generator is left wherever the layers left it.
        """
        if again and self.batch_norms:
            with self.batch_norms.still():
                return self._run(value, kept, step, micro_batch)
        return self._run(value, kept, step, micro_batch)

    def _run(self, value: Value, kept: dict[str, Tensor], step: int, micro_batch: int) -> StageOutput:
        seeds = seeds_of(self.seed, Purpose.DROPOUT, (step, micro_batch), self._indices)
        auxiliary = list[Tensor]()
        with self._precision():
            for layer, declared, how, seed in zip(self._layers, self._declared, self._runs, seeds, strict=True):
                if declared is PLAIN and how != LayerRun.AGAIN:  # nearly all layers: what follows does the same slower
                    self._generator.manual_seed(seed)
                    value = layer(value)
                    continue
                if how == LayerRun.AGAIN:
                    once = partial(self.run_layer, layer, declared, seed)
                    value, added = run_again(once, declared, self.batch_norms, value, kept)
                else:
                    value, added = self.run_layer(layer, declared, seed, value, kept)
                if added is not None:
                    auxiliary.append(added.float())
        return StageOutput(value, kept, torch.stack(auxiliary).sum() if auxiliary else None)

    def run_layer(
        self, layer: nn.Module, declared: Declared, seed: int, value: Value, kept: dict[str, Tensor]
    ) -> tuple[Value, Tensor | None]:
        """Return one layer's value and what it adds to the loss."""
        self._generator.manual_seed(seed)
        value = run_layer(layer, declared, value, kept)
        return value, take_auxiliary_loss(declared) if declared.adding else None

    def loss_of(self, output: Any, target: Any) -> Tensor:
        assert self.loss is not None, "only the last stage has a loss"
        with self._precision():
            return self.loss.mean(output, target)

    def metrics_of(self, output: Any, target: Any) -> dict[str, Tensor]:
        assert self.loss is not None, "only the last stage has metrics"
        return {name: mean(output, target) for name, mean in self.loss.metrics.items()}

    def output_specs(self, arriving: Sequence[Bundle]) -> Bundle:
        """Return what leaves the stage, all skips included, computing nothing.

        Shapes come from the meta device. It ignores autocast, so there fake tensors of the real device stand in.
        """
        stand_in, mode = self._stand_ins()
        with torch.enable_grad(), mode, self._precision(), self.batch_norms.still():

            def arrived(spec: TensorSpec) -> Tensor:
                return stand_in(spec.empty(torch.device("meta"))).requires_grad_(spec.requires_grad)

            value, kept = unpacked(arriving, [arrived(spec) for bundle in arriving for spec in bundle.tensors])
            for layer, declared in zip(self._layers, self._declared, strict=True):
                state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                stood_in = {name: stand_in(each).requires_grad_(each.requires_grad) for name, each in state.items()}
                value = run_layer(partial(_called_with, layer, stood_in), declared, value, kept)
                take_auxiliary_loss(declared)
        return Bundle(
            tuple(map(_spec_of, tensors_of(value))),
            not isinstance(value, Tensor),
            tuple(kept),
            tuple(map(_spec_of, kept.values())),
        )

    def _stand_ins(self) -> tuple[Callable[[Tensor], Tensor], contextlib.AbstractContextManager[object]]:
        if self._autocast is None:
            return lambda tensor: tensor.detach().to("meta"), contextlib.nullcontext()
        from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import, so only here

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return lambda tensor: torch.empty_like(tensor, device=self.device), mode

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)


def unpacked(bundles: Sequence[Bundle], tensors: Sequence[Tensor]) -> tuple[Value, dict[str, Tensor]]:
    """Return the value and the skips that came in some bundles, the neighbour's first."""
    first = bundles[0]
    num_value = len(first.value)
    value = tuple(tensors[:num_value]) if first.is_tuple else tensors[0]
    if len(tensors) == num_value:
        return value, {}
    names = [name for bundle in bundles for name in bundle.names]
    return value, dict(zip(names, tensors[num_value:], strict=True))


def packed(bundles: Sequence[Bundle], output: StageOutput) -> list[Tensor]:
    """Return what leaves in some bundles, the neighbour's first."""
    tensors = list(tensors_of(output.value))
    if output.kept:
        tensors += [output.kept[name] for bundle in bundles for name in bundle.names]
    return tensors


def _called_with(layer: nn.Module, state: dict[str, Tensor], *args: Any) -> Any:
    return functional_call(layer, state, args)


def _spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout draws from; seeding it directly costs 1 us, torch.manual_seed 140."""
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
