"""Before the first process: what a sweep would run, said and not done; and what does not fit is not run."""

from pathlib import Path
from typing import Any

import pytest

from pipebench import machine
from pipebench.cli import main
from pipebench.harness import sweep
from pipebench.harness.jobs import WEIGH_MODEL
from pipebench.harness.launch import run_group
from pipebench.machine import Capacity
from pipebench.report.sweep import read_sweep

SMALL = ("model=mlp", "model.layers=4", "model.width=64", "batch=8", "steps=2", "warmup=1", "wandb.mode=disabled")


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights, not for activations too."""
    monkeypatch.setattr(machine, "capacity", lambda: Capacity(358_000, []))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    told = capsys.readouterr()
    assert told.err == ""
    return told.out.splitlines()


def test_a_dry_run_prints_every_point_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "dry_run=true", "stages=1,2", "micro=2,4", *SMALL]) == 0
    lines = lines_of(capsys)
    points = [line.split() for line in lines[2:6]]
    assert all(float(line[-2]) > 0 and float(line[-1]) > 0 for line in points), "milliseconds of a step, seconds of all"
    assert [line[:2] for line in points] == [["1", "2"], ["1", "4"], ["2", "2"], ["2", "4"]]
    assert "4 points and 2 references, 0 of them without a result" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_foretells_what_the_model_of_memory_says_of_a_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["stages=2", "micro=2", "partition=uniform", f"results_dir={tmp_path}", *SMALL]
    assert main(arguments) == 0
    capsys.readouterr()
    [folder] = tmp_path.iterdir()
    [result] = read_sweep(folder).results.values()
    profile = folder / "runs" / result.key / "result.json"
    assert main([*arguments, "dry_run=true", f"profile={profile}"]) == 0
    line = lines_of(capsys)[2].split()
    for told, record in zip(line[4:6], result.repeats[0].ranks, strict=True):
        assert float(told) == pytest.approx(record.memory.peak_bytes / 2**20, rel=0.25)
    assert float(line[6]) > 0


@pytest.mark.parametrize("arguments", [["dry_run=true"], []], ids=["dry", "real"])
def test_a_model_whose_weights_do_not_fit_is_skipped_before_any_of_it_is_built(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terabytes; a profile would ask for them, and on a smaller machine take all there is first."""
    begun: list[str] = []

    def run_and_note(function: str, *rest: Any) -> Any:
        begun.append(function)
        return run_group(function, *rest)

    monkeypatch.setattr(sweep, "run_group", run_and_note)
    huge = ["model.width=65536", "model.feed_forward=262144", "stages=2", "micro=2", f"results_dir={tmp_path}"]
    assert main([*huge, "wandb.mode=disabled", *arguments]) == (0 if arguments else 1)
    assert begun == [WEIGH_MODEL]
    lines = lines_of(capsys)
    assert any(
        "skipped" in line and "for weights, gradients and optimizer alone, need at least" in line for line in lines
    )


def test_a_dry_run_says_what_will_be_skipped_and_why(no_memory: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry_run=true", "stages=2", "micro=2", *SMALL]) == 0
    lines = lines_of(capsys)
    assert "skipped: all ranks need at least" in lines[2]
    assert "2 of them without a result" in lines[-1]


@pytest.mark.parametrize("profile", ["nowhere.json", "nowhere.yaml"])
def test_a_profile_that_cannot_be_read_is_one_line(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry_run=true", f"profile={profile}", *SMALL]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"ConfigError: profile={profile}: cannot be read")


def test_what_cannot_fit_is_a_row_with_the_reason_unless_it_is_forced(
    no_memory: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["stages=2", "micro=2", f"results_dir={tmp_path}", *SMALL]
    assert main(arguments) == 1
    [folder] = tmp_path.iterdir()
    [row] = read_sweep(folder).rows
    assert row["status"] == "skipped"
    assert row["message"].startswith("all ranks need at least ")
    assert row["message"].endswith("(force=true runs it)")
    assert "**skipped** K=2, M=2: all ranks need at least" in (folder / "report.md").read_text()

    assert main([*arguments, "force=true"]) == 0
    [forced] = [read_sweep(other).rows for other in tmp_path.iterdir() if other != folder]
    assert [row["status"] for row in forced] == ["ok"]
