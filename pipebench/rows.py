"""From records to rows: every statistic of a table, computed on reading."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from pipebench.activations import stage_activations
from pipebench.config import RunConfig, tokens_of, value_at
from pipebench.ledger import PARTS, ledger_of
from pipebench.metrics import action_costs, bubble_fraction, imbalance, median_interval, stage_times, step_costs
from pipebench.record import Repeat, RunResult, losses, step_groups, step_times, traces, transfer_times
from pipebench.schedule.action import Op, Schedule, stages_of
from pipebench.schedule.bounds import PassCosts, bubble_bound
from pipebench.schedule.builders import Recompute, with_recompute
from pipebench.schedule.memory import peak_activation_bytes
from pipebench.schedule.simulate import Costs, simulate
from pipebench.trace import Trace

Row = dict[str, Any]

MEASURED = ("ok", "wrong", "unchecked", "simulated")
"""Statuses of points that have timed steps, be they simulated ones."""

COMPARABLE = ("ok", "unchecked", "simulated")
"""Statuses that plots and speed-ups use."""

FAILED = ("error", "oom", "nan", "timeout", "crashed", "deadlock", "skipped", "interrupted")
"""Statuses of points that have a reason instead of a measurement."""

AXES = ("stages", "micro", "replicas", "schedule", "chunks", "recompute", "partition", "model", "engine")


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a point: times of one action in seconds, memory in bytes at its rank's peak.

    Memory is the rank's, all its stages together; it stands in the row of the rank's first stage alone.
    """

    stage: int
    rank: int
    layers: int
    forward_s: float | None
    backward_s: float | None
    input_s: float | None
    weight_s: float | None
    recompute_s: float | None
    optimizer_s: float | None
    busy_s: float | None
    transfer_in_s: float
    parameters_bytes: int | None
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int | None
    activations_predicted_bytes: int | None
    peak_memory_bytes: int | None
    peak_rss_bytes: int | None


def row_of(result: RunResult, reference: RunResult | None, swept: Sequence[str] = ()) -> Row:
    """Return one line of results.csv; what could not be measured is None.

    `reference` is the same model and batch on one device, for the speed-up.
    """
    config = result.config
    row: Row = {"key": result.key, "status": result.status}
    row |= {name: _plain(value_at(config, name)) for name in dict.fromkeys((*AXES, *swept))}
    if config.chunks == "auto" and result.layers_per_stage:
        row["chunks"] = max(map(result.schedule.stage_ranks.count, range(config.stages)))
    row |= _timing(result, reference)
    row |= _bubble(result)
    row |= _ledger(result)
    row |= _resources(result)
    row |= _training(result)
    row["oversubscribed"] = result.oversubscribed
    measured = result.status in MEASURED
    row["steady"] = all(record.steady for repeat in result.repeats for record in repeat.ranks) if measured else None
    row["simulated"] = result.status == "simulated"
    row["flags"] = "; ".join(result.flags)
    row["message"] = result.message
    return row


def stage_rows(result: RunResult) -> list[StageRow]:
    """Return the per-stage table of a measured point, from its first group of workers; empty where it has no rows."""
    if not result.rows:
        return []
    repeat, schedule = result.repeats[0], result.schedule
    costs = _costs(result)
    predicted = predicted_activation_bytes(result)
    transfer_s = transfer_times(result)
    busy = [_busy(step) for step in traces(result, repeat)]
    rows = []
    for stage, (rank, layers) in enumerate(zip(schedule.stage_ranks, result.layers_per_stage, strict=True)):
        record = repeat.ranks[rank]
        memory = record.memory if schedule.stages_of_rank(rank)[0] == stage else None
        rows.append(
            StageRow(
                stage=stage,
                rank=rank,
                layers=layers,
                forward_s=costs.get((stage, Op.FORWARD)),
                backward_s=costs.get((stage, Op.BACKWARD)),
                input_s=costs.get((stage, Op.INPUT_GRADIENT)),
                weight_s=costs.get((stage, Op.WEIGHT_GRADIENT)),
                recompute_s=costs.get((stage, Op.RECOMPUTE)),
                optimizer_s=costs.get((stage, Op.OPTIMIZER)),
                busy_s=median(step[stage] for step in busy) if busy else None,
                transfer_in_s=transfer_s[stage],
                parameters_bytes=memory.parameters_bytes if memory else None,
                gradients_bytes=memory.gradients_bytes if memory else None,
                optimizer_bytes=memory.optimizer_bytes if memory else None,
                activations_bytes=memory.activations_bytes if memory else None,
                activations_predicted_bytes=predicted[rank] if memory and predicted else None,
                peak_memory_bytes=memory.peak_bytes if memory else None,
                peak_rss_bytes=record.peak_rss_bytes if memory else None,
            )
        )
    return rows


