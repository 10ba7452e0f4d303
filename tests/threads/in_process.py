"""A transport between threads of one process that holds the executor to the protocol, and one thread per rank.

Every rule that gloo or NCCL would answer with a hang, an abort or garbage is an assertion here.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipebench.engine.stage import Stage, StageOutput, TensorSpec
from pipebench.layer import Declared
from pipebench.schedule.action import Transfer
from pipebench.values import Value

T = TypeVar("T")

Message = tuple[int, int, int, int]

PATIENCE_S = 30.0
"""Longer than any test; a thread that waits so long waits for ever."""

_FORWARD = threading.RLock()


class LockedStage(Stage):
    """A stage whose forward no other runs beside, nor a layer's second one: threads share one random generator."""

    def run(self, value: Value, kept: dict[str, Tensor], step: int, micro_batch: int, again: bool) -> StageOutput:
        with _FORWARD:
            return super().run(value, kept, step, micro_batch, again)

    def run_layer(
        self, layer: nn.Module, declared: Declared, seed: int, value: Value, kept: dict[str, Tensor]
    ) -> tuple[Value, Tensor | None]:
        with _FORWARD:
            return super().run_layer(layer, declared, seed, value, kept)


@dataclass
class World:
    """What all ranks see: the messages on their way, and the order of sends and posts in each direction.

    A message is its source, its target, a tag, and how often they used that tag before: the next step uses the same.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[Message, tuple[Tensor, Tensor]] = field(default_factory=dict)
    received: set[Message] = field(default_factory=set)
    sends: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    posts: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    left: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    broken: bool = False


@dataclass
class InProcessGroup:
    """Sums over threads: every rank leaves a copy, and adds all of them up in the order of the ranks."""

    world: World
    rank: int
    num_sums: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def add_up(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        assert self.rank in ranks, f"rank {self.rank} adds up for ranks {ranks}"
        place = (ranks, self.num_sums[ranks])
        self.num_sums[ranks] += 1
        with self.world.changed:
            left = self.world.left[place]
            left[self.rank] = tensor.detach().clone()
            self.world.changed.notify_all()
            there = self.world.changed.wait_for(lambda: len(left) == len(ranks) or self.world.broken, PATIENCE_S)
            assert there, f"rank {self.rank} waited {PATIENCE_S} s for ranks {ranks}"
            if len(left) < len(ranks):
                raise ConnectionError("another rank failed")
        tensor.copy_(torch.stack([left[rank] for rank in ranks]).sum(0))


class InProcessTransport:
    device = torch.device("cpu")
    peak_bytes = 0

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self._posted: dict[int, tuple[Transfer, TensorSpec]] = {}
        self._unsettled: dict[int, Message] = {}
        self._num_used: Counter[tuple[int, int, int]] = Counter()

    def send(self, transfer: Transfer, tag: int, tensor: Tensor) -> None:
        assert transfer.source_rank == self.rank, f"rank {self.rank} sends for rank {transfer.source_rank}"
        assert tag not in self._unsettled, f"tag {tag} sent twice"
        message = self._unsettled[tag] = self._message(transfer, tag)
        with self.world.changed:
            self.world.sent[message] = (tensor, tensor.detach().clone())
            self.world.sends[transfer.source_rank, transfer.target_rank].append(tag)
            self.world.changed.notify_all()

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        assert transfer.target_rank == self.rank, f"rank {self.rank} receives for rank {transfer.target_rank}"
        assert tag not in self._posted, f"tag {tag} posted twice"
        self._posted[tag] = (transfer, spec)
        with self.world.changed:
            self.world.posts[transfer.source_rank, transfer.target_rank].append(tag)

    def receive(self, tag: int) -> Tensor:
        assert tag in self._posted, f"tag {tag} received but never posted"
        transfer, spec = self._posted.pop(tag)
        message = self._message(transfer, tag)
        with self.world.changed:
            there = self.world.changed.wait_for(lambda: message in self.world.sent or self.world.broken, PATIENCE_S)
            assert there, f"rank {self.rank} waited {PATIENCE_S} s for tag {tag}"
            if message not in self.world.sent:
                raise ConnectionError("another rank failed")
            _, copy = self.world.sent[message]
            self.world.received.add(message)
            self.world.changed.notify_all()
        assert tuple(copy.shape) == spec.shape, f"tag {tag}: {tuple(copy.shape)} came, {spec.shape} was posted"
        assert copy.dtype == spec.dtype, f"tag {tag}: {copy.dtype} came, {spec.dtype} was posted"
        return copy.clone()

    def settle(self, tag: int) -> None:
        with self.world.changed:
            message = self._unsettled.pop(tag)
            assert message in self.world.received, f"tag {tag} settled before it was received"
            self._forget(message)

    def finish(self) -> None:
        assert not self._posted, f"rank {self.rank} never received {sorted(self._posted)}"
        with self.world.changed:
            gone = self.world.changed.wait_for(
                lambda: self.world.received.issuperset(self._unsettled.values()) or self.world.broken, PATIENCE_S
            )
            assert gone, f"rank {self.rank} sent {sorted(self._unsettled)}, which nobody received"
            if not self.world.broken:
                for message in self._unsettled.values():
                    self._forget(message)
                self._unsettled.clear()

    def _message(self, transfer: Transfer, tag: int) -> Message:
        used = (transfer.source_rank, transfer.target_rank, tag)
        self._num_used[used] += 1
        return (*used, self._num_used[used])

    def _forget(self, message: Message) -> None:
        original, copy = self.world.sent.pop(message)
        self.world.received.remove(message)
        assert _same_bits(original, copy), f"tag {message[2]} was changed while it was being sent"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Gradients that overflowed are not-a-number, which equals nothing."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def run_ranks(num_ranks: int, work: Callable[[int, InProcessTransport], T]) -> list[T]:
    """Run `work` for every rank on a thread of its own; raise the first error. Nothing may be left on its way."""
    world = World()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, InProcessTransport(world, rank))
        except BaseException as error:
            with world.changed:
                errors.append(error)
                world.broken = True
                world.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    assert not world.sent, f"{sorted(world.sent)} were sent and left behind"
    assert not world.received
    assert world.posts == world.sends, "receives must be posted in the order of the sends"
    return [results[rank] for rank in range(num_ranks)]
