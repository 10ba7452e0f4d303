"""What a point will need, before it runs: each rank's memory by the model, a step's seconds by the simulator.

The memory model is a lower bound (see `costs.rank_memory`), so what does not fit by it does not fit. Seconds are those
of ranks on devices of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.config import RunConfig
from pipebench.costs import Profile, rank_memory, stage_costs, transfer_times, weight_bytes
from pipebench.harness.prepare import Prepared
from pipebench.machine import Capacity
from pipebench.peers.abilities import follows_rows, num_processes
from pipebench.record import LayerProfile, StageMemory
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.catalogue import build
from pipebench.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Forecast:
    """`memory` is by process."""

    layers_per_stage: list[int]
    memory: list[StageMemory]
    step_s: float


def forecast(config: RunConfig, profile: Profile, prepared: Prepared) -> Forecast:
    """Foretell a prepared point; `profile` is for its own micro-batch size and has seconds."""
    counts, schedule = prepared.layers_per_stage, with_optimizer(prepared.schedule)
    memory = memory_by_process(config, profile.layers, prepared)
    trace = simulate(schedule, stage_costs(profile, counts, prepared.runs), transfer_times(profile, counts))
    return Forecast(counts, memory, trace.makespan_s)


def memory_by_process(config: RunConfig, layers: LayerProfile, prepared: Prepared) -> list[StageMemory]:
    """Return what each process of the point's engine needs at least."""
    if follows_rows(config) and config.engine != "single":
        return rank_memory(config.optimizer, layers, prepared.layers_per_stage, prepared.schedule, prepared.runs)
    return [_of_whole_model(config, layers, prepared)] * num_processes(config)


def _of_whole_model(config: RunConfig, layers: LayerProfile, prepared: Prepared) -> StageMemory:
    """Return what all layers need for one micro-batch at a time; where all are recomputed, a stage at a time."""
    counts = prepared.layers_per_stage
    cut = counts if config.recompute == "always" else [sum(counts)]
    stages = rank_memory(config.optimizer, layers, cut, build("naive", len(cut), config.micro), prepared.runs)
    shards = config.stages if config.engine == "fsdp" else 1
    return StageMemory(
        parameters_bytes=sum(stage.parameters_bytes for stage in stages) // shards,
        gradients_bytes=sum(stage.gradients_bytes for stage in stages) // shards,
        optimizer_bytes=sum(stage.optimizer_bytes for stage in stages) // shards,
        activations_bytes=max(stage.activations_bytes for stage in stages),
        allocator_peak_bytes=0,
        allocator_reserved_bytes=0,
    )


def why_too_large(config: RunConfig, memory: Sequence[StageMemory], capacity: Capacity) -> str:
    """Return why a point cannot fit, in one line; "" where it may, and where nothing runs or nothing is known.

    On the CPU all ranks share the memory there is; on GPUs those with the same remainder share one.
    """
    if config.engine == "simulate":
        return ""
    if config.device == "cpu":
        return _excess("all ranks", sum(rank.peak_bytes for rank in memory), "memory", capacity.memory_bytes)
    gpus = capacity.gpu_bytes
    used = [sum(rank.peak_bytes for rank in memory[gpu :: len(gpus)]) for gpu in range(len(gpus))]
    told = (_excess(f"the ranks on GPU {gpu}", used[gpu], "memory on it", gpus[gpu]) for gpu in range(len(gpus)))
    return next(filter(None, told), "")


def why_weights_too_large(config: RunConfig, model_bytes: int, capacity: Capacity) -> str:
    """Return why the weights alone cannot fit, however the model is cut; "" where they may, or nothing is known.

    Asked before anything of the model is allocated.
    """
    what, there = "memory", capacity.memory_bytes
    if config.device == "cuda":
        what, there = "memory on the GPUs", sum(capacity.gpu_bytes) or None
    who = "all ranks, for weights, gradients and optimizer alone,"
    return _excess(who, weight_bytes(config.optimizer, model_bytes), what, there)


def _excess(who: str, needed: int, what: str, there: int | None) -> str:
    if there is None or needed <= there:
        return ""
    return (
        f"{who} need at least {needed / 2**20:.4g} MiB, {there / 2**20:.4g} MiB of {what} is free (force=true runs it)"
    )
