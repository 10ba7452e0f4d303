"""One stage: its layers, run so that dropout depends on (seed, step, micro-batch, layer) alone."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipebench.engine.backward import backward_of
from pipebench.engine.recompute import arrange, run_again
from pipebench.record import LayerRun
from pipebench.seeds import Purpose, seeds_of

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that crosses a stage boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Stage:
    """Layers `first_layer` and following, on one device; `loss` is set on the last stage alone.

    `splits_backward` where the schedule computes the gradients of input and weights apart; `runs` says which layers
    run their forward again in their backward, by default none.
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
        runs: Sequence[LayerRun] = (),
    ) -> None:
        self.module = nn.ModuleList(layers).to(device)
        self.first_layer = first_layer
        self.seed = seed
        self.device = device
        self.loss = loss
        self._layers = list(self.module)
        self._runs = list(runs) or [LayerRun.KEEP] * len(self._layers)
        for layer, how in zip(self._layers, self._runs, strict=True):
            arrange(layer, how)
        self.backward = backward_of(self.module, splits_backward, LayerRun.AGAIN in self._runs)
        self._indices = range(first_layer, first_layer + len(self._layers))
        self._autocast = autocast
        self._generator = default_generator(device)

    def forward(self, x: Tensor, step: int, micro_batch: int) -> Tensor:
        """Return the last layer's output; the default random generator is left wherever the layers left it."""
        seeds = seeds_of(self.seed, Purpose.DROPOUT, (step, micro_batch), self._indices)
        with self._precision():
            for layer, how, seed in zip(self._layers, self._runs, seeds, strict=True):
                run = partial(self.run_layer, layer, seed)
                x = run_again(run, x) if how == LayerRun.AGAIN else run(x)
        return x

    def run_layer(self, layer: nn.Module, seed: int, x: Tensor) -> Tensor:
        self._generator.manual_seed(seed)
        output: Tensor = layer(x)
        return output

    def loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        assert self.loss is not None, "only the last stage has a loss"
        with self._precision():
            return self.loss(output, target)

    def output_spec(self, input_spec: TensorSpec) -> TensorSpec:
        """Return the spec of the last layer's output, computing nothing.

        Shapes come from the meta device. It ignores autocast, so there fake tensors of the real device stand in.
        """
        stand_in, mode = self._stand_ins()
        with torch.no_grad(), mode, self._precision():
            x = stand_in(input_spec.empty(torch.device("meta")))
            for layer in self._layers:
                state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
                x = functional_call(layer, {name: stand_in(tensor) for name, tensor in state.items()}, (x,))
        return TensorSpec(tuple(x.shape), x.dtype)

    def _stand_ins(self) -> tuple[Callable[[Tensor], Tensor], contextlib.AbstractContextManager[object]]:
        if self._autocast is None:
            return lambda tensor: tensor.to("meta"), contextlib.nullcontext()
        from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import, so only here

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return lambda tensor: torch.empty_like(tensor, device=self.device), mode

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout draws from; seeding it directly costs 1 us, torch.manual_seed 140."""
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
