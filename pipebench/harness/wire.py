"""How ranks are connected: the process group, the transport over its edges, and what a round trip takes."""

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from pipebench.config import RunConfig
from pipebench.engine.shared_memory import Room, SharedMemoryTransport
from pipebench.engine.stage import TensorSpec
from pipebench.engine.transport import ProcessTransport, Transport, process_groups
from pipebench.schedule.action import Action, Op, Transfer

GROUP_TIMEOUT = timedelta(days=2)
"""Above every limit of the parent (`limits`), which notices a hang and knows more to say about it."""

EMPTY_TENSOR = TensorSpec((1,), torch.float32)
"""What measures a link's latency."""

_TRIP_TAG = 1 << 24
"""Above every tag of a schedule."""


def join_group(config: RunConfig, rank: int, num_ranks: int, store_path: str) -> Store:
    """Make the process group over loopback; NCCL beside gloo where every rank has a GPU of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    store = FileStore(store_path, num_ranks)
    backend = "cpu:gloo,cuda:nccl" if _own_gpu_each(config, num_ranks) else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=GROUP_TIMEOUT)
    return PrefixStore("pipebench", store)


def transport_between(
    edges: Sequence[tuple[int, int]],
    room: Mapping[tuple[int, int], Room],
    config: RunConfig,
    rank: int,
    device: torch.device,
    store: Store,
) -> Transport:
    """Return this rank's end of the (source, target) edges; every rank must name the same ones.

    `room` says for each edge of this rank what one step sends over it.
    """
    carrier = carrier_of(config, device)
    own = carrier.type == "cuda"
    auto = "network" if own or not hasattr(os, "memfd_create") else "shared"
    if (auto if config.transport == "auto" else config.transport) == "shared":
        return SharedMemoryTransport(device, room, rank, PrefixStore(f"shared {device.type}", store))
    return ProcessTransport(device, carrier, process_groups(edges, rank, carrier))


def carrier_of(config: RunConfig, device: torch.device) -> torch.device:
    """Return where tensors lie while torch.distributed carries them: on the device where every rank has its own GPU."""
    own = device.type == "cuda" and _own_gpu_each(config, dist.get_world_size())
    return device if own else torch.device("cpu")


def _own_gpu_each(config: RunConfig, num_ranks: int) -> bool:
    return config.device == "cuda" and torch.cuda.device_count() >= num_ranks


def one_way_time(transport: Transport, rank: int, starts: int, other: int, spec: TensorSpec, rounds: int = 20) -> float:
    """Return half the median round trip of such a tensor between two ranks; both call this."""
    return statistics.median(_round_trip(transport, rank, starts, other, spec) for _ in range(rounds)) / 2


def _round_trip(transport: Transport, rank: int, starts: int, other: int, spec: TensorSpec) -> float:
    """Send a boundary tensor from rank `starts` to rank `other` and back; return the seconds it took on this rank."""
    action = Action(Op.FORWARD, 0, 0)
    there = Transfer(action, action, starts, other)
    back = Transfer(action, action, other, starts)
    incoming, outgoing = (back, there) if rank == starts else (there, back)
    tensor = spec.empty(transport.device)
    transport.post(incoming, _TRIP_TAG + incoming.source_rank, spec)
    began = time.perf_counter()
    if rank == starts:
        transport.send(outgoing, _TRIP_TAG + outgoing.source_rank, tensor)
    received = transport.receive(_TRIP_TAG + incoming.source_rank)
    if rank != starts:
        transport.send(outgoing, _TRIP_TAG + outgoing.source_rank, received)
    if transport.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    transport.finish()
    return elapsed
