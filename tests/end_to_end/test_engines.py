"""Engines beside each other in one sweep: the same training, whoever does it."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipebench.record import RunResult, read_result

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=2", "model.width=32", "model.feed_forward=64", "model.sequence=16", "batch=10", "threads=1"]
QUICK = ["steps=3", "warmup=2", "wandb.mode=disabled", "noise_floor=false", "resume=never"]

ENGINES = ("pipebench", "ddp", "fsdp")
NO_NUMBER = "\N{EN DASH}"


def sweep(folder: Path, *arguments: str) -> Path:
    """Run a sweep as a user would and return its folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipebench", "-m", *arguments, *SMALL, *QUICK]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    [results] = (folder / "results").iterdir()
    return results


def rows_of(results: Path) -> list[dict[str, str]]:
    with (results / "results.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def without_a_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDP and FSDP beside the pipeline: ragged micro-batches, with and without recompute, SGD and Adam."""
    return sweep(
        tmp_path_factory.mktemp("without"),
        f"engine={','.join(ENGINES)}",
        "stages=2",
        "micro=4",
        "recompute=never,always",
        "optimizer=sgd,adamw",
    )


def by_engine(rows: list[dict[str, str]], **settings: str) -> dict[str, dict[str, str]]:
    chosen = [row for row in rows if all(row[name] == value for name, value in settings.items())]
    return {row["engine"]: row for row in chosen}


def result_of(results: Path, row: dict[str, str]) -> RunResult:
    return read_result(results / "runs" / row["key"] / "result.json")


def test_data_parallel_engines_have_right_gradients(without_a_pipeline: Path) -> None:
    rows = rows_of(without_a_pipeline)
    assert len(rows) == 12
    for row in rows:
        assert (row["status"], row["message"]) == ("ok", "")
        assert float(row["grad_rel_error"]) < 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_they_train_as_the_pipeline_does(without_a_pipeline: Path, optimizer: str) -> None:
    rows = by_engine(rows_of(without_a_pipeline), optimizer=optimizer, recompute="never")
    losses = {
        engine: [record.losses for record in result_of(without_a_pipeline, row).repeats[0].ranks]
        for engine, row in rows.items()
    }
    for found, other in losses.values():
        assert found[:5] == pytest.approx(losses["pipebench"][0][:5], rel=1e-5)
        assert found[0] > found[4] > 0
        assert not other


def test_what_has_no_pipeline_has_no_bubble_and_no_rows(without_a_pipeline: Path) -> None:
    for engine, row in by_engine(rows_of(without_a_pipeline), optimizer="sgd", recompute="always").items():
        measured = result_of(without_a_pipeline, row)
        empty = engine != "pipebench"
        assert (measured.rows == []) is empty
        for column in ("bubble_fraction", "bubble_replayed", "bubble_bound", "ledger_compute_s"):
            assert (row[column] == "") is empty


def test_their_ranks_hold_all_weights_or_a_share_of_each(without_a_pipeline: Path) -> None:
    for recompute in ("never", "always"):
        rows = by_engine(rows_of(without_a_pipeline), optimizer="adamw", recompute=recompute)
        memory = {
            engine: [record.memory for record in result_of(without_a_pipeline, row).repeats[0].ranks]
            for engine, row in rows.items()
        }
        whole = sum(stage.parameters_bytes for stage in memory["pipebench"])
        for rank in range(2):
            assert memory["ddp"][rank].parameters_bytes == whole
            assert memory["ddp"][rank].gradients_bytes == whole
            assert memory["ddp"][rank].optimizer_bytes >= 2 * whole
            assert memory["fsdp"][rank].parameters_bytes == pytest.approx(whole / 2, rel=0.01)
            assert memory["fsdp"][rank].optimizer_bytes == pytest.approx(whole, rel=0.01)


def test_they_send_weights_and_gradients_instead_of_activations(without_a_pipeline: Path) -> None:
    """Two ranks, two micro-batches each: DDP's ring passes every gradient twice, half of them by each rank.

    FSDP gathers twice and reduces once for each micro-batch, and gloo reduces by an all-reduce.
    """
    rows = by_engine(rows_of(without_a_pipeline), optimizer="sgd", recompute="never")
    ranks = result_of(without_a_pipeline, rows["pipebench"]).repeats[0].ranks
    whole = sum(record.memory.parameters_bytes for record in ranks)
    assert int(rows["ddp"]["sent_bytes"]) == 2 * whole
    assert int(rows["fsdp"]["sent_bytes"]) == 2 * 2 * (2 + 2) * whole / 2
    assert int(rows["pipebench"]["sent_bytes"]) == 2 * 10 * 16 * 32 * 4


def test_a_report_shows_them_with_dashes(without_a_pipeline: Path) -> None:
    text = (without_a_pipeline / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| 2 ") and "| ok" in line]
    num_dashes = {engine: {line.count(NO_NUMBER) for line in table if f"| {engine} " in line} for engine in ENGINES}
    assert num_dashes == {"pipebench": {0}, "ddp": {3}, "fsdp": {3}}
    assert (without_a_pipeline / "report.html").exists()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks and five ragged micro-batches, so that two ranks have two of them and one has one."""
    folder = tmp_path_factory.mktemp("uneven")
    return sweep(folder, "engine=ddp,single", "stages=3,1", "micro=5", "recompute=except_last")


def test_ranks_with_uneven_shares_and_one_process_have_right_gradients(uneven: Path) -> None:
    rows = rows_of(uneven)
    assert [(row["engine"], row["stages"], row["status"]) for row in rows] == [
        ("ddp", "3", "ok"),
        ("ddp", "1", "ok"),
        ("single", "3", "skipped"),
        ("single", "1", "ok"),
    ]
    ran = [row for row in rows if row["status"] == "ok"]
    for row in ran:
        assert float(row["grad_rel_error"]) < 1e-5
        assert float(row["loss_last"]) == pytest.approx(float(ran[0]["loss_last"]), rel=1e-5)


def test_one_process_sends_nothing_and_tells_where_its_time_went(uneven: Path) -> None:
    row = by_engine(rows_of(uneven), stages="1")["single"]
    assert row["sent_bytes"] == "0"
    assert float(row["bubble_bound"]) == 0
    assert 0 <= float(row["bubble_fraction"]) < 1
    assert float(row["ledger_compute_s"]) > 0
