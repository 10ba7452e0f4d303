"""What is decided of a point before it runs or is simulated: how the model is cut, and the rows of its schedule."""

from dataclasses import dataclass

from pipebench.config import RunConfig, limit_in_pipelines, num_stages_of
from pipebench.costs import Profile, stage_activations, stage_costs, transfer_times
from pipebench.engine.partition import split_by_cost, split_uniformly
from pipebench.errors import LimitError
from pipebench.record import far_skips
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import Recompute, with_recompute, with_skips
from pipebench.schedule.catalogue import ZB_AUTO, build
from pipebench.schedule.memory import StageActivations
from pipebench.schedule.search import Found, search


@dataclass(frozen=True, slots=True)
class Prepared:
    """`schedule` is without the optimizer's steps; `message` says what a search predicted."""

    layers_per_stage: list[int]
    schedule: Schedule
    message: str = ""


def prepare(config: RunConfig, profile: Profile) -> Prepared:
    """Cut the model and build the schedule; `profile` is for the point's own micro-batch size.

    Raise LimitError when a search finds nothing within its limit.
    """
    if config.schedule == ZB_AUTO:
        return _searched(config, profile)
    [num_stages] = num_stages_of(config)
    counts = partition(config, profile, num_stages)
    return Prepared(counts, with_skips(schedule_of(config), far_skips(profile.layers, counts)))


def schedule_of(config: RunConfig) -> Schedule:
    """Return the rows of a schedule that is not searched for."""
    chunks = None if config.chunks == "auto" else config.chunks
    return with_recompute(build(config.schedule, config.stages, config.micro, chunks), Recompute(config.recompute))


def partition(config: RunConfig, profile: Profile, num_stages: int) -> list[int]:
    """Return the layers of each stage, first stage first."""
    layers = profile.layers
    match config.partition:
        case "time":
            times = [f + b for f, b in zip(layers.forward_s, layers.backward_s, strict=True)]
            return split_by_cost(times, num_stages)
        case "parameters":
            return split_by_cost(layers.parameter_bytes, num_stages)
        case "uniform":
            return split_uniformly(config.model.num_layers, num_stages)
        case counts:
            return list(counts)


def _searched(config: RunConfig, profile: Profile) -> Prepared:
    """Search with one stage a rank and with as many more as the model has layers for; keep the fastest."""
    found: list[tuple[Found, list[int]]] = []
    failures: list[LimitError] = []
    for num_stages in num_stages_of(config):
        counts = partition(config, profile, num_stages)
        try:
            found.append((_search(config, profile, counts), counts))
        except LimitError as error:
            failures.append(error)
    if not found:
        raise min(failures, key=lambda error: error.needed_bytes)
    best, counts = min(found, key=lambda each: each[0].predicted_s)
    rival = min((each for each, _ in found), key=lambda each: each.best_known_s)
    message = (
        f"predicts {best.predicted_s * 1e3:.1f} ms before the optimizer, "
        f"within {best.limit_bytes / 2**20:.3g} MiB of modelled activations a rank"
    )
    if rival.best_known:
        message += f"; best hand-written: {rival.best_known} {rival.best_known_s * 1e3:.1f} ms"
    return Prepared(counts, with_skips(best.schedule, far_skips(profile.layers, counts)), message)


def _search(config: RunConfig, profile: Profile, counts: list[int]) -> Found:
    activations = stage_activations(profile.layers, counts)
    return search(
        config.stages,
        config.micro,
        len(counts) // config.stages,
        stage_costs(profile, counts),
        activations,
        limit_bytes(config, activations),
        transfer_times(profile, counts),
        Recompute(config.recompute),
    )


def limit_bytes(config: RunConfig, activations: list[StageActivations]) -> float:
    """Return the memory limit of a rank in bytes; `1p` is what 1F1B's first rank would hold of average stages."""
    limit = config.memory_limit
    multiple = 2.0 if limit == "auto" else limit_in_pipelines(limit)
    if multiple is None:
        return float(limit) * 2**20
    whole_model = sum(stage.full_bytes for stage in activations)
    return multiple * min(config.stages, config.micro) * whole_model / config.stages
