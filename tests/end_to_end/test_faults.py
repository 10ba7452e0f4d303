"""A point that goes wrong is a row that says so, and the sweep goes on."""

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipebench.cli import main
from pipebench.compose import compose_grid
from pipebench.config import key_of, resolve
from pipebench.errors import PointError
from pipebench.harness import sweep as harness
from pipebench.harness.jobs import MEASURE_RANK, RankJob
from pipebench.harness.launch import run_group
from pipebench.harness.sweep import Observer, plan_sweep, run_sweep
from pipebench.machine import Machine
from pipebench.record import RunResult
from pipebench.report.sweep import read_sweep
from pipebench.rows import row_of

ARGUMENTS = (
    "-m", "stages=2", "micro=1,2", "model.layers=1", "model.width=16", "model.feed_forward=32", "model.sequence=8",
    "batch=4", "steps=2", "warmup=1", "partition=uniform",
)  # fmt: skip


def run_with(worker: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[int, RunResult]:
    """Run a two-point sweep with another worker function; return the results by M, the reference left out."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(harness, "MEASURE_RANK", f"broken_worker:{worker}")
    grid = compose_grid(ARGUMENTS)
    assert grid is not None
    plan = plan_sweep([resolve(point, Machine(2, 0)) for point in grid.points], grid.swept, "faults")
    folder.mkdir()
    results = run_sweep(plan, folder, Observer(*[lambda *_: None] * 5))
    assert [row["status"] for row in read_sweep(folder).rows] == [results[key].status for key in plan.points]
    return {config.micro: results[key] for key, config in plan.points.items()}


def test_slightly_wrong_gradients_make_a_point_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for result in run_with("scaled_gradient", monkeypatch, tmp_path / "sweep").values():
        assert result.status == "wrong"
        row = row_of(result, result)
        assert row["grad_rel_error"] == pytest.approx(1e-3, rel=1e-3)
        assert row["speedup"] is None


def test_a_raising_stage_is_named_with_rank_and_action(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run_with("raising_layer", monkeypatch, tmp_path / "sweep")
    assert {micro: result.status for micro, result in results.items()} == {1: "error", 2: "error"}
    for result in results.values():
        assert result.message == "rank 1 failed at 1F0: division by zero"


def test_a_dying_rank_ends_its_point_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = time.monotonic()
    results = run_with("dying_rank", monkeypatch, tmp_path / "sweep")
    assert time.monotonic() - began < 60
    for result in results.values():
        assert result.status == "error"
        assert "rank 1" in result.message
        assert "exit code 7" in result.message
    workers = [process for process in psutil.Process().children(recursive=True) if process.status() != "zombie"]
    assert len([process for process in workers if "forkserver" in " ".join(process.cmdline())]) <= 1


def fail_the_second_time(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a point is measured that was measured before."""
    measured = set()

    def run_once(function: str, jobs: list[RankJob], *rest: Any) -> Any:
        key = key_of(jobs[0].config)
        if function == MEASURE_RANK and key in measured:
            raise error
        measured.update([key] if function == MEASURE_RANK else [])
        return run_group(function, jobs, *rest)

    monkeypatch.setattr(harness, "run_group", run_once)


def test_a_second_look_that_fails_is_one_warning_and_costs_no_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_the_second_time(PointError("gone the second time"), monkeypatch)
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled"]) == 0
    told = capsys.readouterr()
    [line] = [line for line in told.out.splitlines() if "gone the second time" in line]
    assert line == "[4/4] stages=2 micro=1 again, for the noise floor error  gone the second time"
    [folder] = tmp_path.iterdir()
    assert [row["status"] for row in read_sweep(folder).rows] == ["ok", "ok"]
    assert "K=2, M=1 measured twice, error: gone the second time." in (folder / "report.md").read_text()


def test_a_sweep_that_is_interrupted_in_its_second_look_says_so_and_has_its_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_the_second_time(KeyboardInterrupt(), monkeypatch)
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled"]) == 130
    [folder] = tmp_path.iterdir()
    assert [row["status"] for row in read_sweep(folder).rows] == ["ok", "ok"]
    assert "**Noise floor.** Not measured." in (folder / "report.md").read_text()
