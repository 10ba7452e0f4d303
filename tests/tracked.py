"""Results as a sweep would hand them to trackers, and what `wandb leet` reads back from the runs written."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from pipebench.config import MlpConfig, OptimizerConfig, RunConfig, TeacherConfig, WandbConfig
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory
from pipebench.rows import Row, row_of, stage_rows
from pipebench.tracking import Trackers, make_trackers
from pipebench.tracking.wandb_runs import run_id

WANDB = str(Path(sys.executable).with_name("wandb"))
FAKE_SECRET = "a-secret-that-must-not-be-written"
HOST_NAME = "a-host-name-that-must-not-be-written"
WARMUP_STEPS, TIMED_STEPS = 2, 3


def a_config(micro: int = 2, mode: str = "offline") -> RunConfig:
    return RunConfig(
        stages=2,
        micro=micro,
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
        batch=8,
        model=MlpConfig(name="mlp", layers=2, width=8, inputs=4, outputs=2, task="regression", dropout=0.0),
        data=TeacherConfig(name="teacher"),
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        precision="fp32",
        device="cpu",
        threads=1,
        warmup=WARMUP_STEPS,
        steps=TIMED_STEPS,
        repeats=2,
        seed=0,
        gate="on",
        results_dir="results",
        trackers=["wandb"],
        wandb=WandbConfig(mode=mode, project="pipebench", entity=None),
    )


def a_rank(rank: int, num_actions: int) -> RankRecord:
    spans = [[(0.1 * i, 0.1 * i + 0.05 + 0.01 * step, 0.0) for i in range(num_actions)] for step in range(TIMED_STEPS)]
    return RankRecord(
        rank=rank,
        warmup_step_s=[0.6] * WARMUP_STEPS,
        step_s=[0.5, 0.6, 0.7],
        steady=True,
        losses=[2.0, 1.5, 1.25, 1.0, math.nan] if rank == 1 else [],
        grad_rel_error=1e-7,
        transfer_s=[0.001 * rank],
        latency_s=[0.0],
        spans=spans,
        memory=StageMemory(100, 200, 300, 400, 0, 0),
        peak_rss_bytes=10_000,
        phases_s=dict.fromkeys(("checking gradients", "warming up", "measuring", "profiling memory"), 0.25),
    )


def a_result(key: str, micro: int = 2) -> RunResult:
    rows = [[f"{stage}{op}{i}" for op in "FB" for i in range(micro)] + [f"{stage}O"] for stage in range(2)]
    ranks = [a_rank(rank, len(row)) for rank, row in enumerate(rows)]
    return RunResult(
        key=key,
        config=a_config(micro),
        status="ok",
        message="",
        oversubscribed=False,
        environment={"python": "3.11", "cores": 2},
        layers_per_stage=[2, 2],
        rows=rows,
        profile=None,
        repeats=[Repeat(ranks, wall_s=2.0), Repeat(ranks, wall_s=2.5)],
    )


def a_failure(key: str) -> RunResult:
    failed = {"status": "error", "message": "rank 1 failed at 1F0: boom", "layers_per_stage": [], "rows": []}
    return dataclasses.replace(a_result(key), **failed, repeats=[])


def rows_of(results: Sequence[RunResult]) -> list[Row]:
    """Return the rows that a sweep over a learning rate would have."""
    return [row_of(result, None, ["micro", "optimizer.lr"]) for result in results]


def log(folder: Path, results: Sequence[RunResult], told: list[str], mode: str = "offline") -> list[Row]:
    """Log points to W&B, and return their rows."""
    return log_to(make_trackers(a_config(mode=mode), folder, "my sweep", told.append), results)


def log_to(trackers: Trackers, results: Sequence[RunResult], pictures: Sequence[Path] = ()) -> list[Row]:
    """Log points, then the sweep they make, and return their rows."""
    rows = rows_of(results)
    for result, row in zip(results, rows, strict=True):
        trackers.log_point(result, row, stage_rows(result) if result.repeats else [])
    trackers.log_sweep(rows, pictures)
    trackers.finish()
    return rows


def a_picture(path: Path) -> Path:
    Image.new("RGBA", (4, 3), "red").save(path)
    return path


def run_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "wandb").glob("*run-*-*") if path.is_dir())


def inspect(run: Path, *options: str) -> str:
    command = [WANDB, "leet", "inspect", *options, "--json", str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def run_of(folder: Path, key: str) -> Path:
    """Return the folder of the run of a point, or of the sweep's own (REPORT)."""
    [run] = (folder / "wandb").glob(f"*run-*-{run_id(folder, key)}*")
    return run


def summary(run: Path) -> dict[str, Any]:
    view: dict[str, Any] = json.loads(inspect(run, "--summary"))
    return view


def history(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in inspect(run).splitlines()]
    return [line["history"]["item"] for line in lines if line["type"] == "history"]


def logged_keys(folder: Path, keys: list[str]) -> list[str]:
    """Return the keys that runs hold, read roughly: `wandb leet` takes a second for each run."""
    logs = [log.read_bytes() for run in run_folders(folder) for log in run.glob("*.wandb")]
    return sorted(key for key in keys for log in logs if f'"{key}"'.encode() in log)


def all_bytes(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
