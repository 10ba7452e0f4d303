"""Training in real processes: repeated it is the same to the last bit, and saved it goes on under another cut."""

from pathlib import Path

import pytest

from pipebench.cli import main
from pipebench.record import RunResult, evaluations, first_step, losses, read_result
from pipebench.saved import read_saved

SMALL = ["model.layers=2", "model.width=32", "model.feed_forward=64", "model.sequence=16", "batch=11", "micro=3"]
EXACT = ["warmup=0", "threads=1", "gate=off", "trackers=[]", "resume=never"]


def trained(results: Path, *arguments: str) -> RunResult:
    """Run one point and return its result; the command line is in this process, the ranks have their own."""
    assert main([*SMALL, *EXACT, f"results_dir={results}", *arguments]) == 0
    found = [read_result(path) for path in results.glob("*/runs/*/result.json")]
    [point] = [result for result in found if result.config.micro == 3]
    return point


def save_of(results: Path) -> Path:
    [path] = results.glob("*/runs/*/saved")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunResult:
    return trained(folder / "whole", "stages=2", "steps=6", "evaluate_every=4", "evaluate_batch=40")


@pytest.fixture(scope="module")
def half(folder: Path) -> RunResult:
    return trained(folder / "half", "stages=2", "steps=3", "save=true")


def test_the_same_command_twice_gives_bit_equal_losses_and_weights(folder: Path, half: RunResult) -> None:
    again = trained(folder / "again", "stages=2", "steps=3", "save=true")
    assert losses(again.repeats[0]) == losses(half.repeats[0])
    assert read_saved(save_of(folder / "again")).layers == read_saved(save_of(folder / "half")).layers


def test_training_goes_on_with_other_stages_schedule_partition_and_recompute(
    folder: Path, whole: RunResult, half: RunResult
) -> None:
    rest = trained(
        folder / "rest",
        *("stages=3", "schedule=1f1b", "recompute=always", "partition=[1,2,3]", "steps=3"),
        *("evaluate_every=4", "evaluate_batch=40", f"load={save_of(folder / 'half')}"),
    )
    assert first_step(rest.repeats[0]) == 3
    joined = [*losses(half.repeats[0]), *losses(rest.repeats[0])]
    assert joined == pytest.approx(losses(whole.repeats[0]), rel=1e-6)
    found, expected = evaluations(rest.repeats[0]), evaluations(whole.repeats[0])
    assert [each.step for each in found] == [each.step for each in expected] == [4, 6]
    assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=1e-6)
    assert [set(each.metrics) for each in found] == [{"accuracy"}, {"accuracy"}]


def test_evaluations_leave_training_as_it_was(whole: RunResult, half: RunResult) -> None:
    assert losses(whole.repeats[0])[:3] == losses(half.repeats[0])
