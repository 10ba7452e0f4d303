"""DeepSpeed beside the built-in engine, from outside; skipped where it is not installed."""

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipebench.record import RunResult, read_result
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.catalogue import build

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=2", "model.width=32", "model.feed_forward=64", "model.sequence=16", "batch=8", "threads=1"]
QUICK = ["steps=3", "warmup=2", "wandb.mode=disabled", "noise_floor=false", "resume=never"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages and three, more and fewer micro-batches than stages, tokens recomputed and not."""
    folder = tmp_path_factory.mktemp("deepspeed")
    arguments = ["engine=pipebench,deepspeed", "schedule=1f1b", "stages=2,3", "micro=2,8", "recompute=never,always"]
    # No compiler may be needed: nothing is on the path.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(folder)}
    command = [sys.executable, "-m", "pipebench", "-m", *arguments, *SMALL, *QUICK]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DeepSpeed" not in done.stdout + done.stderr
    [found] = (folder / "results").iterdir()
    return found


def rows_of(results: Path, engine: str) -> list[dict[str, str]]:
    with (results / "results.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["engine"] == engine]


def result_of(results: Path, row: dict[str, str]) -> RunResult:
    return read_result(results / "runs" / row["key"] / "result.json")


def test_its_gradients_are_right(results: Path) -> None:
    rows = rows_of(results, "deepspeed")
    assert len(rows) == 8
    for row in rows:
        assert (row["status"], row["message"]) == ("ok", "")
        assert float(row["grad_rel_error"]) < 1e-5


def test_it_trains_as_the_built_in_engine_does(results: Path) -> None:
    """Equal gradients are not enough: by default it clips them before its optimizer's step."""
    for theirs, ours in zip(rows_of(results, "deepspeed"), rows_of(results, "pipebench"), strict=True):
        losses = [[record.losses for record in result_of(results, row).repeats[0].ranks] for row in (theirs, ours)]
        assert all(rank == [] for engine in losses for rank in engine[1:])
        assert losses[0][0][:5] == pytest.approx(losses[1][0][:5], rel=1e-5)


def test_its_spans_are_those_of_our_1f1b_and_its_bubble_stands_beside_ours(results: Path) -> None:
    for row in rows_of(results, "deepspeed"):
        result = result_of(results, row)
        asked_for = with_optimizer(build("1f1b", int(row["stages"]), int(row["micro"])))
        assert result.rows == [[str(action) for action in each] for each in asked_for.rows]
        assert 0 < float(row["bubble_fraction"]) < 1
        assert 0 < float(row["bubble_replayed"]) < 1


def test_both_send_the_same_bytes_and_their_memory_is_of_one_order(results: Path) -> None:
    for theirs, ours in zip(rows_of(results, "deepspeed"), rows_of(results, "pipebench"), strict=True):
        assert theirs["sent_bytes"] == ours["sent_bytes"]
        assert 0.5 < int(theirs["peak_memory_bytes"]) / int(ours["peak_memory_bytes"]) < 2
