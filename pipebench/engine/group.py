"""Sums over ranks for what one update has to agree on: tied gradients, the gradients' norm, whether it overflowed."""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]
"""Some ranks of a pipeline, in ascending order."""


class Group(Protocol):
    def add_up(self, tensor: Tensor, ranks: Ranks) -> None:
        """Put the sum over these ranks in place of `tensor`, the same bits on each; each of them must call this."""


class Alone:
    """The group of an engine in one process: a sum is what it was."""

    def add_up(self, tensor: Tensor, ranks: Ranks) -> None:
        assert len(ranks) == 1, f"ranks {ranks} are no single process"


class ProcessGroups:
    """Sums by torch.distributed, over sets of ranks that were named when this was made.

    Each set has a communicator of its own, which no transfer uses: NCCL runs one communicator's operations in the
    order of issue. All ranks must make this with the same sets, those they are not in too.
    """

    def __init__(self, sets: Iterable[Ranks], carrier: torch.device) -> None:
        self._carrier = carrier
        backend = "gloo" if carrier.type == "cpu" else "nccl"
        self._groups = {}
        for ranks in sorted(set(sets)):
            self._groups[ranks] = dist.new_group(list(ranks), backend=backend)
            if dist.get_rank() in ranks:  # NCCL makes a communicator at its first use: now, in one order on all ranks
                self.add_up(torch.zeros(1), ranks)

    def add_up(self, tensor: Tensor, ranks: Ranks) -> None:
        carried = tensor.detach().to(self._carrier).contiguous()
        dist.all_reduce(carried, group=self._groups[ranks])
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried)
