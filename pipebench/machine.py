"""What this machine has, found without importing torch, and how it is described in results."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipebench import __version__

T = TypeVar("T")

CAN_PIN = hasattr(os, "sched_setaffinity")
"""Whether a process can be bound to cores here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores this process may use, and GPUs that the installed PyTorch can use."""

    num_cores: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that new processes may take now; None where nothing tells. On GPUs: all of each, used or not."""

    memory_bytes: int | None
    gpu_bytes: list[int]


def this_machine() -> Machine:
    return Machine(num_cores=len(usable_cores()), num_gpus=len(gpu_names()))


def usable_cores() -> list[int]:
    """Return the ids of the cores this process may run on."""
    if CAN_PIN:
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def describe() -> dict[str, str | int | float]:
    """Return the environment a result depends on; names no user, host or variable."""
    gpus = gpu_names()
    packages = {
        name: _version_of(name) for name in ("torch", "numpy", "hydra-core", "wandb", "deepspeed", "torchgpipe")
    }
    return {
        "python": platform.python_version(),
        "pipebench": __version__,
        **packages,
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(usable_cores()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": " / ".join(dict.fromkeys(gpus)),
        "gpus": len(gpus),
        "git": _git_state(),
        "code": _code_state(),
    }


def machine_class(environment: Mapping[str, Any]) -> str:
    """Return what tells the machines of two `describe()`s apart; memory without what a boot more or less takes of it.

    Raise KeyError or TypeError for an environment of somebody else's.
    """
    gpus = f", {environment['gpus']} x {environment['gpu']}" if environment.get("gpus") else ""
    memory = f"{environment['memory_bytes'] / 2**30:.0f} GiB"
    return f"{environment['processor']}, {environment['cores']} cores, {memory}{gpus}, {environment['system']}"


def capacity(root: Path = Path("/")) -> Capacity:
    """Return what is free, by the kernel's estimate and by the limits of the control groups this process is in."""
    free = [*_free_by_kernel(root), *_free_by_control_groups(root)]
    return Capacity(min(free, default=None), gpu_sizes())


def _free_by_kernel(root: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        return [meminfo(root)["MemAvailable"]]
    return []


def meminfo(root: Path) -> dict[str, int]:
    """Return the lines of /proc/meminfo in bytes; raise OSError or ValueError where there is none such."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3}


def _free_by_control_groups(root: Path) -> list[int]:
    """Return what each limit above this process leaves (version 2 of the hierarchy); file cache gives way."""
    with contextlib.suppress(OSError):
        own = (root / "proc/self/cgroup").read_text().strip().rpartition("::/")[2]
        top = root / "sys/fs/cgroup"
        return [free for group in (top / own, *(top / own).parents) if group.is_relative_to(top)
                for free in _free_in(group)]  # fmt: skip
    return []


def _free_in(group: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [max(0, limit - used + int(counts["inactive_file"]))]
    return []


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_state() -> str:
    """Return the commit of the code that runs, `+` appended when the tree was changed; empty outside git."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(folder.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return ""


def _code_state() -> str:
    """Return a hash of the package's Python files: what measured, also outside git and in a changed tree."""
    digest = hashlib.sha256()
    folder = Path(__file__).resolve().parent
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def gpu_names() -> list[str]:
    """Return the names of the GPUs that the installed PyTorch can use."""
    return _of_gpus(_gpu_name)


def gpu_sizes() -> list[int]:
    """Return the bytes of each GPU's memory; of one that does not tell, more than there is anywhere."""
    return _of_gpus(_gpu_size)


def _of_gpus(look_up: Callable[[ctypes.CDLL, int], T]) -> list[T]:
    """Ask the driver, not torch: importing torch here would cost the command line a second."""
    if "+cpu" in _version_of("torch"):
        return []
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [look_up(driver, number) for number in range(count.value)]


def _gpu_name(driver: ctypes.CDLL, number: int) -> str:
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), number) != 0 or driver.cuDeviceGetName(name, len(name), device) != 0:
        return "a GPU without a name"
    return name.value.decode(errors="replace")


def _gpu_size(driver: ctypes.CDLL, number: int) -> int:
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), number) != 0:
        return sys.maxsize
    return size.value if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else sys.maxsize
