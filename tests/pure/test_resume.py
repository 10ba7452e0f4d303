"""Which sweep goes on and which of its points stay: decided by files alone, so hand-made results will do."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from pipebench import machine
from pipebench.compose import compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.errors import ConfigError, ResultError
from pipebench.harness.resume import Work, take_folder
from pipebench.harness.simulated import simulate_point
from pipebench.harness.sweep import (
    Observer,
    Plan,
    Standing,
    conclude_sweep,
    groups_done,
    plan_sweep,
    point_folder,
    run_sweep,
)
from pipebench.machine import Machine
from pipebench.record import RunResult, read_json, read_result, write_json, write_result

SILENT = Observer(*[lambda *_: None] * 5)
GRID = ("-m", "model=synthetic", "engine=simulate", "stages=1,2", "micro=2,4", "repeats=2")


@cache
def composed(*arguments: str) -> tuple[Plan, RunConfig]:
    grid = compose_grid([*GRID, *arguments])
    assert grid is not None
    return plan_sweep([resolve(point, Machine(2, 0)) for point in grid.points], grid.swept, "sweep"), grid.points[0]


@contextmanager
def taken(results_dir: Path, *arguments: str, **settings: str) -> Iterator[Work]:
    """Take the folder that this grid and these settings lead to, and let go of it afterwards."""
    plan, config = composed(*arguments)
    work = take_folder(plan, dataclasses.replace(config, results_dir=str(results_dir), **settings))
    with work.lock:
        yield work


def sweep(results_dir: Path, *, stopped_after: int | None = None) -> Path:
    """Run the simulated sweep, the whole of it or until this many points of the last round are done."""
    plan, _ = composed()
    done: list[RunResult] = []

    def point_done(result: RunResult) -> None:
        done.append(result)
        if len(done) == stopped_after:
            raise KeyboardInterrupt

    with taken(results_dir) as work:
        observer = dataclasses.replace(SILENT, point_done=point_done)
        if stopped_after is None:
            run_sweep(plan, work.folder, observer, work.standing)
            conclude_sweep(plan, work.folder, work.standing)
        else:
            with pytest.raises(KeyboardInterrupt):
                run_sweep(plan, work.folder, observer, work.standing)
    return work.folder


def edit(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def result_of(folder: Path, number: int = 0) -> Path:
    plan, _ = composed()
    return point_folder(folder, list(plan.points)[number]) / "result.json"


def test_a_stopped_sweep_goes_on_and_a_finished_one_is_left_alone(tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stopped_after=4)
    assert read_json(stopped / "sweep.json")["finished"] is False
    with taken(tmp_path) as work:
        assert work.folder == stopped
        assert work.notes == [f"resuming: 2 of 4 done in {stopped}; resume=never starts anew"]
        plan, _ = composed()
        run_sweep(plan, work.folder, SILENT, work.standing)
        conclude_sweep(plan, work.folder, work.standing)
    assert read_json(stopped / "sweep.json")["finished"] is True
    with taken(tmp_path) as work:
        assert work.folder != stopped
        assert (work.notes, work.standing) == ([], Standing())


def test_only_the_rounds_that_are_missing_are_run_and_only_what_is_unheard_is_told(tmp_path: Path) -> None:
    plan, _ = composed()
    folder = sweep(tmp_path, stopped_after=4)
    started: list[tuple[RunConfig, int]] = []
    told: list[str] = []
    with taken(tmp_path) as work:
        assert groups_done(plan, work.standing) == 6 + 4  # round 1 of all, round 2 of the references and two points
        observer = Observer(
            lambda *point: started.append(point), lambda _: None, lambda result: told.append(result.key),
            lambda *_: None, lambda _: None,
        )  # fmt: skip
        run_sweep(plan, work.folder, observer, work.standing)
    order = list(plan.all)
    assert started == [(plan.all[key], 1) for key in order[4:]]
    assert told == order[3:]  # the fourth was stopped while observers heard of it
    assert {len(read_result(point_folder(folder, key) / "result.json").repeats) for key in order} == {2}


@pytest.mark.parametrize("other", [["micro=4,2"], ["micro=2,4,8"], ["seed=1"], ["noise_floor=false", "batch=16"]])
def test_a_sweep_of_another_grid_is_never_gone_on_with(other: list[str], tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stopped_after=1)
    with taken(tmp_path, *other) as work:
        assert work.folder != stopped
    with (
        pytest.raises(ConfigError, match="expected a sweep of this very grid"),
        taken(tmp_path, *other, resume=str(stopped)),
    ):
        pass


def test_a_sweep_that_was_stopped_before_its_report_gets_one_and_runs_nothing_again(tmp_path: Path) -> None:
    plan, _ = composed()
    with taken(tmp_path) as work:
        run_sweep(plan, work.folder, SILENT, work.standing)
    with taken(tmp_path) as later:
        assert later.folder == work.folder
        assert groups_done(plan, later.standing) == 12
        assert later.standing.told == set(plan.all)


def test_a_sweep_kept_under_another_name_is_left_alone_and_hides_no_other(tmp_path: Path) -> None:
    kept = sweep(tmp_path).rename(tmp_path / "kept")
    (kept / ".lock").unlink()
    stopped = sweep(tmp_path, stopped_after=1)
    with taken(tmp_path) as work:
        assert work.folder == stopped
    assert not (kept / ".lock").exists()


def test_resume_never_starts_anew(tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stopped_after=1)
    with taken(tmp_path, resume="never") as work:
        assert work.folder != stopped


def test_more_repeats_add_rounds_to_a_named_sweep(tmp_path: Path) -> None:
    finished = sweep(tmp_path)
    plan, _ = composed("repeats=3")
    with taken(tmp_path, "repeats=3", resume=str(finished)) as work:
        assert groups_done(plan, work.standing) == 12
        results = run_sweep(plan, work.folder, SILENT, work.standing)
    assert {len(result.repeats) for result in results.values()} == {3}


def test_a_sweep_that_another_process_runs_is_not_taken_over(tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stopped_after=1)
    with taken(tmp_path) as first:
        assert first.folder == stopped
        with taken(tmp_path) as second:
            assert second.folder != stopped
        with (
            pytest.raises(ConfigError, match="expected a sweep that no other process runs"),
            taken(tmp_path, resume=str(stopped)),
        ):
            pass
    with taken(tmp_path) as later:
        assert later.folder == stopped


@pytest.mark.parametrize(
    ("status", "retry", "again"),
    [
        ("error", "failed", True), ("oom", "failed", True), ("wrong", "failed", True), ("simulated", "failed", False),
        ("error", "oom", False), ("oom", "oom", True), ("simulated", "all", True), ("interrupted", None, True),
        ("error", None, False),
    ],
)  # fmt: skip
def test_retry_chooses_by_status(status: str, retry: str | None, again: bool, tmp_path: Path) -> None:
    folder = sweep(tmp_path)
    edit(result_of(folder), status=status)
    plan, config = composed()
    settings = dataclasses.replace(config, results_dir=str(tmp_path), resume=str(folder), retry=retry)
    work = take_folder(plan, settings)
    with work.lock:
        assert (next(iter(plan.points)) not in work.standing.results) == again
        assert len(work.notes) == 1 + (len(plan.all) if retry == "all" else again)
    kept = result_of(folder).with_name("result.json.old-1")
    assert kept.exists() == (again and status != "interrupted")


def test_retry_alone_takes_the_newest_sweep_finished_or_not(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="retry=failed: expected an earlier sweep of this grid"),
        taken(tmp_path, retry="failed"),
    ):
        pass
    finished = sweep(tmp_path)
    with taken(tmp_path, retry="failed") as work:
        assert work.folder == finished


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"code": "0" * 12}, "measured by other code"), ({"torch": "1.0"}, "measured with torch 1.0, now "),
        ({"processor": "Abacus"}, "measured on Abacus, "), ({"cores": 4096}, "4096 cores"),
    ],
)  # fmt: skip
def test_what_other_code_torch_or_machine_measured_is_listed_and_set_aside(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    path = result_of(folder)
    before = read_result(path)
    edit(path, environment=before.environment | changed)
    with taken(tmp_path) as work:
        headline, line = work.notes
        assert headline.startswith("resuming: 3 of 4 done")
        assert line.startswith("measured again: stages=1 micro=2: ")
        assert said in line
        assert line.endswith("; kept as result.json.old-1")
    assert not path.exists()
    assert read_result(path.with_name("result.json.old-1")).repeats == before.repeats


@pytest.mark.fault("result.json {damage}", "one line, set aside and measured again, others untouched")
@pytest.mark.parametrize("damage", ["halved", "emptied", "another's", "nonsense", "no repeats of ranks", "status"])
def test_a_damaged_result_is_set_aside_told_in_one_line_and_measured_again(damage: str, tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    path, other = result_of(folder), result_of(folder, 1)
    whole = path.read_text()
    match damage:
        case "halved":
            path.write_text(whole[: len(whole) // 2])
        case "emptied":
            path.write_text("")
        case "another's":
            path.write_text(other.read_text())
        case "nonsense":
            path.write_bytes(b"\xff\x00[[[")
        case "no repeats of ranks":
            edit(path, repeats=[{"ranks": [], "wall_s": 0.0, "profiling_s": 0.0}])
        case "status":
            edit(path, status="perfect")
    others = {key: (point_folder(folder, key) / "result.json").read_bytes() for key in list(composed()[0].points)[1:]}
    damaged = path.read_bytes()
    plan, _ = composed()
    with taken(tmp_path) as work:
        _, line = work.notes
        assert line.startswith(f"measured again: stages=1 micro=2: runs/{path.parent.name}/result.json: ")
        assert line.endswith("; kept as result.json.damaged-1")
        run_sweep(plan, work.folder, SILENT, work.standing)
    assert path.with_name("result.json.damaged-1").read_bytes() == damaged
    assert json.loads(path.read_text())["repeats"] == json.loads(whole)["repeats"]
    for key, content in others.items():
        assert (point_folder(folder, key) / "result.json").read_bytes() == content


def test_a_second_look_stays_or_goes_with_its_point(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    plan, config = composed()
    key = list(plan.points)[-1]
    plan = dataclasses.replace(plan, again=key)
    edit(folder / "sweep.json", noise_floor=key)
    again = point_folder(folder, key) / "again.json"
    write_result(again, read_result(again.with_name("result.json")))
    settings = dataclasses.replace(config, results_dir=str(tmp_path))
    with (work := take_folder(plan, settings)).lock:
        assert work.standing.again is not None
    again.with_name("result.json").write_text("cut")
    with (work := take_folder(plan, settings)).lock:
        assert work.standing.again is None
    assert again.with_name("again.json.old-1").exists()


@pytest.mark.fault("file half written by a killed process", "removed")
def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=1)
    left = [folder / ".sweep.json.abc", result_of(folder).parent / ".result.json.xyz"]
    for path in left:
        path.write_text('{"half": ')
    with taken(tmp_path):
        assert not any(path.exists() for path in left)


@pytest.mark.fault("sweep.json cut in half", "refused by name in one line; resume=auto starts anew")
def test_a_damaged_sweep_json_is_refused_by_name_and_left_alone_by_auto(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=1)
    (folder / "sweep.json").write_text('{"half": ')
    with taken(tmp_path) as work:
        assert work.folder != folder
    with (
        pytest.raises(ConfigError, match="expected the folder of a sweep") as refused,
        taken(tmp_path, resume=str(folder)),
    ):
        pass
    assert "\n" not in str(refused.value)


def test_a_result_without_room_on_the_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"old": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ResultError, match=r"result.json: cannot be written: No space left on device$"):
        write_json(path, {"new": 2})
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    assert json.loads(path.read_text()) == {"old": 1}


def test_the_code_state_tells_any_change_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"machine.py": "", "a.py": "x = 1\n"}.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    before = machine.describe()["code"]
    assert machine.describe()["code"] == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert machine.describe()["code"] != before


def test_points_are_simulated_the_same_each_time() -> None:
    """What the tests above rely on."""
    plan, _ = composed()
    key, config = next(iter(plan.points.items()))
    empty = RunResult(key, config, "ok", "", False, machine.describe(), [], [], None)
    assert simulate_point(empty) == simulate_point(empty)


@pytest.mark.fault("folder that cannot be written", "refused by name in one line; resume=auto starts anew")
def test_a_sweep_in_which_nothing_can_be_written_is_refused_by_name_and_left_alone_by_auto(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=1)
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # refused to every user, as a read-only folder is not to root
    with taken(tmp_path) as work:
        assert work.folder != folder
    with (
        pytest.raises(ConfigError, match="expected a folder that can be written"),
        taken(tmp_path, resume=str(folder)),
    ):
        pass
