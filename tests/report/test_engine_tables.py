"""Engines side by side: ratios worked out by hand, reasons in the place of results, and no two engines mixed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hand_made import MIB, config, result, table_rows, timed, write_sweep

from pipebench.config import key_of
from pipebench.grid import groups
from pipebench.record import RunResult, StageMemory
from pipebench.report.cells import NOTHING
from pipebench.report.content import content_of
from pipebench.report.engines import EngineSet, engine_sets
from pipebench.report.figures.lines import throughput_picture
from pipebench.report.glance import at_a_glance
from pipebench.report.sweep import Sweep, read_sweep
from pipebench.report.terminal import print_engines
from pipebench.report.write import write_report
from pipebench.rows import Row

ROUNDS = 3
SWEPT = ["engine", "schedule", "micro"]


def took(step_s: float, drift: float = 0.1, **changes: Any) -> RunResult:
    """Return a point that took these seconds a step in the first round, and by `drift` more in each later one."""
    point = config(repeats=ROUNDS, **changes)
    return timed(key_of(point), point, [[step_s * (1 + drift * number)] * 4 for number in range(ROUNDS)])


def whole_model(point: RunResult, sent_bytes: int | None = 5 * MIB) -> RunResult:
    """Return the point as an engine leaves it that follows no rows and records no spans."""
    memory = StageMemory(8 * MIB, 0, 0, 0, 0, 0)

    def without_rows(record: Any) -> Any:
        return dataclasses.replace(record, spans=[], memory=memory, sent_bytes=sent_bytes, transfer_s=[], latency_s=[])

    repeats = [
        dataclasses.replace(repeat, ranks=[without_rows(record) for record in repeat.ranks]) for repeat in point.repeats
    ]
    return dataclasses.replace(point, rows=[], repeats=repeats)


def without_result(status: str, message: str, **changes: Any) -> RunResult:
    point = config(repeats=ROUNDS, **changes)
    return result(key_of(point), point, status=status, message=message, repeats=[], rows=[])


def swept(folder: Path, *results: RunResult) -> Sweep:
    write_sweep(folder, {each.key: each.config for each in results}, list(results), SWEPT)
    return read_sweep(folder)


def sets(folder: Path, *results: RunResult) -> list[EngineSet]:
    return engine_sets(swept(folder, *results))


def lines(found: EngineSet) -> list[dict[str, str]]:
    texts = [[cell.text for cell in line] for line in found.table.lines]
    return [dict(zip(found.table.header, line, strict=True)) for line in texts]


def test_an_engine_is_judged_against_the_built_in_one_with_the_same_schedule(tmp_path: Path) -> None:
    [found] = sets(
        tmp_path,
        took(9.0),
        took(6.0, schedule="1f1b"),
        took(9.9, engine="torch"),
        took(9.0, engine="torch", schedule="1f1b"),
    )
    assert found.table.title == "Engines, K=2, M=2"
    by_name = {(line["engine"], line["schedule"]): line for line in lines(found)}
    assert by_name["torch", "gpipe"]["over that [95 %]"] == "1.100 [1.100, 1.100]"
    assert by_name["torch", "1f1b"]["over that [95 %]"] == "1.500 [1.500, 1.500]"
    assert by_name["torch", "1f1b"]["against"] == "1f1b"
    assert by_name["torch", "1f1b"]["it is"] == "slower"
    assert by_name["pipebench", "1f1b"]["against"] == by_name["pipebench", "1f1b"]["over that [95 %]"] == NOTHING


def test_the_best_of_each_engine_is_compared_with_the_best_of_the_built_in_one_in_words(tmp_path: Path) -> None:
    [found] = sets(
        tmp_path,
        took(9.0),
        took(6.0, schedule="1f1b"),
        took(7.5, engine="torch"),
        took(9.0, engine="torch", schedule="1f1b"),
        without_result("skipped", "deepspeed is not installed", engine="deepspeed", schedule="1f1b"),
    )
    assert found.words == (
        "K=2, M=2: the built-in engine is fastest with 1f1b, 6600 ms a step; over that, at its best: "
        "torch with gpipe 1.250 (95 %: 1.250 to 1.250), slower; deepspeed no result (skipped)."
    )


def test_ratios_are_of_the_rounds_that_both_have(tmp_path: Path) -> None:
    stopped = took(9.9, engine="torch")
    stopped = dataclasses.replace(stopped, repeats=stopped.repeats[:2])
    [found] = sets(tmp_path, took(9.0), stopped)
    assert [line["over that [95 %]"] for line in lines(found)] == [NOTHING, "1.100 [1.100, 1.100]"]


@pytest.mark.parametrize(("second_s", "word"), [(9.0 * 1.02, "same"), (9.0 * 1.2, "slower"), (9.0 / 1.2, "faster")])
def test_a_difference_counts_when_it_exceeds_the_noise_floor(tmp_path: Path, second_s: float, word: str) -> None:
    own, other = took(9.0, drift=0), took(second_s, drift=0, engine="torch")
    again = took(9.0 * 1.05, drift=0)
    write_sweep(tmp_path, {each.key: each.config for each in (own, other)}, [own, other], SWEPT, again)
    [found] = engine_sets(read_sweep(tmp_path))
    [line] = [line for line in lines(found) if line["engine"] == "torch"]
    assert line["it is"] == word


def test_skipped_and_wrong_points_stand_last_with_their_reasons(tmp_path: Path) -> None:
    wrong = dataclasses.replace(took(1.0, engine="torch"), status="wrong", message="gradient error 0.5")
    skipped = without_result("skipped", "torchgpipe has no 1f1b", engine="torchgpipe", schedule="1f1b")
    sweep = swept(tmp_path, wrong, skipped, took(9.0))
    [found] = engine_sets(sweep)
    status = {line["engine"]: line["status"] for line in lines(found)}
    assert next(iter(status)) == "pipebench"
    assert status["torch"] == "wrong: gradient error 0.5"
    assert status["torchgpipe"] == "skipped: torchgpipe has no 1f1b"
    assert all(line["over that [95 %]"] == NOTHING for line in lines(found)), "a wrong point is fast at nothing"
    write_report(sweep, ["md", "html", "latex", "csv"])
    for name in ("report.md", "report.html", "tables/engines-1.tex", "tables/engines-1.csv"):
        text = (tmp_path / name).read_text()
        assert "torchgpipe has no 1f1b" in text, name
        assert "gradient error 0.5" in text, name


def test_the_terminal_shows_every_number_of_the_tables_however_narrow_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    skipped = without_result("skipped", "torchgpipe has no 1f1b", engine="torchgpipe", schedule="1f1b")
    print_engines(sets(tmp_path, took(9.0), took(9.9, engine="torch"), skipped))
    printed = capsys.readouterr().out
    assert printed.startswith("Engines, K=2, M=2\n")
    assert "1.100 [1.100, 1.100]" in printed
    assert "skipped: torchgpipe has no 1f1b" in printed


def test_an_engine_without_a_pipeline_is_judged_against_gpipe_and_has_dashes_for_what_it_cannot_tell(
    tmp_path: Path,
) -> None:
    ddp, unknown = whole_model(took(4.5, engine="ddp")), whole_model(took(18.0, engine="fsdp"), sent_bytes=None)
    [found] = sets(tmp_path, took(9.0), took(6.0, schedule="1f1b"), ddp, unknown)
    first, *_, last = lines(found)
    assert (first["engine"], first["schedule"], first["against"]) == ("ddp", NOTHING, "gpipe")
    assert first["over that [95 %]"].startswith("0.500")
    assert first["it is"] == "faster"
    assert first["bubble: measured / replayed / bound"] == NOTHING
    assert (first["peak MiB of a rank"], first["of all ranks"], first["sent MiB"]) == ("8.00", "16.0", "10.0")
    assert (last["engine"], last["sent MiB"]) == ("fsdp", NOTHING)
    assert "ddp 0.750 (95 %: 0.750 to 0.750), faster" in found.words


def test_without_gpipe_an_engine_without_a_pipeline_is_judged_against_the_best(tmp_path: Path) -> None:
    [found] = sets(tmp_path, took(9.0, schedule="naive"), took(6.0, schedule="1f1b"), took(9.0, engine="ddp"))
    assert {line["engine"]: line["against"] for line in lines(found)}["ddp"] == "1f1b"


def test_one_process_stands_beside_each_number_of_ranks(tmp_path: Path) -> None:
    alone = whole_model(took(18.0, engine="single", stages=1))
    two, four = sets(tmp_path, took(9.0), took(6.0, stages=4), alone)
    assert [found.table.title for found in (two, four)] == ["Engines, K=2, M=2", "Engines, K=4, M=2"]
    assert [(line["engine"], line["K"]) for line in lines(two)] == [("pipebench", "2"), ("single", "1")]
    assert [line["over that [95 %]"] for line in lines(four)] == [NOTHING, "3.000 [3.000, 3.000]"]


def test_every_set_of_points_that_train_the_same_has_a_table(tmp_path: Path) -> None:
    found = sets(
        tmp_path,
        *(took(9.0, engine=engine, micro=micro) for engine in ("pipebench", "torch") for micro in (2, 4)),
    )
    assert [each.table.name for each in found] == ["engines-1", "engines-2"]
    assert [each.table.title for each in found] == ["Engines, K=2, M=2", "Engines, K=2, M=4"]


def test_another_cut_of_the_model_is_another_point_of_the_same_table(tmp_path: Path) -> None:
    [found] = sets(tmp_path, took(9.0, partition=[1, 1]), took(6.0), took(9.0, engine="torch", partition=[1, 1]))
    torch = lines(found)[-1]
    assert (torch["engine"], torch["partition"], torch["over that [95 %]"]) == (
        "torch",
        "[1,1]",
        "1.000 [1.000, 1.000]",
    )
    [alone] = sets(tmp_path, took(6.0), took(9.0, engine="torch", partition=[1, 1]))
    assert lines(alone)[-1]["over that [95 %]"] == NOTHING, "nothing of the same cut"


def test_one_engine_and_the_simulator_have_no_such_table(tmp_path: Path) -> None:
    simulated = dataclasses.replace(took(8.0, engine="simulate"), status="simulated")
    assert sets(tmp_path, took(9.0), took(8.0, schedule="1f1b"), simulated) == []
    assert "Engines side by side" not in "".join(
        path.read_text() for path in write_report(read_sweep(tmp_path), ["md", "html"])
    )


def test_a_built_in_engine_without_a_result_leaves_nothing_to_compare_with(tmp_path: Path) -> None:
    [found] = sets(tmp_path, without_result("oom", "too much"), took(9.0, engine="torch"))
    assert found.words == "K=2, M=2: the built-in engine has no result to compare with."


def of_engine(engine: str, **changes: Any) -> Row:
    """Return a row made by hand with its engine where axes stand: between status and step time."""
    [row] = table_rows(**changes)
    return {"key": row["key"], "status": row["status"], "engine": engine, **row}


def test_answers_name_the_engine() -> None:
    rows = [of_engine("pipebench"), of_engine("torch", key="b" * 12, samples_per_s=4.5)]
    fastest = at_a_glance(rows)[0]
    assert "engine=torch" in fastest.because


def test_no_line_of_a_picture_goes_through_points_of_two_engines() -> None:
    points = [(engine, micro) for engine in ("pipebench", "torch") for micro in (2, 4)]
    rows = [of_engine(engine, micro=micro, key=f"{number:012d}") for number, (engine, micro) in enumerate(points)]
    assert {len({row["engine"] for row in members}) for members in groups(rows).values()} == {1}
    picture = throughput_picture(rows)
    assert picture is not None
    assert "engine=pipebench; K=2, M=2 to 4" in picture.alternative
    assert "engine=torch; K=2, M=2 to 4" in picture.alternative


def test_what_the_simulator_expects_is_told_of_the_built_in_engine_alone(tmp_path: Path) -> None:
    content = content_of(swept(tmp_path, took(9.0), took(9.5, engine="torch")))
    own, torch = content.points
    assert own.lost
    assert "expected" not in torch.lost
