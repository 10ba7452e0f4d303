"""Points of engines that have no pipeline: no rows, no spans, and a report that says so with dashes."""

import dataclasses
from pathlib import Path

import pytest
from hand_made import OK, REFERENCE, WRONG, config, csv_rows, one_device, result, write_sweep

from pipebench.record import RunResult
from pipebench.report.sweep import read_sweep
from pipebench.report.write import write_report
from pipebench.rows import median_step, predicted_activation_bytes, row_of, stage_rows

NO_NUMBER = "\N{EN DASH}"


def without_rows(key: str, engine: str) -> RunResult:
    """Return a two-rank point that took 9 s a step and tells nothing else about its time."""
    pipeline = result(key, config(engine=engine))
    [repeat] = pipeline.repeats
    ranks = [dataclasses.replace(record, spans=[], transfer_s=[], latency_s=[]) for record in repeat.ranks]
    return dataclasses.replace(pipeline, rows=[], repeats=[dataclasses.replace(repeat, ranks=ranks)])


def test_what_needs_rows_is_not_known() -> None:
    measured = without_rows(OK, "ddp")
    row = row_of(measured, one_device(REFERENCE))
    assert (row["step_s"], row["speedup"]) == (9.0, 12.0 / 9.0)
    for column in ("bubble_fraction", "bubble_replayed", "bubble_bound", "imbalance", "ledger_compute_s"):
        assert row[column] is None
    assert stage_rows(measured) == []
    assert median_step(measured) is None
    assert predicted_activation_bytes(measured) is None


@pytest.mark.parametrize(
    ("engines", "num_dashes"),
    [(("ddp",), [0]), (("fsdp", "ddp"), [0, 0]), (("pipebench", "fsdp"), [0, 3])],
    ids=["ddp", "fsdp and ddp", "pipebench and fsdp"],
)
def test_a_report_has_their_speed_and_dashes_beside_the_bubbles_of_others(
    tmp_path: Path, engines: tuple[str, ...], num_dashes: list[int]
) -> None:
    points = {key: config(engine=engine) for key, engine in zip((OK, WRONG), engines, strict=False)}
    results = [
        result(key, point) if point.engine == "pipebench" else without_rows(key, point.engine)
        for key, point in points.items()
    ]
    write_sweep(tmp_path, points, [*results, one_device(REFERENCE)], ["engine"])
    written = {path.name for path in write_report(read_sweep(tmp_path))}
    assert {"report.md", "report.html", "results.csv"} <= written
    assert ("ledger.png" in written) is ("pipebench" in engines)
    assert [row["step_s"] for row in csv_rows(tmp_path)] == ["9.0"] * len(engines)
    lines = (tmp_path / "report.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| 2 ") and "| ok " in line]
    assert [line.count(NO_NUMBER) for line in table] == num_dashes
