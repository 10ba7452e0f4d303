"""What each engine can do, asked before anything starts: which of a point's settings it has no way to keep.

No torch here: the parent asks, and a reason becomes the message of a skipped point.
"""

from collections.abc import Callable
from importlib.util import find_spec

from pipebench.config import RunConfig
from pipebench.machine import Machine

ONE_PROCESS = ("single", "torchgpipe")
"""Engines whose stages, however many, live in one process."""

WHOLE_MODEL = (*ONE_PROCESS, "ddp", "fsdp")
"""Engines that follow no rows of a schedule: each of their processes is given all layers."""

NO_PIPELINE = ("ddp", "fsdp", "single")
"""Engines without stages that wait for each other: what one would pick instead of a pipeline."""


def num_processes(config: RunConfig) -> int:
    """Return how many processes a point's engine runs in."""
    return 1 if config.engine in ONE_PROCESS else config.stages


def follows_rows(config: RunConfig) -> bool:
    """Tell whether the engine runs stages of its own on each rank, so that rows say what it does."""
    return config.engine not in WHOLE_MODEL


def why_not(config: RunConfig, machine: Machine) -> str:
    """Return why this engine cannot run the point, in one line; "" where it can."""
    return _REASONS[config.engine](config, machine) if config.engine in _REASONS else ""


def _torch(config: RunConfig, machine: Machine) -> str:
    if config.schedule not in TORCH_SCHEDULES:
        return f"engine=torch has {', '.join(TORCH_SCHEDULES)}, not schedule={config.schedule}"
    if config.recompute != "never":
        return f"engine=torch has no recompute={config.recompute}"
    return _ragged(config) or _gpu_each(config, machine)


TORCH_SCHEDULES = ("gpipe", "1f1b")


def _ragged(config: RunConfig) -> str:
    if config.batch % config.micro == 0:
        return ""
    found = f"micro={config.micro} does not divide batch={config.batch}"
    return f"engine={config.engine} wants equal micro-batches: {found}"


def _gpu_each(config: RunConfig, machine: Machine) -> str:
    if config.device != "cuda" or config.stages <= machine.num_gpus:
        return ""
    return f"engine={config.engine} wants a GPU for each rank: stages={config.stages}, and there are {machine.num_gpus}"


def not_installed(package: str) -> str:
    """Return what is missing for an engine of another project, "" where its package can be found."""
    return "" if find_spec(package) else f"{package} is not installed: pip install 'pipebench[peers]'"


_REASONS: dict[str, Callable[[RunConfig, Machine], str]] = {
    "torch": _torch,
}
