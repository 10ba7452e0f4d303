"""DistributedDataParallel over as many ranks as the pipeline has stages: what a user would try before a pipeline.

Every rank holds the whole model and takes its share of the same micro-batches, so that samples, dropout and threads
are those of the pipeline.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import gradients_of, layers_of
from pipebench.engine.update import trained
from pipebench.peers.protocol import Parts
from pipebench.peers.whole_model import WholeModel, count_of, micro_batches_of_rank, summed_over_ranks


class DataParallel:
    """One rank of DDP; it records no spans.

    Set up to hold gradients once: they live in DDP's buckets and are zeroed there, where dropping them would make the
    accumulation build them a second time. Only the rank's last backward reduces them.

    `sent_bytes` are those of ring all-reduces of all gradients, 2(K-1)/K of them from each rank: gloo's algorithm, and
    NCCL's for large tensors.
    """

    def __init__(self, parts: Parts) -> None:
        self.layers = layers_of(parts.stages)
        self._config, self._rank = parts.config, parts.rank
        self._count = count_of(parts.stages)
        self._num_ranks = dist.get_world_size()
        self._model = DistributedDataParallel(WholeModel(parts.stages), gradient_as_bucket_view=True)
        parameters = list(self._model.parameters())
        self.optimizers = [parts.make_optimizer(trained(parameters))]
        reduced_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
        self.sent_bytes: int | None = 2 * (self._num_ranks - 1) * reduced_bytes // self._num_ranks

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        return summed_over_ranks(self._accumulate(step, batch), self._update)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        return summed_over_ranks(self._accumulate(step, batch), lambda: None)

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)

    def held_bytes(self) -> int:
        return 0

    def _update(self) -> None:
        [optimizer] = self.optimizers
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def _accumulate(self, step: int, batch: MiniBatch) -> Tensor:
        """Return this rank's part of the mini-batch's mean loss."""
        micro_batches = micro_batches_of_rank(self._config, batch, self._rank, self._num_ranks, self._count)
        losses = []
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            with nullcontext() if last else self._model.no_sync():
                loss = self._model(step, micro_batch)
                torch.autograd.backward(loss * self._num_ranks)  # since DDP averages over ranks
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def build(parts: Parts) -> DataParallel:
    return DataParallel(parts)
