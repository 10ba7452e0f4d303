"""How a worker sits on the machine: its cores, threads, device and precision."""

import ctypes
import os

import torch

from pipebench.config import RunConfig


def claim_cores(config: RunConfig, cores: tuple[int, ...], local_rank: int) -> torch.device:
    """Pin the calling thread, and those it will start, to `cores` (none: leave them free); return the device."""
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(config.threads)
    libc = ctypes.CDLL(None)
    _keep_freed_memory(libc)
    _wake_on_time(libc)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _keep_freed_memory(libc: ctypes.CDLL) -> None:
    """Tell glibc not to return freed memory to the kernel.

    Activations are freed and allocated anew in every step; faulting their pages in again cost 5 to 15 % of a step
    here. Training hosts usually run an allocator that keeps memory, so every engine and the reference get it.
    """
    if hasattr(libc, "mallopt"):
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, 1 << 30)


def _wake_on_time(libc: ctypes.CDLL) -> None:
    """Tell Linux not to round the calling thread's sleeps up, by 50 us unless told otherwise: stages that sleep would
    all take longer than was asked, each by another bit."""
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""

_PR_SET_TIMERSLACK = 29
"""From Linux's prctl.h; in nanoseconds."""


def autocast_of(config: RunConfig) -> torch.dtype | None:
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
