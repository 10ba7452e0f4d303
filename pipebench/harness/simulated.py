"""A point without processes: the same schedule, partition and report, the times from a profile and the simulator."""

import dataclasses

import numpy as np

from pipebench.costs import for_samples, load_profile, stage_activations, stage_costs, transfer_times
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.harness.prepare import prepare
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.memory import peak_activation_bytes
from pipebench.schedule.simulate import simulate

_COPIES_OF_OPTIMIZERS = {"sgd": 0, "adam": 2, "adamw": 2}


def simulate_point(result: RunResult) -> RunResult:
    """Return the point with one simulated step, status `simulated`.

    Memory is the model's: parameters, as much again for gradients, the optimizer's state, activations by the order of
    the rows. Raise ConfigError for an unusable profile, ScheduleError where no order keeps the memory limit.
    """
    config = result.config
    profile = for_samples(load_profile(config), micro_batch_sizes(config.batch, config.micro)[0])
    prepared = prepare(config, profile)
    counts, schedule = prepared.layers_per_stage, with_optimizer(prepared.schedule)
    transfer_s = transfer_times(profile, counts)
    trace = simulate(schedule, stage_costs(profile, counts), transfer_s)
    activations = peak_activation_bytes(schedule, stage_activations(profile.layers, counts))
    times = np.stack([trace.start_s, trace.end_s, trace.delay_s], axis=1)
    bounds = np.cumsum([0, *map(len, schedule.rows)])
    first_layer = np.cumsum([0, *counts])
    ranks = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of_rank(rank)
        parameters = sum(
            sum(profile.layers.parameter_bytes[first_layer[stage] : first_layer[stage + 1]]) for stage in stages
        )
        spans = [(start, end, delay) for start, end, delay in times[bounds[rank] : bounds[rank + 1]].tolist()]
        owners = schedule.stage_ranks
        ranks.append(
            RankRecord(
                rank=rank,
                warmup_step_s=[],
                step_s=[trace.makespan_s],
                steady=True,
                losses=[],
                grad_rel_error=None,
                transfer_s=[transfer_s[stage] if stage > 0 and owners[stage - 1] != rank else 0.0 for stage in stages],
                spans=[spans],
                memory=StageMemory(
                    parameters_bytes=parameters,
                    gradients_bytes=parameters,
                    optimizer_bytes=_COPIES_OF_OPTIMIZERS[config.optimizer.name] * parameters,
                    activations_bytes=round(activations[rank]),
                    allocator_peak_bytes=0,
                    allocator_reserved_bytes=0,
                ),
                peak_rss_bytes=0,
                phases_s={},
            )
        )
    return dataclasses.replace(
        result,
        status="simulated",
        message=prepared.message,
        layers_per_stage=counts,
        rows=[[str(action) for action in row] for row in schedule.rows],
        profile=profile.layers,
        repeats=[*result.repeats, Repeat(ranks, 0.0)],
    )
