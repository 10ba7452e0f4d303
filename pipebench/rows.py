"""From records to rows: every statistic of a table, computed on reading."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipebench.config import RunConfig, TransformerConfig, value_at
from pipebench.metrics import Costs, action_costs, bubble_fraction, imbalance, median_interval, stage_times, step_costs
from pipebench.record import LayerProfile, Repeat, RunResult, step_times, traces
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.bounds import BUBBLE_BOUNDS, gpipe_with_recompute
from pipebench.schedule.memory import StageActivations, peak_activation_bytes
from pipebench.schedule.simulate import TransferTimeOf, simulate
from pipebench.trace import Trace

Row = dict[str, Any]

MEASURED = ("ok", "wrong", "unchecked")
"""Statuses of points that have timed steps."""

COMPARABLE = ("ok", "unchecked")
"""Statuses that plots and speed-ups use."""

AXES = ("stages", "micro", "replicas", "schedule", "recompute", "partition", "model", "engine")


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a point: times of one action in seconds, memory in bytes at the rank's peak."""

    stage: int
    layers: int
    forward_s: float | None
    backward_s: float | None
    recompute_s: float | None
    optimizer_s: float | None
    busy_s: float | None
    transfer_in_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    activations_predicted_bytes: int | None
    peak_memory_bytes: int
    peak_rss_bytes: int


def row_of(result: RunResult, reference: RunResult | None, swept: Sequence[str] = ()) -> Row:
    """Return one line of results.csv; what could not be measured is None.

    `reference` is the same model and batch on one device, for the speed-up.
    """
    config = result.config
    row: Row = {"key": result.key, "status": result.status}
    row |= {name: _plain(value_at(config, name)) for name in dict.fromkeys((*AXES, *swept))}
    row |= _timing(result, reference)
    row |= _bubble(result)
    row |= _resources(result)
    row |= _training(result)
    row["oversubscribed"] = result.oversubscribed
    measured = result.status in MEASURED
    row["steady"] = all(record.steady for repeat in result.repeats for record in repeat.ranks) if measured else None
    row["simulated"] = False
    row["message"] = result.message
    return row


def stage_rows(result: RunResult) -> list[StageRow]:
    """Return the per-stage table of a measured point, from its first group of workers."""
    repeat = result.repeats[0]
    costs = _costs(result)
    predicted = predicted_activation_bytes(result)
    steps = traces(result, repeat)
    rows = []
    for record, layers in zip(repeat.ranks, result.layers_per_stage, strict=True):
        stage, memory = record.rank, record.memory
        busy = [sum(s.duration_s for s in step.spans if s.rank == record.rank) for step in steps]
        rows.append(
            StageRow(
                stage=stage,
                layers=layers,
                forward_s=costs.get((stage, Op.FORWARD)),
                backward_s=costs.get((stage, Op.BACKWARD)),
                recompute_s=costs.get((stage, Op.RECOMPUTE)),
                optimizer_s=costs.get((stage, Op.OPTIMIZER)),
                busy_s=median(busy) if busy else None,
                transfer_in_s=record.transfer_s,
                parameters_bytes=memory.parameters_bytes,
                gradients_bytes=memory.gradients_bytes,
                optimizer_bytes=memory.optimizer_bytes,
                activations_bytes=memory.activations_bytes,
                activations_predicted_bytes=predicted[stage] if predicted else None,
                peak_memory_bytes=memory.peak_bytes,
                peak_rss_bytes=record.peak_rss_bytes,
            )
        )
    return rows


def replays(result: RunResult) -> list[Trace]:
    """Play the point's rows once for each measured step, each rank on a device of its own.

    The costs are those of that very step and the transfer times the point's: over steps in which now one rank and
    now another was slow, medians of each cost alone would describe a step that never was.
    """
    steps = [trace for repeat in result.repeats for trace in traces(result, repeat)]
    schedule, transfer_s = result.schedule, _transfer_times(result)

    def between(producer: Action, consumer: Action) -> float:
        return transfer_s[max(producer.stage, consumer.stage)]

    return [_replay(schedule, step_costs(step), between) for step in steps]


def _replay(schedule: Schedule, costs: Costs, between: TransferTimeOf) -> Trace:
    return simulate(schedule, lambda action: costs[action.stage, action.op], between)


def _transfer_times(result: RunResult) -> list[float]:
    """Return for each rank the one-way seconds from the rank before it."""
    return [
        median(repeat.ranks[rank].transfer_s for repeat in result.repeats)
        for rank in range(len(result.repeats[0].ranks))
    ]


