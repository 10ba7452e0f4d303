"""A point without processes: the same schedule, partition and report, the times from a profile and the simulator."""

import dataclasses
from collections.abc import Sequence

from pipebench.costs import for_samples, load_profile, rank_memory, stage_costs, transfer_times
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.harness.prepare import prepare
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory
from pipebench.schedule.action import Schedule
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.simulate import simulate
from pipebench.trace import Trace


def simulate_point(result: RunResult) -> RunResult:
    """Return the point with one simulated step, status `simulated`.

    Raise ConfigError for an unusable profile, ScheduleError where no order keeps the memory limit.
    """
    config = result.config
    profile = for_samples(load_profile(config), micro_batch_sizes(config.batch, config.micro)[0])
    prepared = prepare(config, profile)
    counts, schedule = prepared.layers_per_stage, with_optimizer(prepared.schedule)
    transfer_s = transfer_times(profile, counts)
    trace = simulate(schedule, stage_costs(profile, counts, prepared.runs), transfer_s)
    memory = rank_memory(config.optimizer, profile.layers, counts, schedule, prepared.runs)
    latency_s = profile.link.latency_s
    ranks = [_record(rank, schedule, trace, transfer_s, latency_s, memory[rank]) for rank in range(config.stages)]
    return dataclasses.replace(
        result,
        status="simulated",
        message=prepared.message,
        layers_per_stage=counts,
        rows=[[str(action) for action in row] for row in schedule.rows],
        profile=profile.layers,
        repeats=[*result.repeats, Repeat(ranks, wall_s=0.0)],
        layer_runs=[run.value for run in prepared.runs],
    )


def _record(
    rank: int, schedule: Schedule, trace: Trace, transfer_s: Sequence[float], latency_s: float, memory: StageMemory
) -> RankRecord:
    """Return what a real rank would have delivered of the simulated step."""
    first = sum(len(row) for row in schedule.rows[:rank])
    own = slice(first, first + len(schedule.rows[rank]))
    times = zip(trace.start_s[own].tolist(), trace.end_s[own].tolist(), trace.delay_s[own].tolist(), strict=True)
    owner = schedule.stage_ranks
    from_others = [stage > 0 and owner[stage - 1] != rank for stage in schedule.stages_of_rank(rank)]
    return RankRecord(
        rank=rank,
        warmup_step_s=[],
        step_s=[trace.makespan_s],
        steady=True,
        losses=[],
        grad_rel_error=None,
        transfer_s=[
            transfer_s[stage] if crosses else 0.0
            for stage, crosses in zip(schedule.stages_of_rank(rank), from_others, strict=True)
        ],
        latency_s=[latency_s if crosses else 0.0 for crosses in from_others],
        spans=[list(times)],
        memory=memory,
        peak_rss_bytes=0,
        phases_s={},
    )
