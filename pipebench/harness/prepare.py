"""What is decided of a point before it runs or is simulated: how the model is cut, and the rows of its schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from pipebench.activations import footprint_of, spans, stage_activations
from pipebench.config import RunConfig, limit_in_pipelines, num_stages_of
from pipebench.costs import Profile, stage_costs, transfer_times
from pipebench.engine.budget import Candidate, cheapest
from pipebench.engine.partition import split_by_cost, split_uniformly
from pipebench.errors import LimitError
from pipebench.record import LayerProfile, LayerRun, far_skips
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.builders import Recompute, with_recompute, with_skips
from pipebench.schedule.catalogue import ZB_AUTO, build
from pipebench.schedule.memory import StageActivations, most_activation_bytes, peak_bytes
from pipebench.schedule.search import Found, search

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Prepared:
    """`schedule` is without the optimizer's steps; `message` says what a search predicted.

    `runs` say of each layer whether its forward runs again inside its backward.
    """

    layers_per_stage: list[int]
    schedule: Schedule
    message: str = ""
    runs: tuple[LayerRun, ...] = ()


def prepare(config: RunConfig, profile: Profile) -> Prepared:
    """Cut the model and build the schedule; `profile` is for the point's own micro-batch size.

    Raise LimitError when a search finds nothing within its limit, or no recompute keeps the budget.
    """
    if config.schedule == ZB_AUTO:
        return _searched(config, profile)
    [num_stages] = num_stages_of(config)
    counts = partition(config, profile, num_stages)
    schedule = with_skips(schedule_of(config), far_skips(profile.layers, counts))
    if config.recompute != Recompute.BUDGET.value:
        return Prepared(counts, schedule, runs=runs_of(config))
    again = within_budget(profile.layers, counts, schedule, float(config.recompute_budget) * MIB)
    return Prepared(counts, schedule, _in_words(again), again)


def runs_of(config: RunConfig) -> tuple[LayerRun, ...]:
    """Return how each layer is run where the setting alone says so."""
    run = {"layer": LayerRun.AGAIN, "selective": LayerRun.SELECTIVE}.get(config.recompute, LayerRun.KEEP)
    return (run,) * int(config.model.num_layers)


def within_budget(
    layers: LayerProfile, layers_per_stage: Sequence[int], schedule: Schedule, budget_bytes: float
) -> tuple[LayerRun, ...]:
    """Choose for each rank the layers that cost least to run again, so that its activations keep the budget.

    What a layer lets go of counts as often as its stage has micro-batches in flight; whether a choice fits says the
    memory model. Raise LimitError, with the least that would do, where not even all together fit.
    """
    runs, least = [LayerRun.KEEP] * len(layers.names), dict[int, float]()
    for rank in range(schedule.num_ranks):
        candidates = _candidates(layers, layers_per_stage, schedule, rank)

        def held(again: tuple[int, ...], rank: int = rank) -> float:
            chosen = [LayerRun.AGAIN if index in again else LayerRun.KEEP for index in range(len(runs))]
            stages = stage_activations(layers, layers_per_stage, chosen)
            return most_activation_bytes(schedule, schedule.rows[rank], stages)

        found = cheapest(candidates, lambda again, held=held: held(again) <= budget_bytes)  # type: ignore[misc]
        if found is None:
            least[rank] = held(tuple(candidate.layer for candidate in candidates))
        for index in found or ():
            runs[index] = LayerRun.AGAIN
    if least:
        rank = max(least, key=lambda each: least[each])
        raise LimitError(
            f"recompute_budget={budget_bytes / MIB:g}: rank {rank} holds {ceil(least[rank] / MIB * 1e3) / 1e3:g} MiB "
            "of activations when every layer runs again: expected at least that",
            least[rank],
        )
    return tuple(runs)


def _candidates(
    layers: LayerProfile, layers_per_stage: Sequence[int], schedule: Schedule, rank: int
) -> list[Candidate]:
    """Return the layers of a rank that keep less when they run again."""
    bounds, found = spans(layers_per_stage), []
    for stage in schedule.stages_of_rank(rank):
        alone = [StageActivations(float(other == stage), 0.0) for other in range(schedule.num_stages)]
        in_flight = peak_bytes(schedule, schedule.rows[rank], alone).activation_bytes
        for index in range(*bounds[stage]):
            kept, again = (footprint_of(layers, index, run) for run in (LayerRun.KEEP, LayerRun.AGAIN))
            more = 0 if kept.keeps_input or index == bounds[stage][0] else layers.input_bytes[index]
            fewer = kept.kept_bytes - again.kept_bytes - more
            if fewer > 0:
                found.append(Candidate(index, layers.forward_s[index], fewer * in_flight))
    return found


def _in_words(runs: Sequence[LayerRun]) -> str:
    again = [str(index) for index, run in enumerate(runs) if run == LayerRun.AGAIN]
    return f"runs {len(again)} of {len(runs)} layers again: {', '.join(again) or 'none'}"


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
    return Prepared(counts, with_skips(best.schedule, far_skips(profile.layers, counts)), message, runs_of(config))


def _search(config: RunConfig, profile: Profile, counts: list[int]) -> Found:
    runs = runs_of(config)
    activations = stage_activations(profile.layers, counts, runs)
    return search(
        config.stages,
        config.micro,
        len(counts) // config.stages,
        stage_costs(profile, counts, runs),
        activations,
        limit_bytes(config, activations),
        transfer_times(profile, counts),
        Recompute(config.recompute),
    )


def limit_bytes(config: RunConfig, activations: Sequence[StageActivations]) -> float:
    """Return the memory limit of a rank in bytes; `1p` is what 1F1B's first rank would keep of average stages.

    On top of what that keeps comes what an action needs beyond it while it runs.
    """
    limit = config.memory_limit
    multiple = 2.0 if limit == "auto" else limit_in_pipelines(limit)
    if multiple is None:
        return float(limit) * MIB
    whole_model = sum(stage.full_bytes for stage in activations)
    kept_bytes = min(config.stages, config.micro) * whole_model / config.stages
    return multiple * kept_bytes + max(map(_beyond_kept, activations))


def _beyond_kept(stage: StageActivations) -> float:
    """Return what a forward or backward needs at most beyond what is kept before or after it."""
    kept = {Op.FORWARD: stage.full_bytes, Op.RECOMPUTE: stage.full_bytes - stage.input_bytes}
    return max((peak.activation_bytes - kept.get(op, 0.0) for op, peak in stage.peaks.items()), default=0.0)
