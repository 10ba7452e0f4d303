"""What `make perf` and `make levers` measure beside sweeps, in real processes."""

import inspect
from pathlib import Path

import pytest

from pipebench.harness import levers
from pipebench.harness.jobs import MEASURE_SPAN_COST
from pipebench.perf import ablation
from pipebench.perf.targets import point_of, run_alone
from pipebench.record import RankRecord
from pipebench.schedule.action import Row

SMALL = ["model=mlp", "model.layers=4", "model.width=32", "batch=8", "micro=4", "partition=uniform", "stages=2"]


def test_steps_with_spans_and_steps_without_take_turns_in_one_group() -> None:
    ranks = run_alone(MEASURE_SPAN_COST, point_of(*SMALL, "steps=3", "warmup=1"))
    assert [(len(with_spans), len(without)) for with_spans, without in ranks] == [(3, 3), (3, 3)]
    assert all(0 < seconds < 10 for rank in ranks for way in rank for seconds in way)


@pytest.fixture(scope="module")
def as_it_is() -> list[tuple[RankRecord, Row]]:
    return run_alone("pipebench.harness.levers:as_it_is", point_of(*SMALL, "steps=3", "warmup=1"))


@pytest.mark.parametrize("lever", [lever for lever in ablation.LEVERS if lever != "compiled_layers"])
def test_a_lever_changes_how_a_rank_runs_and_not_what_it_computes(
    lever: str, as_it_is: list[tuple[RankRecord, Row]]
) -> None:
    changed = run_alone(f"pipebench.harness.levers:{lever}", point_of(*SMALL, "steps=3", "warmup=1"))
    for (plain, _), (other, _) in zip(as_it_is, changed, strict=True):
        assert len(other.step_s) == 3
        assert other.losses == pytest.approx(plain.losses, rel=1e-5)
        assert other.grad_rel_error is None or other.grad_rel_error < 1e-5


def test_every_lever_has_words_and_a_function() -> None:
    functions = {
        name
        for name, function in inspect.getmembers(levers, inspect.isfunction)
        if inspect.signature(function).parameters.keys() == {"job", "report"} and function.__module__ == levers.__name__
    }
    assert functions == {"as_it_is", *ablation.LEVERS}


def test_the_table_of_levers_is_written_and_says_what_it_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "two_points", lambda *more: {"small": point_of(*SMALL, *more)})
    assert ablation.main(["any_core", "--repeats", "2", "--steps", "3", "--results-dir", str(tmp_path)]) == 0
    [written] = tmp_path.glob("*/levers.md")
    text = written.read_text()
    assert text in capsys.readouterr().out
    assert "ranks not bound to cores" in text
    assert "over the engine's as it is" in text


def test_a_lever_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ablation.main(["warp"])
    assert "warp: expected some of sockets," in capsys.readouterr().err