def median_step(result: RunResult) -> Trace | None:
    """Return the measured step whose time is the (lower) median of the first group's, for pictures."""
    steps = traces(result, result.repeats[0]) if result.repeats else []
    if not steps:
        return None
    times = step_times(result.repeats[0])
    order = sorted(range(len(times)), key=times.__getitem__)
    return steps[order[(len(order) - 1) // 2]]


def predicted_activation_bytes(result: RunResult) -> list[int] | None:
    """Return the memory model's peak of activations for each stage (no receive buffers, no temporaries)."""
    if result.profile is None:
        return None
    stages, first = [], 0
    for count in result.layers_per_stage:
        stages.append(_stage_activations(result.profile, first, first + count))
        first += count
    return [round(peak) for peak in peak_activation_bytes(result.schedule, stages)]


def _stage_activations(profile: LayerProfile, first: int, end: int) -> StageActivations:
    kept = sum(profile.saved_bytes[first:end])
    kept += sum(profile.input_bytes[i] for i in range(first + 1, end) if profile.saves_input[i])
    from_rank_before = profile.input_bytes[first] if first > 0 else 0  # stage 0 reads the mini-batch itself
    return StageActivations(full_bytes=kept + from_rank_before, input_bytes=from_rank_before)


def _timing(result: RunResult, reference: RunResult | None) -> Row:
    names = ("step_s", "step_ci_low_s", "step_ci_high_s", "samples_per_s", "tokens_per_s", "speedup")
    row: Row = dict.fromkeys(names)
    if result.status not in MEASURED:
        return row
    groups = [step_times(repeat) for repeat in result.repeats]
    row["step_s"] = _median_step_s(result)
    row["step_ci_low_s"], row["step_ci_high_s"] = median_interval(groups)
    row["samples_per_s"] = result.config.batch / row["step_s"]
    if isinstance(result.config.model, TransformerConfig):
        row["tokens_per_s"] = row["samples_per_s"] * result.config.model.sequence
    if reference is not None and reference.status in COMPARABLE and result.status in COMPARABLE:
        row["speedup"] = _median_step_s(reference) / row["step_s"]
    return row


def _median_step_s(result: RunResult) -> float:
    return median(time for repeat in result.repeats for time in step_times(repeat))


def _bubble(result: RunResult) -> Row:
    config = result.config
    row: Row = dict.fromkeys(("bubble_fraction", "bubble_bound", "bubble_replayed", "replayed_step_s", "imbalance"))
    row["bubble_bound"] = bubble_bound(config, _costs(result))
    if result.status not in MEASURED:
        return row
    steps = [trace for repeat in result.repeats for trace in traces(result, repeat)]
    if steps:
        replayed = replays(result)
        row["bubble_fraction"] = median(bubble_fraction(trace) for trace in steps)
        row["bubble_replayed"] = median(bubble_fraction(trace) for trace in replayed)
        row["replayed_step_s"] = median(trace.makespan_s for trace in replayed)
        row["imbalance"] = imbalance(stage_times(_costs(result), list(result.schedule)))
    return row


def bubble_bound(config: RunConfig, costs: Costs) -> float:
    """Return the closed form that fits the point.

    GPipe with recompute depends on how forward, backward and recompute compare, so there the measured means
    enter; before a measurement, and for other schedules, it is the plain bound.
    """
    plain = BUBBLE_BOUNDS[config.schedule](config.stages, config.micro)
    if config.recompute == "never" or config.schedule != "gpipe" or not costs:
        return plain
    mean = {
        op: sum(cost for (_, each), cost in costs.items() if each == op) / config.stages
        for op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE)
    }
    num_recomputed = config.micro - (config.recompute == "except_last")
    return gpipe_with_recompute(
        config.stages, config.micro, num_recomputed, mean[Op.FORWARD], mean[Op.BACKWARD], mean[Op.RECOMPUTE]
    )


def _resources(result: RunResult) -> Row:
    row: Row = dict.fromkeys(("peak_memory_bytes", "peak_rss_bytes", "harness_s"))
    if result.status in MEASURED:
        ranks = [record for repeat in result.repeats for record in repeat.ranks]
        row["peak_memory_bytes"] = max(record.memory.peak_bytes for record in ranks)
        row["peak_rss_bytes"] = max(record.peak_rss_bytes for record in ranks)
        row["harness_s"] = median(harness_s(repeat) for repeat in result.repeats)
    return row


def harness_s(repeat: Repeat) -> float:
    """Return what a point cost beyond warm-up, timed steps, profiling and gate: starting, joining, recording."""
    measuring = ("checking gradients", "warming up", "measuring", "profiling memory")
    return repeat.wall_s - repeat.profiling_s - sum(repeat.ranks[0].phases_s[phase] for phase in measuring)


def _training(result: RunResult) -> Row:
    """`loss_first` and `loss_last` are those of training steps 1 and `steps`, warm-up steps counted.

    How many steps the warm-up takes differs from point to point, so the very last loss would not compare.
    """
    row: Row = dict.fromkeys(("grad_rel_error", "loss_first", "loss_last"))
    if result.status in MEASURED:
        losses = result.repeats[0].ranks[-1].losses
        row["loss_first"], row["loss_last"] = losses[0], losses[result.config.steps - 1]
        row["grad_rel_error"] = largest_gradient_error(result.repeats)
    return row


def largest_gradient_error(repeats: Sequence[Repeat]) -> float | None:
    errors = [record.grad_rel_error for repeat in repeats for record in repeat.ranks]
    known = [error for error in errors if error is not None]
    return max(known, key=lambda error: math.inf if math.isnan(error) else error) if known else None


def _costs(result: RunResult) -> Costs:
    return action_costs([trace for repeat in result.repeats for trace in traces(result, repeat)])


def _plain(value: Any) -> Any:
    return "-".join(str(part) for part in value) if isinstance(value, list) else value
