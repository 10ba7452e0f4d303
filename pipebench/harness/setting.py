"""How a worker sits on the machine: its cores, threads, device and precision."""

import os

import torch

from pipebench.config import RunConfig


def claim_cores(config: RunConfig, cores: tuple[int, ...], local_rank: int) -> torch.device:
    """Pin this process to `cores` (none: leave it free), set its threads, and return its device."""
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def autocast_of(config: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision == "bf16" else None
