"""Tensors between ranks. Sends never block; receives are posted before they are needed.

gloo carries CPU tensors, NCCL CUDA tensors. Where several ranks share one GPU, which NCCL refuses, CUDA
tensors travel through host memory on gloo. `shared_memory` carries tensors between ranks of one host without either.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipebench.engine.stage import TensorSpec
from pipebench.schedule.action import Transfer


class Transport(Protocol):
    """What the executor needs of the world. `tag` is the transfer's number in the schedule, equal on both ranks.

    `device` is where received tensors lie. `peak_bytes` are the most bytes on their way to other ranks that ever lay
    outside of tensors at once.
    """

    device: torch.device

    @property
    def peak_bytes(self) -> int: ...

    def send(self, transfer: Transfer, tag: int, tensor: Tensor) -> None:
        """Start sending and return; `tensor` must not be changed until `settle(tag)` or `finish`."""

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        """Announce that this tensor will be received."""

    def receive(self, tag: int) -> Tensor:
        """Wait for a posted tensor and return it."""

    def settle(self, tag: int) -> None:
        """Let go of a sent tensor that its receiver is known to have."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


class ProcessTransport:
    """Point-to-point messages of torch.distributed.

    gloo cannot say whether a send is complete without waiting for it, so completion is told from outside
    (`settle`). `groups` maps (source, target) to the process group of that direction: NCCL runs one
    communicator's operations in the order of issue, so two directions must not share one.
    """

    def __init__(
        self,
        device: torch.device,
        carrier: torch.device,
        groups: dict[tuple[int, int], dist.ProcessGroup],
    ) -> None:
        self.device = device
        self._carrier = carrier
        self._groups = groups
        # dist.isend and irecv would look this up, and more, on every call: 30 us a micro-batch.
        self._group_ranks = {
            (group, rank): dist.get_group_rank(group, rank)
            for edge, group in groups.items()
            if dist.get_rank() in edge
            for rank in edge
        }
        self._sending: dict[int, tuple[dist.Work, Tensor]] = {}
        self._receiving: dict[int, tuple[dist.Work, Tensor]] = {}

    def send(self, transfer: Transfer, tag: int, tensor: Tensor) -> None:
        tensor = tensor.detach().to(self._carrier).contiguous()
        group = self._groups[transfer.source_rank, transfer.target_rank]
        work = group.send([tensor], self._group_ranks[group, transfer.target_rank], tag)
        self._sending[tag] = (work, tensor)

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        buffer = spec.empty(self._carrier)
        group = self._groups[transfer.source_rank, transfer.target_rank]
        work = group.recv([buffer], self._group_ranks[group, transfer.source_rank], tag)
        self._receiving[tag] = (work, buffer)

    def receive(self, tag: int) -> Tensor:
        work, buffer = self._receiving.pop(tag)
        work.wait()
        return buffer.to(self.device)

    def settle(self, tag: int) -> None:
        work, _ = self._sending.pop(tag)
        work.wait()

    def finish(self) -> None:
        for tag in list(self._sending):
            self.settle(tag)

    @property
    def peak_bytes(self) -> int:
        return 0  # all that is sent or received lies in tensors


def process_groups(
    edges: Iterable[tuple[int, int]], rank: int, carrier: torch.device
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Return a group for every directed edge; every rank must call this with the same edges.

    One gloo group serves all. NCCL gets one group per direction, each used once, in the same order on all
    ranks: made lazily in the middle of a schedule, communicators have deadlocked.
    """
    if carrier.type == "cpu":
        world = dist.group.WORLD
        assert world is not None
        return dict.fromkeys(edges, world)
    groups = {}
    for source, target in sorted(edges):
        group = dist.new_group([source, target], backend="nccl")
        groups[source, target] = group
        if rank == source:
            dist.send(torch.zeros(1, device=carrier), target, group)
        elif rank == target:
            dist.recv(torch.zeros(1, device=carrier), source, group)
    return groups
