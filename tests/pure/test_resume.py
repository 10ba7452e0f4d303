"""Which sweep goes on and which of its points stay: decided by files alone, so hand-made results will do."""

import dataclasses
import json
import os
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
    """Change a file into one that an older version could have written, without a hash of its content."""
    content = json.loads(path.read_text()) | changes
    content.pop("sha256", None)
    write_json(path, content)


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


@pytest.mark.fault("file half written by a killed process", "removed, and nothing else")
def test_only_what_a_killed_process_left_half_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sweep(tmp_path, stopped_after=1)
    mine = [
        place / name for place in (folder, result_of(folder).parent) for name in (".notes.md.swp", ".result.json.x")
    ]
    for path in mine:
        path.write_text("mine")
    with monkeypatch.context() as killed:
        killed.setattr("os.replace", lambda *_: None)
        for path in (folder / "sweep.json", result_of(folder)):
            write_json(path, {})
    half_written = {path for path in folder.rglob(".*") if path.name not in (".lock", *(path.name for path in mine))}
    assert len(half_written) == 2
    with taken(tmp_path):
        assert not any(path.exists() for path in half_written)
        assert all(path.read_text() == "mine" for path in mine)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("retry", [None, "all"])
@pytest.mark.parametrize(
    "linked", ["runs", "runs/KEY", "runs/KEY/result.json", "tables", "wandb", "tensorboard", "tensorboard/all"]
)
def test_resuming_touches_nothing_that_a_link_leads_to_and_runs_again_what_it_hid(
    linked: str, retry: str | None, tmp_path: Path
) -> None:
    folder, elsewhere = sweep(tmp_path / "results"), tmp_path / "elsewhere"
    plan, _ = composed()
    path = folder / linked.replace("KEY", result_of(folder).parent.name)
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.mkdir()
        path.parent.mkdir(exist_ok=True)
    if elsewhere.is_dir():
        (elsewhere / ".pipebench-x").write_text("not ours")
    before = everything_in(elsewhere) if elsewhere.is_dir() else {"": elsewhere.read_bytes()}
    path.symlink_to(elsewhere)
    with taken(tmp_path / "results", resume=str(folder), retry=retry) as work:
        [line] = [note for note in work.notes if "is a link" in note]
        assert f"{path.relative_to(folder)}: is a link" in line
        assert line.endswith(f"; kept as {path.name}.link-1")
        results = run_sweep(plan, work.folder, SILENT, work.standing)
    assert path.with_name(f"{path.name}.link-1").readlink() == elsewhere
    assert (everything_in(elsewhere) if elsewhere.is_dir() else {"": elsewhere.read_bytes()}) == before
    assert {key: read_result(point_folder(folder, key) / "result.json") for key in results} == results


@pytest.mark.parametrize("target", ["/dev/zero", "nowhere"])
def test_a_result_that_is_a_link_to_a_device_or_to_nothing_is_set_aside(target: str, tmp_path: Path) -> None:
    folder = sweep(tmp_path)
    result_of(folder).unlink()
    result_of(folder).symlink_to(target)
    with taken(tmp_path, resume=str(folder)) as work:
        headline, line = work.notes
        assert headline.startswith("resuming: 3 of 4 done")
        assert line.endswith("; kept as result.json.link-1")


def test_a_lock_that_is_a_link_is_refused_and_its_target_not_made(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "results", stopped_after=6)
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"\.lock: is a link"), taken(tmp_path / "results", resume=str(folder)):
        pass
    with taken(tmp_path / "results") as work:
        assert work.folder != folder
        [line] = work.notes
        assert line.startswith(f"passed over: {folder}/.lock: is a link")
    assert not (tmp_path / "target").exists()


def test_a_sweep_writes_no_result_through_a_link(tmp_path: Path) -> None:
    plan, _ = composed()
    with taken(tmp_path / "results") as work:
        (work.folder / "runs").symlink_to(tmp_path)
        with pytest.raises(ResultError, match="runs: is a link, which may lead out of the folder"):
            run_sweep(plan, work.folder, SILENT, work.standing)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_what_stands_in_the_place_of_a_folder_is_set_aside(tmp_path: Path) -> None:
    folder = sweep(tmp_path)
    place = result_of(folder).parent
    place.rename(tmp_path / "moved")
    place.write_text("no folder")
    with taken(tmp_path, resume=str(folder)) as work:
        assert work.notes[1] == f"set aside: runs/{place.name}: expected a folder; kept as {place.name}.damaged-1"
        run_sweep(composed()[0], work.folder, SILENT, work.standing)
    assert read_result(result_of(folder)).key == place.name


