"""Fully sharded data parallelism (torch's fully_shard) over as many ranks as the pipeline has stages.

Every rank takes its share of the same micro-batches as with `ddp`, but holds a part of every layer's weights and
gathers a layer's whole weights when it needs them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import layers_of
from pipebench.engine.update import trained
from pipebench.peers.protocol import Parts
from pipebench.peers.whole_model import WholeModel, count_of, micro_batches_of_rank, summed_over_ranks


class FullySharded:
    """One rank of FSDP2, each layer sharded by itself; it records no spans.

    All else is torch's default, which spends communication to save memory: weights are dropped after a layer's forward
    and gathered again for its backward, and every micro-batch's gradients are reduced at once. So all ranks must run
    equally many micro-batches.

    `sent_bytes` are counted from the collectives of the first step.
    """

    def __init__(self, parts: Parts) -> None:
        self.layers = layers_of(parts.stages)
        self.sent_bytes: int | None = None
        self._config, self._rank = parts.config, parts.rank
        self._count = count_of(parts.stages)
        self._num_ranks = dist.get_world_size()
        self._model = WholeModel(parts.stages)
        mesh = init_device_mesh(parts.device.type, (self._num_ranks,))
        for layer in self.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self.optimizers = [_fit_for_shards(parts.make_optimizer(trained(self._model.parameters())))]

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        return summed_over_ranks(self._accumulate(step, batch), self._update)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        return summed_over_ranks(self._accumulate(step, batch), lambda: None)

    def gradients(self) -> dict[int, list[Tensor]]:
        return {
            index: [_whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in layer.parameters()]
            for index, layer in self.layers.items()
        }

    def held_bytes(self) -> int:
        return 0

    def _update(self) -> None:
        [optimizer] = self.optimizers
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, step: int, batch: MiniBatch) -> Tensor:
        """Return this rank's part of the mini-batch's mean loss."""
        if self.sent_bytes is None:
            with _SentBytes() as counter:
                loss = self._run(step, batch)
            self.sent_bytes = counter.sent_bytes
            return loss
        return self._run(step, batch)

    def _run(self, step: int, batch: MiniBatch) -> Tensor:
        losses = []
        for micro_batch in micro_batches_of_rank(self._config, batch, self._rank, self._num_ranks, self._count):
            loss = self._model(step, micro_batch)
            torch.autograd.backward(loss * self._num_ranks)  # since FSDP averages over ranks
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def build(parts: Parts) -> FullySharded:
    return FullySharded(parts)


def _fit_for_shards(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let SGD choose its own implementation: torch (2.13) has no fused one for sharded tensors, unlike Adam's."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            group["fused"] = None
    return optimizer


def _whole(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


class _SentBytes(TorchDispatchMode):
    """Adds up what this rank hands to others in the collectives that FSDP calls.

    A ring's all-gather sends K-1 shards. So does a reduce-scatter with NCCL; gloo does it by an all-reduce, which sends
    twice as much.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again with what is inside
        collectives = torch.ops.c10d
        others = dist.get_world_size() - 1
        if func is collectives._allgather_base_.default:
            self.sent_bytes += others * args[1].nbytes
        elif func is collectives._reduce_scatter_base_.default:
            self.sent_bytes += others * args[0].nbytes * (2 if args[0].device.type == "cpu" else 1)
        return func(*args, **(kwargs or {}))
