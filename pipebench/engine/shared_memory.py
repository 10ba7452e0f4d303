"""Tensors between ranks of one host through memory they share; no socket and no second thread touches them.

Each directed edge has a piece of anonymous memory cut into slots, which the sender fills, and two pipes: one tells
the receiver which tensor lies in which slot, the other gives emptied slots back. The pipes order the memory accesses
and wake who sleeps. A tensor is copied in when it is sent and out when it is needed, so that both sides are free of
it at once and a receiver holds nothing that it does not use yet. Everything vanishes with the processes.
"""

import contextlib
import fcntl
import heapq
import mmap
import os
import select
import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from pipebench.engine.stage import TensorSpec
from pipebench.schedule.action import Transfer

_ANNOUNCED = struct.Struct("=II")  # tag, slot
_EMPTIED = struct.Struct("=I")  # slot
_AT_ONCE = 512
"""Most messages taken from a pipe by one read."""

_IDLE_BYTES = 4_096
"""Most bytes in slots that the receiver has emptied and the sender not taken back: reading a pipe for each small tensor
costs as much as sending it."""

_ALIGNMENT = 64
_PIPE_BYTES = 65_536
"""What a pipe holds unless told otherwise (Linux)."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an edge holds at most: the tensors of one step, at least 1, none larger than `tensor_bytes`."""

    num_tensors: int
    tensor_bytes: int

    @property
    def slot_bytes(self) -> int:
        return -(-max(1, self.tensor_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.num_tensors * self.slot_bytes


class SharedMemoryTransport:
    """One rank's end of all its edges; `room` says what each (source, target) edge of this rank must hold.

    Whatever waits raises ConnectionError when the peer is gone.
    """

    def __init__(self, device: torch.device, room: Mapping[tuple[int, int], Room], rank: int, store: Store) -> None:
        self.device = device
        outgoing = [edge for edge in room if edge[0] == rank]
        self._outboxes = {target: _Outbox(room[source, target]) for source, target in outgoing}
        for target, outbox in self._outboxes.items():
            store.set(f"{rank} to {target}", outbox.offer())
        self._inboxes = {}
        for source in (source for source, target in room if target == rank):
            self._inboxes[source] = _Inbox(room[source, rank], store.get(f"{source} to {rank}").decode())
            store.set(f"{source} to {rank} taken", "")
        for target, outbox in self._outboxes.items():
            store.get(f"{rank} to {target} taken")
            outbox.close_other_ends()
        self._awaited: dict[int, tuple[_Inbox, TensorSpec]] = {}

    def send(self, transfer: Transfer, tag: int, tensor: Tensor) -> None:
        self._outboxes[transfer.target_rank].put(tag, tensor)

    def post(self, transfer: Transfer, tag: int, spec: TensorSpec) -> None:
        self._awaited[tag] = (self._inboxes[transfer.source_rank], spec)

    def receive(self, tag: int) -> Tensor:
        inbox, spec = self._awaited.pop(tag)
        tensor = spec.empty(self.device)
        inbox.take(tag, tensor)
        return tensor

    def settle(self, tag: int) -> None:
        """There is nothing to let go of: what is sent is copied."""

    def finish(self) -> None:
        """There is nothing to wait for: what was sent stays in the memory until it is fetched."""

    def close(self) -> None:
        """Let go of memory and pipes; who waits at the other end of one hears of it."""
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes.values():
            inbox.close()

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that ever lay in slots for other ranks at once."""
        return sum(outbox.peak_bytes() for outbox in self._outboxes.values())


class _Slots:
    """A piece of memory, cut up; both sides of an edge map the same."""

    def __init__(self, memory: int, room: Room) -> None:
        self._slot_bytes = room.slot_bytes
        self._bytes = torch.frombuffer(mmap.mmap(memory, room.num_bytes), dtype=torch.uint8)
        self._views: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def view(self, slot: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = (slot, shape, dtype)
        if key not in self._views:
            begin = slot * self._slot_bytes
            piece = self._bytes[begin : begin + shape.numel() * dtype.itemsize]
            self._views[key] = piece.view(dtype).view(shape)
        return self._views[key]


class _Outbox:
    """The sender's side of an edge; the lowest free slot is taken first, so that little memory is touched."""

    def __init__(self, room: Room) -> None:
        self._memory = os.memfd_create("pipebench")
        os.ftruncate(self._memory, room.num_bytes)
        self._other_announced, self._announced = _pipe(room.num_tensors * _ANNOUNCED.size)
        self._emptied, self._other_emptied = _pipe(room.num_tensors * _EMPTIED.size)
        os.set_blocking(self._emptied, False)
        self._slots = _Slots(self._memory, room)
        self._free = list(range(room.num_tensors))
        self._room = room
        self._most_taken = 0
        self._num_idle = _IDLE_BYTES // room.slot_bytes
        self._num_since = 0  # sends since slots were taken back

    def offer(self) -> str:
        """Return where the receiver finds its ends."""
        return f"{os.getpid()} {self._memory} {self._other_announced} {self._other_emptied}"

    def close_other_ends(self) -> None:
        """Close what the receiver has opened for itself: an end left open here would hide that it is gone."""
        for descriptor in (self._memory, self._other_announced, self._other_emptied):
            os.close(descriptor)

    def put(self, tag: int, tensor: Tensor) -> None:
        """Copy a tensor into a slot and announce it; wait only where the receiver is still in the step before."""
        if self._num_since >= self._num_idle:
            self._take_back()
        while not self._free:
            select.select([self._emptied], [], [])
            self._take_back()
        if tensor.nbytes > self._room.slot_bytes:
            raise ValueError(
                f"{tensor.nbytes} bytes to send: expected at most {self._room.slot_bytes}, what a training step sends; "
                "transport=network has no such limit"
            )
        slot = heapq.heappop(self._free)
        self._slots.view(slot, tensor.shape, tensor.dtype).copy_(tensor)
        os.write(self._announced, _ANNOUNCED.pack(tag, slot))
        self._num_since += 1

    def close(self) -> None:
        os.close(self._announced)
        os.close(self._emptied)

    def peak_bytes(self) -> int:
        self._count_taken()
        return self._most_taken * self._room.slot_bytes

    def _count_taken(self) -> None:
        self._most_taken = max(self._most_taken, self._room.num_tensors - len(self._free))

    def _take_back(self) -> None:
        self._count_taken()
        self._num_since = 0
        with contextlib.suppress(BlockingIOError):
            for (slot,) in _EMPTIED.iter_unpack(_read(self._emptied, _EMPTIED)):
                heapq.heappush(self._free, slot)


class _Inbox:
    """The receiver's side of an edge. A tag may lie there twice, when the sender is a step ahead."""

    def __init__(self, room: Room, offer: str) -> None:
        process, memory, announced, emptied = offer.split()
        folder = f"/proc/{process}/fd"
        descriptor = os.open(f"{folder}/{memory}", os.O_RDWR)
        self._slots = _Slots(descriptor, room)
        os.close(descriptor)
        self._announced = os.open(f"{folder}/{announced}", os.O_RDONLY)
        self._emptied = os.open(f"{folder}/{emptied}", os.O_WRONLY)
        self._there: dict[int, deque[int]] = defaultdict(deque)

    def take(self, tag: int, tensor: Tensor) -> None:
        """Wait for a tensor, copy it out and give its slot back."""
        there = self._there[tag]
        while not there:
            for told, slot in _ANNOUNCED.iter_unpack(_read(self._announced, _ANNOUNCED)):
                self._there[told].append(slot)
        slot = there.popleft()
        tensor.copy_(self._slots.view(slot, tensor.shape, tensor.dtype))
        with contextlib.suppress(BrokenPipeError):  # a sender that is gone needs no room
            os.write(self._emptied, _EMPTIED.pack(slot))

    def close(self) -> None:
        os.close(self._announced)
        os.close(self._emptied)


def _pipe(num_bytes: int) -> tuple[int, int]:
    """Return a pipe's two ends; it holds at least `num_bytes`, so that whoever writes no more never waits."""
    ends = os.pipe()
    if num_bytes > _PIPE_BYTES:
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, num_bytes)
    return ends


def _read(descriptor: int, message: struct.Struct) -> bytes:
    """Return whole messages: writes as small as these are never torn apart."""
    read = os.read(descriptor, _AT_ONCE * message.size)
    if not read:
        raise ConnectionError("the rank at the other end of a pipe is gone")
    return read
