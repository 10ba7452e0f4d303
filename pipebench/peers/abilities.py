"""What each engine can do, asked before anything starts: which of a point's settings it has no way to keep.

No torch here: the parent asks, and a reason becomes the message of a skipped point.
"""

from collections.abc import Callable
from importlib.util import find_spec

from pipebench.config import OptimizerConfig, RunConfig
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.machine import Machine
from pipebench.record import LayerProfile

ONE_PROCESS = ("torchgpipe",)
"""Engines whose stages, however many, live in one process."""

ONE_DEVICE = ("single",)
"""Engines that take one device, whatever number of them others share the work between."""

WHOLE_MODEL = (*ONE_PROCESS, "ddp", "fsdp")
"""Engines that follow no rows of a schedule: each of their processes is given all layers."""

SAVES = ("single",)
"""Engines of other kinds whose layers and optimizers can be saved and loaded as those of the built-in one."""
OWN_UPDATE = ("single",)
"""Engines of other kinds that update as the built-in one does."""

ONE_COPY = ("torch", "deepspeed", "fsdp")
"""Engines in which a parameter tied between layers may lie on no two ranks."""

NO_PIPELINE = ("ddp", "fsdp", "single")
"""Engines without stages that wait for each other: what one would pick instead of a pipeline."""


def num_processes(config: RunConfig) -> int:
    """Return how many processes a point's engine runs in."""
    return 1 if config.engine in ONE_PROCESS else config.stages


def threads_each(config: RunConfig) -> int:
    """Return how many threads each of a point's processes computes with, and so the cores it needs.

    Where one process runs what stands for K devices, it has the threads of all K.
    """
    return int(config.threads) * (config.stages if config.engine in ONE_PROCESS else 1)


def follows_rows(config: RunConfig) -> bool:
    """Tell whether the engine runs stages of its own on each rank, so that rows say what it does."""
    return config.engine not in WHOLE_MODEL


def why_not(config: RunConfig, machine: Machine) -> str:
    """Return why this engine cannot run the point, in one line; "" where it can."""
    if config.engine not in _REASONS:
        return ""
    return _REASONS[config.engine](config, machine) or _updates_otherwise(config) or _trains_only(config)


ONE_TENSOR = ("torch", "deepspeed", "torchgpipe")
"""Engines that hand one tensor from stage to stage, and take a micro-batch's loss for a mean over its samples."""


def why_not_model(config: RunConfig, layers: LayerProfile) -> str:
    """Return why this engine cannot train the point's model right, in one line; "" where it can."""
    lacking = {
        "parameters that layers share": (layers.ties and config.stages > 1, ONE_COPY),
        "tensors that skip layers": (layers.skips, ONE_TENSOR),
        "layers that take several tensors": (layers.takes_tuple, ONE_TENSOR),
        "losses of inner layers": (layers.adds_to_loss, ONE_TENSOR),
        "a loss in which samples count differently": (layers.uneven_loss, ONE_TENSOR),
    }
    found = [what for what, (there, engines) in lacking.items() if there and config.engine in engines]
    return f"engine={config.engine} has no way for {found[0]}: model={config.model.name}" if found else ""


TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "zb_h1": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}
"""torch.distributed.pipelining's schedule for each of ours that it has, by torch's own name.

Its rows are its own: GPipe runs backwards first micro-batch first, ZBVZeroBubble each W right after its I, and
Interleaved1F1B makes groups of more than K micro-batches where K does not divide M. InterleavedZeroBubble with one
stage a rank has the rows of ZB-H1; with more it is none of ours.
"""


def _torch(config: RunConfig, machine: Machine) -> str:
    if config.schedule not in TORCH_SCHEDULES:
        return f"engine=torch has {', '.join(TORCH_SCHEDULES)}, not schedule={config.schedule}"
    return _ragged(config) or _gpu_each(config, machine) or _torch_sizes(config) or _torch_recompute(config)


