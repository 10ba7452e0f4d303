"""Results made by hand, small enough to work every number out on paper."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

from pipebench.config import OptimizerConfig, RunConfig, SyntheticConfig, TeacherConfig, WandbConfig
from pipebench.ledger import PARTS
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory, write_json, write_result
from pipebench.rows import Row

MIB = 2**20

OK, WRONG, ERROR, PENDING, REFERENCE = (letter * 12 for letter in "abcde")

ENVIRONMENT = {"processor": "Test <CPU>", "cores": 2, "memory_bytes": 4 * 2**30, "gpu": "", "gpus": 0, "torch": "2.9"}
ENVIRONMENT |= {"system": "Linux 6.1", "git": "abc"}

ROWS = [["0F0", "0F1", "0B1", "0B0", "0O"], ["1F0", "1F1", "1B1", "1B0", "1O"]]

# One step of K=2, M=2 in seconds: forward 1, backward 2, the optimizer takes no time, transfers are free.
#   rank 0 |F0F1······B1B1B0B0|     busy 6 of 9
#   rank 1 |··F0F1B1B1B0B0····|     busy 6 of 9
SPANS = [
    [(0.0, 1.0, 0.0), (1.0, 2.0, 0.0), (5.0, 7.0, 0.0), (7.0, 9.0, 0.0), (9.0, 9.0, 0.0)],
    [(1.0, 2.0, 0.0), (2.0, 3.0, 0.0), (3.0, 5.0, 0.0), (5.0, 7.0, 0.0), (7.0, 7.0, 0.0)],
]


def config(**changes: Any) -> RunConfig:
    point = RunConfig(
        stages=2,
        micro=2,
        replicas=1,
        schedule="gpipe",
        chunks=1,
        memory_limit="auto",
        recompute="never",
        partition="time",
        engine="pipebench",
        profile=None,
        batch_norm="deferred",
        recompute_budget=None,
        evaluate_every=0,
        evaluate_batch=None,
        save=False,
        load=None,
        batch=18,
        model=SyntheticConfig(
            name="synthetic", layers=2, width=8, forward_s=1.0, backward_s=2.0, weight_share=0.5, imbalance=0.0
        ),
        data=TeacherConfig(name="teacher"),
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        precision="fp32",
        device="cpu",
        threads=1,
        warmup=1,
        steps=1,
        repeats=1,
        noise_floor=True,
        on_failure="continue",
        point_limit_s="auto",
        progress_limit_s="auto",
        seed=0,
        gate="on",
        results_dir="results",
        wandb=WandbConfig(mode="disabled", project="pipebench"),
    )
    return dataclasses.replace(point, **changes)


def rank_record(rank: int, spans: list[tuple[float, float, float]], step_s: float, **changes: Any) -> RankRecord:
    record = RankRecord(
        rank=rank,
        warmup_step_s=[step_s],
        step_s=[step_s],
        steady=True,
        losses=[2.0, 1.0],
        grad_rel_error=1e-7,
        transfer_s=[0.0],
        latency_s=[0.0],
        spans=[spans],
        memory=StageMemory(MIB, MIB, 0, rank * MIB, 0, 0),
        peak_rss_bytes=100 * MIB,
        phases_s={"checking gradients": 0.0, "warming up": 9.0, "measuring": 9.0, "profiling memory": 1.0},
    )
    return dataclasses.replace(record, **changes)


def result(key: str, point: RunConfig, **changes: Any) -> RunResult:
    """Return a two-stage result that took 9 s a step, unless `changes` say otherwise."""
    ranks = [rank_record(rank, spans, step_s=9.0) for rank, spans in enumerate(SPANS)]
    whole = RunResult(
        key=key,
        config=point,
        status="ok",
        message="",
        oversubscribed=False,
        environment=ENVIRONMENT,
        layers_per_stage=[1, 1],
        rows=ROWS,
        profile=None,
        repeats=[Repeat(ranks, wall_s=20.0, profiling_s=0.0)],
    )
    return dataclasses.replace(whole, **changes)


def one_device(key: str) -> RunResult:
    """Return the reference: 12 s a step."""
    spans = [(0.0, 4.0, 0.0), (4.0, 12.0, 0.0), (12.0, 12.0, 0.0)]
    repeat = Repeat([rank_record(0, spans, step_s=12.0)], wall_s=20.0, profiling_s=0.0)
    point = config(stages=1, micro=1)
    return result(key, point, rows=[["0F0", "0B0", "0O"]], layers_per_stage=[2], repeats=[repeat])


def timed(key: str, point: RunConfig, groups: list[list[float]], **changes: Any) -> RunResult:
    """Return a two-stage result whose steps took these seconds, a list for each fresh group of workers."""

    def record(rank: int, times: list[float]) -> RankRecord:
        one = rank_record(rank, SPANS[rank], step_s=9.0)
        return dataclasses.replace(one, step_s=times, spans=one.spans * len(times))

    repeats = [Repeat([record(rank, times) for rank in range(2)], wall_s=20.0) for times in groups]
    return result(key, point, repeats=repeats, **changes)


def write_sweep(
    folder: Path,
    points: dict[str, RunConfig],
    results: list[RunResult],
    swept: list[str],
    again: RunResult | None = None,
) -> None:
    """Write the files that a sweep leaves; `again` is the second measurement of one of its points."""
    for each in results:
        write_result(folder / "runs" / each.key / "result.json", each)
    states = [
        {"key": key, "state": "", "repeats_done": 1, "config": dataclasses.asdict(c)} for key, c in points.items()
    ]
    reference = {"key": REFERENCE, "state": "ok", "repeats_done": 1, "config": dataclasses.asdict(config(stages=1))}
    state = {
        "format": 2,
        "name": "hand|made",
        "swept": swept,
        "points": states,
        "references": [reference],
        "reference_of": dict.fromkeys(points, REFERENCE),
    }
    if again is not None:
        write_result(folder / "runs" / again.key / "again.json", again)
        state["noise_floor"] = again.key
    write_json(folder / "sweep.json", state)


PICTURES = ["bubble", "throughput", "ledger", "memory", "loss"]
WRITTEN = ["results.csv", "report.md", "report.html", *(f"{name}.png" for name in PICTURES)]
"""What the report of `four_points` consists of."""


def four_points(folder: Path) -> Path:
    points = {
        OK: config(),
        WRONG: config(micro=4),
        ERROR: config(micro=8, schedule="1f1b"),
        PENDING: config(stages=3, micro=2, schedule="1f1b"),
    }
    error_message = "rank 1 failed at 1F0: a | b <script>\nsecond line"
    results = [
        result(OK, points[OK]),
        result(WRONG, points[WRONG], status="wrong", message="gradient error 0.5: expected at most 0.0001 in fp32"),
        result(ERROR, points[ERROR], status="error", message=error_message, repeats=[], rows=[]),
        one_device(REFERENCE),
    ]
    write_sweep(folder, points, results, ["stages", "micro", "schedule"])
    return folder


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def schedule_rows() -> list[Row]:
    """Return rows of five schedules that differ in nothing else but their times."""
    times = {"gpipe": 9.0, "interleaved": 8.0, "looped_bfs": 8.5, "zb_h1": 7.0, "1f1b": 9.5}
    chunks = {"interleaved": 2, "looped_bfs": 2}
    rows = []
    for name, step_s in times.items():
        rows += table_rows(schedule=name, chunks=chunks.get(name, 1), step_s=step_s)
    return rows


def table_rows(**changes: Any) -> list[Row]:
    """Return the row of the fine point with some columns changed, for tables without files."""
    row: Row = {"key": OK, "status": "ok", "stages": 2, "micro": 2, "schedule": "gpipe", "chunks": 1}
    row |= {"recompute": "never", "step_s": 9.0}
    row |= {"step_ci_low_s": 8.5, "step_ci_high_s": 9.5, "samples_per_s": 2.0, "tokens_per_s": None, "speedup": 1.5}
    row |= {"bubble_fraction": 0.4, "bubble_replayed": 0.35, "bubble_bound": 1 / 3, "peak_memory_bytes": 3 * MIB}
    row |= {"activations_bytes": 1 * MIB, "activations_predicted_bytes": 0.75 * MIB}
    row |= {"activations_gpipe_bytes": None}
    row |= {f"ledger_{part}": 0.0 for part in PARTS} | {"ledger_compute_s": 6.0, "ledger_fill_and_drain_s": 3.0}
    row |= {"grad_rel_error": 1e-7, "oversubscribed": False, "steady": True, "flags": "", "message": ""}
    return [{**row, **changes}]
