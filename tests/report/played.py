"""Results of any size without running anything: rows of real schedules, played with costs that differ a little."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from hand_made import MIB, config, rank_record, result, write_sweep

from pipebench.config import key_of
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory
from pipebench.schedule.action import OPS, Op, Schedule, ops_of
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.catalogue import build
from pipebench.schedule.simulate import play

MEAN_S = {Op.FORWARD: 2e-3, Op.BACKWARD: 4e-3, Op.INPUT_GRADIENT: 2e-3, Op.WEIGHT_GRADIENT: 2e-3, Op.OPTIMIZER: 1e-4}
TRANSFER_S = 1e-4
NOISE = 0.03


def played(**changes: Any) -> RunResult:
    """Return a point whose every action took its op's mean time, give or take some."""
    point = config(**changes)
    random = np.random.default_rng(point.seed)
    schedule = with_optimizer(build(point.schedule, point.stages, point.micro, point.chunks))
    steps = [_spans(schedule, random) for _ in range(point.steps)]
    ranks = [_record(rank, [step[rank] for step in steps], point.chunks) for rank in range(point.stages)]
    last = [max(rank[-1][1] for rank in step) for step in steps]
    return result(
        key_of(point),
        point,
        rows=[[str(action) for action in row] for row in schedule.rows],
        layers_per_stage=[1] * schedule.num_stages,
        repeats=[Repeat([dataclasses.replace(rank, step_s=last) for rank in ranks], wall_s=20.0)],
    )


def _spans(schedule: Schedule, random: np.random.Generator) -> list[list[tuple[float, float, float]]]:
    means = np.array([MEAN_S.get(op, 0.0) for op in OPS])[ops_of(schedule.codes)]
    trace = play(schedule, means * (1 + NOISE * random.standard_normal(len(means))), TRANSFER_S)
    return [
        [(span.start_s, span.end_s, 0.0) for span in trace.spans if span.rank == rank]
        for rank in range(schedule.num_ranks)
    ]


def _record(rank: int, spans: list[list[tuple[float, float, float]]], num_stages: int) -> RankRecord:
    memory = StageMemory(MIB, MIB, 2 * MIB, (20 - rank) * MIB, 0, 0)
    record = rank_record(rank, spans[0], step_s=1.0, losses=[2.0] * len(spans), memory=memory)
    return dataclasses.replace(
        record, spans=spans, transfer_s=[TRANSFER_S] * num_stages, latency_s=[TRANSFER_S] * num_stages
    )


def sixty_points(folder: Path) -> Path:
    """Write 60 points of K=8, M=32: four schedules, fifteen seeds."""
    grid = product(("gpipe", "1f1b", "zb_h1", "zb_h2"), range(15))
    results = [played(stages=8, micro=32, schedule=schedule, seed=seed) for schedule, seed in grid]
    points = {each.key: each.config for each in results}
    write_sweep(folder, points, results, ["schedule", "seed"])
    return folder