def _torch_sizes(config: RunConfig) -> str:
    """Return which numbers of micro-batches the schedule refuses."""
    who, found = f"engine=torch schedule={config.schedule}", f"micro={config.micro} with stages={config.stages}"
    if config.schedule == "1f1b" and config.micro < config.stages:
        return f"{who} wants at least as many micro-batches as stages: {found}"
    num_groups = max(1, config.micro // config.stages)
    if config.schedule in ("interleaved", "zb_h1") and config.micro % num_groups:
        return f"{who} wants micro // stages groups of equal size: {found}"
    return ""


def _torch_recompute(config: RunConfig) -> str:
    """A split backward calls autograd once for each group of parameters, and each call would recompute the stage.

    Torch's receives and order are its own, so how much a rank holds is not worked out.
    """
    if config.recompute == "budget":
        return "engine=torch holds what its own order wants, for which no budget is worked out: recompute=budget"
    if config.recompute == "never" or config.schedule not in ("zb_h1", "zb_v"):
        return ""
    return f"engine=torch recomputes a stage many times over in a split backward: schedule={config.schedule}"


def _deepspeed(config: RunConfig, machine: Machine) -> str:
    if config.schedule != "1f1b":
        return f"engine=deepspeed has 1f1b, not schedule={config.schedule}"
    if config.recompute not in ("never", "always"):
        return f"engine=deepspeed recomputes never or always, not recompute={config.recompute}"
    return _ragged(config) or _gpu_each(config, machine) or not_installed("deepspeed")


def _torchgpipe(config: RunConfig, machine: Machine) -> str:
    if config.schedule != "gpipe":
        return f"engine=torchgpipe has gpipe, not schedule={config.schedule}"
    if config.recompute not in ("never", "except_last", "always"):
        return f"engine=torchgpipe recomputes never, except_last or always, not recompute={config.recompute}"
    if config.device == "cuda":
        return "engine=torchgpipe keeps its stages on the CPU here, not device=cuda"
    return _cut_otherwise(config) or not_installed("torchgpipe")


def _cut_otherwise(config: RunConfig) -> str:
    """Tell where `torch.chunk`, which gives every piece but the last the same size, differs from our micro-batches."""
    size = -(-config.batch // config.micro)
    pieces = [min(size, config.batch - start) for start in range(0, config.batch, size)]
    ours = micro_batch_sizes(config.batch, config.micro)
    return "" if pieces == ours else f"engine={config.engine} cuts batch={config.batch} into {pieces}, not {ours}"


def _trains_only(config: RunConfig) -> str:
    """Tell what an engine lacks that does no more here than train."""
    if config.evaluate_every:
        return f"engine={config.engine} evaluates nothing: evaluate_every={config.evaluate_every}, and it wants 0"
    if (config.save or config.load is not None) and config.engine not in SAVES:
        key, value = ("save", config.save) if config.save else ("load", config.load)
        return f"engine={config.engine} neither saves nor loads: {key}={value}; pipebench and single do"
    return ""


def _updates_otherwise(config: RunConfig) -> str:
    """Tell which settings of an update an engine lacks here; it steps its optimizer after each mini-batch by itself."""
    if config.engine in OWN_UPDATE:
        return ""
    if config.precision == "fp16":
        return f"engine={config.engine} scales no loss, as precision=fp16 wants: pipebench and single do"
    usual, optimizer = OptimizerConfig(), config.optimizer
    for key in ("clip_norm", "loss_scale", "accumulate", "lr_schedule", "lr_warmup"):
        value = getattr(optimizer, key)
        if value != getattr(usual, key):
            return f"engine={config.engine} updates without optimizer.{key}={value}: pipebench and single have it"
    return ""


def _ragged(config: RunConfig) -> str:
    if config.batch % config.micro == 0:
        return ""
    found = f"micro={config.micro} does not divide batch={config.batch}"
    return f"engine={config.engine} wants equal micro-batches: {found}"


def _gpu_each(config: RunConfig, machine: Machine) -> str:
    if config.device != "cuda" or config.stages <= machine.num_gpus:
        return ""
    return f"engine={config.engine} wants a GPU for each rank: stages={config.stages}, and there are {machine.num_gpus}"


def _single(config: RunConfig, machine: Machine) -> str:
    if config.stages != 1:
        return f"engine=single is one process without a pipeline: stages={config.stages}, and it wants 1"
    return _no_pipeline(config)


def _ddp(config: RunConfig, machine: Machine) -> str:
    if config.micro < config.stages:
        found = f"micro={config.micro}, stages={config.stages}"
        return f"engine=ddp wants a micro-batch or more for each of its ranks: {found}"
    return _no_pipeline(config) or _gpu_each(config, machine)


def _fsdp(config: RunConfig, machine: Machine) -> str:
    if config.micro % config.stages:
        found = f"micro={config.micro}, stages={config.stages}"
        return f"engine=fsdp wants equally many micro-batches on each of its ranks: {found}"
    return _no_pipeline(config) or _gpu_each(config, machine)


def _no_pipeline(config: RunConfig) -> str:
    if config.schedule != "gpipe":  # the default: nobody asked for another
        return f"engine={config.engine} runs no pipeline schedule: schedule={config.schedule}, and it wants gpipe"
    if config.recompute == "budget":
        return f"engine={config.engine} holds one micro-batch, for which no budget is worked out: recompute=budget"
    return ""


def not_installed(package: str) -> str:
    """Return what is missing for an engine of another project, "" where its package can be found."""
    return "" if find_spec(package) else f"{package} is not installed: pip install 'pipebench[peers]'"


_REASONS: dict[str, Callable[[RunConfig, Machine], str]] = {
    "torch": _torch,
    "single": _single,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
    "torchgpipe": _torchgpipe,
}