def test_an_edited_number_is_noticed_set_aside_and_measured_again(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    path = result_of(folder)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, indent=2))  # says the same
    with taken(tmp_path) as work:
        assert len(work.notes) == 1
    content["repeats"][0]["ranks"][0]["step_s"][0] *= 0.5
    path.write_text(json.dumps(content))
    with taken(tmp_path) as work:
        _, line = work.notes
        assert "result.json: was edited after it was written" in line
        assert line.endswith("; kept as result.json.damaged-1")


def cut(folder: Path) -> None:
    path = folder / "sweep.json"
    path.write_text(path.read_text()[:100])


@pytest.mark.fault("sweep.json cut in half", "passed over with a word; resume=FOLDER takes its results")
def test_a_cut_sweep_json_is_passed_over_with_a_word_and_its_results_are_taken_by_name(tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    cut(folder)
    with taken(tmp_path) as work:
        assert (work.folder != folder, work.goes_on) == (True, False)
        [line] = work.notes
        assert line.startswith(f"passed over: {folder}/sweep.json: cannot be read as a result: ")
        assert f"; resume={folder} takes it" in line
    with taken(tmp_path, resume=str(folder)) as work:
        headline, line = work.notes
        assert headline == f"resuming: 4 of 4 done in {folder}"
        assert line.startswith("set aside: sweep.json: cannot be read as a result: ")
        assert line.endswith("; kept as sweep.json.damaged-1")
        run_sweep(composed()[0], work.folder, SILENT, work.standing)
    assert len(read_json(folder / "sweep.json")["points"]) == 4


def test_the_newest_sweep_that_is_whole_is_gone_on_with_and_the_cut_one_named_after_that(tmp_path: Path) -> None:
    older = sweep(tmp_path, stopped_after=5)
    newer = older.with_name(f"{older.name}-2")
    with taken(tmp_path) as work:  # locked, so that another begins
        assert work.folder == older
        newer = sweep(tmp_path, stopped_after=6)
    cut(newer)
    with taken(tmp_path) as work:
        assert work.folder == older
        assert work.notes[0].startswith("resuming: 3 of 4 done in ")
        assert work.notes[1].startswith(f"passed over: {newer}/sweep.json")


def test_a_cut_sweep_json_without_a_result_of_this_grid_is_refused_by_name_and_nothing_to_speak_of(
    tmp_path: Path,
) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    cut(folder)
    with taken(tmp_path, "seed=1") as work:
        assert work.notes == []
    with (
        pytest.raises(ConfigError, match="expected the folder of a sweep") as refused,
        taken(tmp_path, "seed=1", resume=str(folder)),
    ):
        pass
    assert "\n" not in str(refused.value)


def test_a_sweep_that_another_process_runs_is_named(tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stopped_after=1)
    with taken(tmp_path), taken(tmp_path) as second:
        assert second.notes == [
            f"passed over: {stopped}: another process runs it; resume={stopped} takes it after that"
        ]


@pytest.mark.parametrize("name", ["sweep.json", "result.json"])
def test_a_pipe_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    folder = sweep(tmp_path, stopped_after=6)
    path = folder / name if name == "sweep.json" else result_of(folder)
    path.unlink()
    os.mkfifo(path)
    with taken(tmp_path, resume=str(folder)) as work:
        assert "is a pipe or a device: expected a regular file; kept as " in work.notes[1]


def test_a_failure_of_an_earlier_run_and_a_reference_that_fails_end_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = composed("on_failure=stop", "noise_floor=false")
    bad = [next(iter(plan.references)), *list(plan.points)[:2]]

    def fail_some(result: RunResult) -> RunResult:
        if result.key in bad:
            return dataclasses.replace(result, status="error", message="broken")
        return simulate_point(result)

    monkeypatch.setattr("pipebench.harness.sweep.simulate_point", fail_some)
    seen = []
    for _ in range(3):
        with taken(tmp_path, "on_failure=stop", "noise_floor=false") as work:
            results = run_sweep(plan, work.folder, SILENT, work.standing)
            conclude_sweep(plan, work.folder, work.standing)
            seen.append(([key for key in plan.points if key in results], work.notes))
    keys = list(plan.points)
    assert [points for points, _ in seen] == [keys[:1], keys[:2], keys]
    assert seen[1][1][1:] == ["gone past (on_failure=stop): stages=1 micro=2: error; retry=failed measures it again"]
    assert len(seen[2][1]) == 3


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