def _busy(trace: Trace) -> list[float]:
    """Return each stage's busy seconds."""
    stages = np.concatenate([stages_of(row.codes) for row in trace.rows])
    return [float(seconds) for seconds in np.bincount(stages, trace.duration_s)]


def replays(result: RunResult) -> list[Trace]:
    """Play the point's rows once for each measured step, each rank on a device of its own.

    The costs are those of that very step and the transfer times the point's: over steps in which now one rank and
    now another was slow, medians of each cost alone would describe a step that never was.
    """
    schedule, transfer_s = result.schedule, transfer_times(result)
    steps = [trace for repeat in result.repeats for trace in traces(result, repeat)]
    return [_replay(schedule, step, transfer_s) for step in steps]


def replay(result: RunResult, step: Trace) -> Trace:
    """Play the point's rows with the costs of this step alone, as `replays` does with every step."""
    return _replay(result.schedule, step, transfer_times(result))


def _replay(schedule: Schedule, step: Trace, transfer_s: Sequence[float]) -> Trace:
    return simulate(schedule, step_costs(step), transfer_s)


def median_step(result: RunResult) -> Trace | None:
    """Return the measured step whose time is the (lower) median of the first group's, for pictures."""
    steps = traces(result, result.repeats[0]) if result.repeats else []
    if not steps:
        return None
    times = step_times(result.repeats[0].ranks)
    order = sorted(range(len(times)), key=times.__getitem__)
    return steps[order[(len(order) - 1) // 2]]


def predicted_activation_bytes(result: RunResult) -> list[int] | None:
    """Return the memory model's peak of activations for each rank, without transfers on their way.

    An engine that recomputes inside its backwards has no `R` in its rows, but keeps as little as one that has.
    """
    if result.profile is None or not result.rows:
        return None
    schedule, counts = result.schedule, result.layers_per_stage
    stages = stage_activations(result.profile, counts, result.runs)
    if Op.RECOMPUTE not in schedule.place:
        schedule = with_recompute(schedule, Recompute(result.config.recompute))
    return [round(peak) for peak in peak_activation_bytes(schedule, stages)]


def gpipe_activation_bytes(result: RunResult, rank: int) -> int | None:
    """Return what GPipe would keep on a rank, recomputing every stage: O(N + (L/K)(N/M)) (Huang et al. 2019, s. 2.3).

    That is its inputs of all N samples of a mini-batch and all that its L/K layers keep of one micro-batch of N/M.
    """
    if result.profile is None or not result.rows:
        return None
    kept = stage_activations(result.profile, result.layers_per_stage)
    own = [kept[stage] for stage in result.schedule.stages_of_rank(rank)]
    batch, micro, samples = result.config.batch, result.config.micro, result.profile.num_samples
    inputs = sum(stage.input_bytes for stage in own) * batch
    layers = max(stage.full_bytes - stage.input_bytes for stage in own) * batch / micro
    return round((inputs + layers) / samples)


def _timing(result: RunResult, reference: RunResult | None) -> Row:
    names = ("step_s", "step_ci_low_s", "step_ci_high_s", "samples_per_s", "tokens_per_s", "speedup")
    row: Row = dict.fromkeys(names)
    if result.status not in MEASURED:
        return row
    row["step_s"] = _median_step_s(result)
    row["step_ci_low_s"], row["step_ci_high_s"] = median_interval(step_groups(result))
    row["samples_per_s"] = result.config.batch / row["step_s"]
    num_tokens = tokens_of(result.config)
    if num_tokens is not None:
        row["tokens_per_s"] = row["samples_per_s"] * num_tokens
    if reference is not None and reference.status in COMPARABLE and result.status in COMPARABLE:
        row["speedup"] = _median_step_s(reference) / row["step_s"]
    return row


def _median_step_s(result: RunResult) -> float:
    return median(time for group in step_groups(result) for time in group)


def _bubble(result: RunResult) -> Row:
    config = result.config
    row: Row = dict.fromkeys(("bubble_fraction", "bubble_bound", "bubble_replayed", "replayed_step_s", "imbalance"))
    if result.status in MEASURED and not result.rows:  # no pipeline at all
        return row
    row["bubble_bound"] = bound_of(config, result.layers_per_stage, _costs(result))
    if result.status not in MEASURED:
        return row
    steps = [trace for repeat in result.repeats for trace in traces(result, repeat)]
    if steps:
        replayed = replays(result)
        row["bubble_fraction"] = median(bubble_fraction(trace) for trace in steps)
        row["bubble_replayed"] = median(bubble_fraction(trace) for trace in replayed)
        row["replayed_step_s"] = median(trace.makespan_s for trace in replayed)
        row["imbalance"] = imbalance(rank_times(result))
    return row


def rank_times(result: RunResult) -> list[float]:
    """Return each rank's seconds of pipeline work in one step."""
    schedule = result.schedule
    times = [0.0] * schedule.num_ranks
    for stage, seconds in enumerate(stage_times(_costs(result), list(schedule))):
        times[schedule.stage_ranks[stage]] += seconds
    return times


def bound_of(config: RunConfig, layers_per_stage: Sequence[int], costs: Costs) -> float | None:
    """Return the closed form that fits the point, None where there is none.

    Where it depends on how forward, backward, recompute and the backward's two parts compare, the measured means
    enter; before a measurement, equal parts. What recomputes inside a backward makes that longer, and is no recompute.
    """
    chunks = len(layers_per_stage) // config.stages or (1 if config.chunks == "auto" else config.chunks)
    known = partial(bubble_bound, config.schedule, config.stages, config.micro, chunks)
    if not costs:
        return known()
    mean = {op: sum(cost for (_, each), cost in costs.items() if each == op) / config.stages for op in Op}
    num_recomputed = {"except_last": config.micro - 1, "always": config.micro}.get(config.recompute, 0)
    measured = PassCosts(
        forward_s=mean[Op.FORWARD],
        input_s=mean[Op.INPUT_GRADIENT] or mean[Op.BACKWARD],
        weight_s=mean[Op.WEIGHT_GRADIENT],
        recompute_s=mean[Op.RECOMPUTE] * num_recomputed / config.micro,
    )
    bound = known(measured)
    return known() if bound is None and not num_recomputed else bound


def _ledger(result: RunResult) -> Row:
    """Return what the step's seconds went to, see `pipebench.ledger`; the columns add up to `step_s`."""
    ledger = ledger_of(result) if result.status in MEASURED else None
    return {f"ledger_{part}": None if ledger is None else getattr(ledger, part) for part in PARTS}


def _resources(result: RunResult) -> Row:
    """Return memory in bytes, what the ranks send each other, and the harness's seconds.

    Activations are those of the rank with the largest peak; `peak_memory_all_bytes` adds up the ranks' peaks.
    """
    names = (
        *("peak_memory_bytes", "peak_memory_all_bytes", "activations_bytes", "activations_predicted_bytes"),
        *("activations_gpipe_bytes", "peak_rss_bytes", "sent_bytes", "harness_s"),
    )
    row: Row = dict.fromkeys(names)
    if result.status in MEASURED:
        ranks = [record for repeat in result.repeats for record in repeat.ranks]
        largest = max(ranks, key=lambda record: record.memory.peak_bytes)
        predicted = predicted_activation_bytes(result)
        row["peak_memory_bytes"] = largest.memory.peak_bytes
        row["peak_memory_all_bytes"] = max(_peaks_together(repeat) for repeat in result.repeats)
        row["activations_bytes"] = largest.memory.activations_bytes
        row["activations_predicted_bytes"] = predicted[largest.rank] if predicted else None
        row["activations_gpipe_bytes"] = gpipe_activation_bytes(result, largest.rank)
        row["peak_rss_bytes"] = max(record.peak_rss_bytes for record in ranks)
        row["sent_bytes"] = _sent_bytes(result.repeats[0])
        row["harness_s"] = median(harness_s(repeat) for repeat in result.repeats)
    return row


def _peaks_together(repeat: Repeat) -> int:
    return sum(record.memory.peak_bytes for record in repeat.ranks)


def _sent_bytes(repeat: Repeat) -> int | None:
    """Return the bytes of tensors that all ranks together send in one step, None where some cannot tell."""
    sent = [record.sent_bytes for record in repeat.ranks]
    return None if None in sent else sum(filter(None, sent))


def harness_s(repeat: Repeat) -> float:
    """Return what a point cost beyond warm-up, timed steps, profiling and gate: starting, joining, recording."""
    measuring = ("checking gradients", "warming up", "measuring", "profiling memory", "loading", "saving")
    return repeat.wall_s - repeat.profiling_s - sum(repeat.ranks[0].phases_s.get(phase, 0.0) for phase in measuring)


def _training(result: RunResult) -> Row:
    """`loss_first` and `loss_last` are those of training steps 1 and `steps`, warm-up steps counted.

    How many steps the warm-up takes differs from point to point, so the very last loss would not compare.
    """
    row: Row = dict.fromkeys(("grad_rel_error", "loss_first", "loss_last"))
    if result.status in MEASURED:
        trained = losses(result.repeats[0])
        if trained:
            row["loss_first"], row["loss_last"] = trained[0], trained[result.config.steps - 1]
        row["grad_rel_error"] = largest_gradient_error(result.repeats)
    return row


def largest_gradient_error(repeats: Sequence[Repeat]) -> float | None:
    errors = [record.grad_rel_error for repeat in repeats for record in repeat.ranks]
    known = [error for error in errors if error is not None]
    return max(known, key=lambda error: math.inf if math.isnan(error) else error) if known else None


def _costs(result: RunResult) -> Costs:
    return action_costs([trace for repeat in result.repeats for trace in traces(result, repeat)])


def _plain(value: Any) -> Any:
    """Return a value as a command line would take it."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
