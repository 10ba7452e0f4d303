"""What else goes on on this machine while a point is measured: read from /proc, /sys and the GPU's driver, in a few ms.

A point is bracketed by two readings, taken while none of its workers lives, so whatever is seen belongs to somebody
else. What speaks against its numbers becomes flags, one line each. What a machine does not tell raises no flag.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipebench.machine import meminfo

T = TypeVar("T")

_LOOKS = 5
_BETWEEN_LOOKS_S = 0.001
"""A thread that is busy runs at every look; one that woke up for a moment does not."""

_SWAP_BYTES = 2**20
"""Less than this of swap in use is nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment: others' runnable threads, bytes in swap, times that cores were throttled since boot, and the rest.

    `clock_share` is the lowest share of a core's highest frequency that its governor allows, 1 where none is capped;
    `gpu_processes` are those that compute on a GPU.
    """

    runnable: int = 0
    swap_bytes: int = 0
    throttled: int = 0
    clock_share: float = 1.0
    gpu_processes: int = 0


def read_conditions(device: str, root: Path = Path("/")) -> Reading:
    """Look at the machine now; costs some 5 ms. Only points on `cuda` ask the GPU's driver."""
    return Reading(
        runnable=min(_look(lambda: _runnable(root), before) for before in range(_LOOKS)),
        swap_bytes=_or(0, lambda: _swap_bytes(root)),
        throttled=_or(0, lambda: _throttled(root)),
        clock_share=_or(1.0, lambda: _clock_share(root)),
        gpu_processes=_gpu_processes() if device == "cuda" else 0,
    )


def flags_between(before: Reading, after: Reading, wanted_cores: int, num_cores: int) -> list[str]:
    """Return what disturbed a point that wanted so many of the machine's cores, each `what: how much`."""
    load, swap = max(before.runnable, after.runnable), max(before.swap_bytes, after.swap_bytes)
    share, gpu = min(before.clock_share, after.clock_share), max(before.gpu_processes, after.gpu_processes)
    left = max(0, num_cores - wanted_cores)
    found = {
        f"other load: {load} busy threads of others, {left} of {num_cores} cores left for them": load > left,
        f"swap in use: {swap / 2**20:.0f} MiB": swap >= _SWAP_BYTES,
        f"throttled: {after.throttled - before.throttled} times by heat": after.throttled > before.throttled,
        f"slow clock: capped at {share:.0%} of the highest frequency": share < 1,
        f"shared GPU: {gpu} processes of others": gpu > 0,
    }
    return [flag for flag, holds in found.items() if holds]


def merged(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return the flags of both, of each kind the earliest."""
    kinds: dict[str, str] = {}
    for flag in (*earlier, *later):
        kinds.setdefault(flag.partition(":")[0], flag)
    return list(kinds.values())


def _look(read: Callable[[], int], earlier_looks: int) -> int:
    if earlier_looks:
        time.sleep(_BETWEEN_LOOKS_S)
    return _or(0, read)


def _or(default: T, read: Callable[[], T]) -> T:
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        return read()
    return default


def _runnable(root: Path) -> int:
    """Return the runnable threads of the whole machine, this one, which is reading, left out."""
    running, _, _ = (root / "proc/loadavg").read_text().split()[3].partition("/")
    return max(0, int(running) - 1)


def _swap_bytes(root: Path) -> int:
    found = meminfo(root)
    return found["SwapTotal"] - found["SwapFree"]


def _cores(root: Path) -> list[Path]:
    return list((root / "sys/devices/system/cpu").glob("cpu[0-9]*"))


def _throttled(root: Path) -> int:
    counts = [core / "thermal_throttle" / "core_throttle_count" for core in _cores(root)]
    return sum(int(count.read_text()) for count in counts if count.exists())


def _clock_share(root: Path) -> float:
    folders = [core / "cpufreq" for core in _cores(root)]
    return min(
        (_hertz(folder, "scaling_max_freq") / _hertz(folder, "cpuinfo_max_freq") for folder in folders
         if folder.exists()),
        default=1.0,
    )  # fmt: skip


def _hertz(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


def _gpu_processes() -> int:
    """Return how many processes compute on any GPU; 0 where nvidia-ml-py is not installed or cannot tell."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        try:
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
            return sum(len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)) for gpu in gpus)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
