"""Which lines trackers draw, and what they call them: rows in, names and numbers out."""

import dataclasses
from typing import Any

import pytest
from tracked import a_failure, a_result, rows_of

from pipebench.rows import Row
from pipebench.tracking.curves import run_name, samples_of, series_of


def a_row(**changes: Any) -> Row:
    [row] = rows_of([a_result("aaa")])
    return {**row, **changes}


def lines(rows: list[Row], chart: str) -> dict[str, dict[int, float]]:
    return {series.name: series.values for series in series_of(rows) if series.chart == chart}


def test_each_k_is_a_line_over_rising_m() -> None:
    rows = [a_row(stages=k, micro=m, samples_per_s=float(10 * k + m)) for k in (4, 2) for m in (16, 4)]

    assert lines(rows, "samples_per_s") == {"K=2": {4: 24.0, 16: 36.0}, "K=4": {4: 44.0, 16: 56.0}}
    assert [list(values) for values in lines(rows, "samples_per_s").values()] == [[4, 16], [4, 16]]


def test_measured_replayed_and_bound_are_lines_of_one_chart() -> None:
    row = a_row(micro=8, bubble_fraction=0.3, bubble_replayed=0.2, bubble_bound=0.1)

    assert lines([row], "bubble") == {"K=2 measured": {8: 0.3}, "K=2 replayed": {8: 0.2}, "K=2 bound": {8: 0.1}}


def test_simulated_points_are_not_called_measured() -> None:
    row = a_row(status="simulated", simulated=True)

    assert list(lines([row], "bubble")) == ["K=2 simulated", "K=2 replayed", "K=2 bound"]


def test_whatever_else_varies_is_in_the_name() -> None:
    rows = [
        a_row(schedule=schedule, recompute=recompute)
        for schedule in ("gpipe", "1f1b")
        for recompute in ("never", "always")
    ]

    assert list(lines(rows, "peak_memory_mib")) == [
        "K=2, schedule=gpipe, recompute=never",
        "K=2, schedule=gpipe, recompute=always",
        "K=2, schedule=1f1b, recompute=never",
        "K=2, schedule=1f1b, recompute=always",
    ]


@pytest.mark.parametrize("status", ["wrong", "error", "pending"])
def test_points_without_a_result_are_in_no_line(status: str) -> None:
    rows = [a_row(micro=4), a_row(micro=8, status=status)]

    assert {micro for series in series_of(rows) for micro in series.values} == {4}


def test_what_is_not_known_is_no_line() -> None:
    rows = [a_row(micro=4, bubble_bound=None), a_row(micro=8, bubble_bound=None, bubble_fraction=None)]

    assert list(lines(rows, "bubble")) == ["K=2 measured", "K=2 replayed"]
    assert list(lines(rows, "bubble")["K=2 measured"]) == [4]
    assert lines(rows, "speedup") == {}
    assert series_of([]) == []


def test_memory_is_in_mebibytes() -> None:
    assert lines([a_row(micro=1, peak_memory_bytes=3 * 2**20)], "peak_memory_mib") == {"K=2": {1: 3.0}}


def test_a_run_is_named_by_what_is_not_usual() -> None:
    assert run_name(a_row(micro=8)) == "K=2 M=8 gpipe mlp optimizer.lr=0.1"
    assert run_name(a_row(schedule="interleaved", chunks=3, recompute="always")) == (
        "K=2 M=2 interleaved mlp chunks=3 recompute=always optimizer.lr=0.1"
    )


def test_every_step_of_every_group_is_a_sample() -> None:
    samples = samples_of(a_result("aaa"))

    assert [step.training_step for step in samples] == [1, 2, 3, 4, 5] * 2
    assert [step.values.get("loss") for step in samples[:4]] == [2.0, 1.5, 1.25, 1.0]
    assert [step.values.get("step_s_repeat_2") for step in samples] == [None] * 7 + [0.5, 0.6, 0.7]
    assert samples_of(a_failure("bbb")) == []


def test_without_losses_the_timed_steps_are_the_samples() -> None:
    result = a_result("aaa")
    ranks = [dataclasses.replace(record, losses=[]) for record in result.repeats[0].ranks]
    silent = dataclasses.replace(result, repeats=[dataclasses.replace(result.repeats[0], ranks=ranks)])

    assert [(step.training_step, step.values["step_s"]) for step in samples_of(silent)] == [
        (1, 0.5),
        (2, 0.6),
        (3, 0.7),
    ]
