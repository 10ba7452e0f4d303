"""Peak memory of one rank: exact, and split by what the bytes are for."""

import bisect
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from pipebench.record import StageMemory
from pipebench.schedule.memory import Peak

_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


def measure_memory(
    accumulate: Callable[[], object],
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    held_bytes: int,
    device: torch.device,
) -> StageMemory:
    """Run `accumulate`, which must leave gradients in `.grad`, under the profiler and return the peak's parts.

    The profiler reports every allocation and release of a tensor's storage, so their running sum is exact.
    What is live before (parameters, optimizer state, `held_bytes` of an engine's own) is counted by size; a gradient
    counts if it was already allocated at the moment of the peak, and throughout where it lies in memory that an engine
    keeps for it; the rest are activations. Of a tensor that is spread over ranks, this rank's shard counts.
    Gradients are dropped afterwards.
    """
    allocator_peak, allocator_reserved = 0, 0
    if device.type == "cuda":
        allocator_peak, allocator_reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    [changes] = allocations({"step": accumulate}, device).values()
    gradient_bytes = storages([p.grad for p in parameters if p.grad is not None])
    kept_bytes = sum(gradient_bytes[address] for address in gradient_bytes.keys() - {each.address for each in changes})
    peak = peak_of(changes, gradient_bytes)
    for parameter in parameters:
        parameter.grad = None
    return StageMemory(
        parameters_bytes=sum(_shard(p).nbytes for p in parameters),
        gradients_bytes=kept_bytes + round(peak.gradient_bytes),
        optimizer_bytes=sum(map(_optimizer_bytes, optimizers)),
        activations_bytes=round(peak.activation_bytes),
        transfers_bytes=held_bytes,
        allocator_peak_bytes=allocator_peak,
        allocator_reserved_bytes=allocator_reserved,
    )


def reset_peaks(device: torch.device) -> None:
    """Start counting the resident set's and the CUDA allocator's peaks anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the gradient gate used is no part of the point
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Return the resident set's peak since `reset_peaks`; 0 where the kernel does not tell.

    `ru_maxrss` would not do: a forked process inherits its parent's.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Change:
    """One storage allocated (`num_bytes` above 0) or let go of."""

    address: int
    num_bytes: int


def allocations(phases: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, list[Change]]:
    """Run the phases in their order under the profiler and return what each of them allocated and let go of."""
    with tempfile.TemporaryDirectory() as folder, _quiet_stderr():
        with profile(
            use_cpu=True, use_device="cuda" if device.type == "cuda" else None, profile_memory=True
        ) as profiled:
            for name, run in phases.items():
                with record_function(name):
                    run()
        path = Path(folder) / "allocations.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = _DEVICE_TYPES[device.type]
    memory = [each for each in events if each.get("name") == "[memory]" and each["args"]["Device Type"] == wanted]
    memory.sort(key=lambda event: event["ts"])
    begun = sorted((e["ts"], e["name"]) for e in events if e.get("cat") == "user_annotation" and e["name"] in phases)
    changes: dict[str, list[Change]] = {name: [] for name in phases}
    starts = [start for start, _ in begun]
    for event in memory:
        phase = bisect.bisect(starts, event["ts"]) - 1
        if phase >= 0:
            changes[begun[phase][1]].append(Change(event["args"]["Addr"], event["args"]["Bytes"]))
    return changes


def peak_of(changes: Sequence[Change], gradients: Collection[int]) -> Peak:
    """Return the peak above what there was before; `gradients` are the addresses of those that are there afterwards.

    What lay at such an address before is none: an address is used again.
    """
    stays = {change.address: index for index, change in enumerate(changes) if change.num_bytes > 0}
    held, of_gradients, peak = 0, 0, Peak()
    for index, change in enumerate(changes):
        held += change.num_bytes
        if change.address in gradients and stays.get(change.address) == index:
            of_gradients += change.num_bytes
        if held > peak.activation_bytes + peak.gradient_bytes:
            peak = Peak(held - of_gradients, of_gradients)
    return peak


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(_shard(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages by address; several tensors may lie in one."""
    storages = [_shard(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor, by its method, for the type takes long to import; else the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler announces itself on the process's stderr, past Python."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
