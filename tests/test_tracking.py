"""W&B as a view: what it writes offline, what it keeps to itself, and that its failures cost no result."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tracked import (
    FAKE_SECRET,
    HOST_NAME,
    a_config,
    a_failure,
    a_picture,
    a_result,
    all_bytes,
    history,
    log,
    log_to,
    logged_keys,
    rows_of,
    run_folders,
    run_of,
    summary,
)
from wandb_server import ENTITY, KEY, wandb_server

from pipebench.config import TRACKERS
from pipebench.errors import ConfigError
from pipebench.record import RunResult
from pipebench.rows import Row, StageRow, stage_rows
from pipebench.tracking import KINDS, Trackers, check_installed, make_trackers
from pipebench.tracking.wandb_runs import REPORT, SETTINGS, run_id

pytestmark = pytest.mark.usefixtures("loopback_only")


def test_each_point_becomes_one_run_with_the_whole_row(
    folder: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    results = [a_result("aaa"), a_result("bbb", micro=4), a_failure("ccc")]
    rows = log(folder, results, warnings_told)

    assert warnings_told == []
    assert capfd.readouterr() == ("", "")
    assert len(run_folders(folder)) == 4  # the sweep's own is one
    views = {result.key: summary(run_of(folder, result.key)) for result in results}
    for result, row in zip(results, rows, strict=True):
        view = views[result.key]
        known = {name: value for name, value in row.items() if value is not None}
        assert {name: view["summary"].get(name) for name in known} == known
        assert view["config"]["stages"] == result.config.stages
        assert view["config"]["micro"] == result.config.micro
        assert view["config"]["environment"] == result.environment
        assert view["tags"] == [result.status]
    assert views["bbb"]["name"] == "K=2 M=4 gpipe mlp optimizer.lr=0.1"
    assert views["ccc"]["summary"]["message"] == "rank 1 failed at 1F0: boom"

    written = all_bytes(folder.parent)
    for secret in (KEY, FAKE_SECRET, HOST_NAME):
        assert secret.encode() not in written


def test_every_sample_of_every_group_is_in_the_history(folder: Path, warnings_told: list[str]) -> None:
    result = a_result("aaa")
    log(folder, [result], warnings_told)

    items = history(run_of(folder, "aaa"))
    for suffix in ("", "_repeat_2"):
        steps = [item for item in items if "loss" + suffix in item]
        assert [item["training_step"] for item in steps] == [1, 2, 3, 4, 5]
        assert [item["loss" + suffix] for item in steps[:4]] == [2.0, 1.5, 1.25, 1.0]
        assert [item.get("step_s" + suffix) for item in steps] == [None, None, 0.5, 0.6, 0.7]
        assert ["bubble_fraction" + suffix in item for item in steps] == [False, False, True, True, True]
    [table] = run_of(folder, "aaa").glob("files/media/table/per_stage*.json")
    assert [dict(zip(json.loads(table.read_text())["columns"], data, strict=True)) for data in _data(table)] == [
        dataclasses.asdict(stage) for stage in stage_rows(result)
    ]


def _data(table: Path) -> list[list[Any]]:
    data: list[list[Any]] = json.loads(table.read_text())["data"]
    return data


def test_a_sweep_is_whole_without_the_home_folder(folder: Path, warnings_told: list[str]) -> None:
    variables = dict(os.environ)
    log(folder, [a_result("aaa")], warnings_told)

    assert list((folder / "wandb" / "artifacts" / "staging").iterdir())
    assert not [path for path in (folder.parent / "home").rglob("*") if path.is_file()]
    assert dict(os.environ) == variables


def test_a_point_survives_the_death_of_the_service(
    folder: Path, warnings_told: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    trackers = make_trackers(a_config(), folder, "my sweep", warnings_told.append)
    for key in ("aaa", "bbb"):
        result = a_result(key)
        trackers.log_point(result, *rows_of([result]), stage_rows(result))
        wait_until_flushed(folder, key)
        for pid in service_processes():
            os.kill(pid, signal.SIGKILL)
    trackers.finish()

    assert warnings_told == []
    assert capfd.readouterr() == ("", "")
    assert len(run_folders(folder)) == 2


def wait_until_flushed(folder: Path, key: str) -> None:
    """The service writes an ended run to its file within the flush interval, seldom after it says it is done."""
    deadline = time.monotonic() + 10
    while key not in logged_keys(folder, [key]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def service_processes() -> list[int]:
    command = ["pgrep", "-P", str(os.getpid()), "-x", "wandb-core"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]


@pytest.fixture
def mute_server() -> Iterator[str]:
    """Yield the address of a server that takes connections and never answers, like a dropping network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("fault", ["refuses", "mute", "no key"])
def test_online_without_a_server_falls_back_to_offline_once(
    fault: str,
    mute_server: str,
    folder: Path,
    warnings_told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert SETTINGS["init_timeout"] == 10.0
    monkeypatch.setitem(SETTINGS, "init_timeout", 2.0)  # the test need not wait as long as a user should
    if fault != "no key":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    if fault == "mute":
        monkeypatch.setenv("WANDB_BASE_URL", mute_server)
    began = time.perf_counter()
    log(folder, [a_result("aaa"), a_result("bbb")], warnings_told, mode="online")

    assert time.perf_counter() - began < 15
    assert len(warnings_told) == 1
    assert "offline from here on" in warnings_told[0]
    assert "\n" not in warnings_told[0]
    assert capfd.readouterr() == ("", "")
    assert [path.name.startswith("offline-run-") for path in run_folders(folder)] == [True, True, True]
    assert logged_keys(folder, ["aaa", "bbb"]) == ["aaa", "bbb"]
    assert KEY.encode() not in all_bytes(folder.parent)


@pytest.mark.parametrize("where", ["init", "Table"])
def test_an_error_of_wandb_is_told_once_and_leaves_no_broken_run(
    where: str,
    folder: Path,
    warnings_told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise OSError("No space left on device\nmore")

    monkeypatch.setattr(wandb, where, refuse)
    log(folder, [a_result("aaa"), a_result("bbb")], warnings_told)

    assert warnings_told == ["W&B lacks some of the sweep, its files have all: No space left on device"]
    assert capfd.readouterr() == ("", "")
    assert run_folders(folder) == []


def test_disabled_writes_nothing_and_does_not_import_wandb(folder: Path) -> None:
    code = """
import sys
from pathlib import Path
from tracked import a_config
from pipebench.tracking import make_trackers
trackers = make_trackers(a_config(mode="disabled"), Path(sys.argv[1]), "my sweep", print)
trackers.log_point(None, {}, [])
trackers.log_sweep([], [])
trackers.finish()
print(trackers.where(), [name for name in ("wandb", "torch") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)

    assert done.stdout == "[] []\n"
    assert list(folder.iterdir()) == []


def test_the_commands_quote_the_folder(folder: Path) -> None:
    trackers = make_trackers(a_config(), folder, "my sweep", print)

    assert trackers.where() == [
        ("W&B", f"wandb leet '{folder}/wandb'"),
        ("W&B", f"wandb sync '{folder}/wandb'/offline-run-*"),
    ]


def test_the_sweep_becomes_a_run_with_a_series_for_each_line_of_a_chart(
    folder: Path, warnings_told: list[str], tmp_path: Path
) -> None:
    results = [a_result("bbb", micro=4), a_result("aaa"), a_failure("ccc")]
    trackers = make_trackers(a_config(), folder, "my sweep", warnings_told.append)
    rows = log_to(trackers, results, [a_picture(tmp_path / "bubble.png")])

    assert warnings_told == []
    run = run_of(folder, REPORT)
    at_micro = [item for item in history(run) if "M" in item]
    assert [item["M"] for item in at_micro] == [2, 4]
    for item, row in zip(at_micro, (rows[1], rows[0]), strict=True):
        assert {name: value for name, value in item.items() if "/" in name} == {
            "bubble/K=2 measured": row["bubble_fraction"],
            "bubble/K=2 replayed": row["bubble_replayed"],
            "bubble/K=2 bound": row["bubble_bound"],
            "samples_per_s/K=2": row["samples_per_s"],
            "peak_memory_mib/K=2": row["peak_memory_bytes"] / 2**20,
        }
    view = summary(run)
    assert view["name"] == "report my sweep"
    assert view["tags"] == [REPORT]
    assert {"bubble_fraction", "step_s", "key"}.isdisjoint(view["summary"])  # those are names of points


def test_the_sweep_s_run_holds_the_result_table_the_charts_and_the_figures(
    folder: Path, warnings_told: list[str], tmp_path: Path
) -> None:
    picture = a_picture(tmp_path / "bubble.png")
    trackers = make_trackers(a_config(), folder, "my sweep", warnings_told.append)
    rows = log_to(trackers, [a_result("aaa"), a_failure("ccc")], [picture])

    media = run_of(folder, REPORT) / "files" / "media"
    [table] = media.glob("table/results*.json")
    assert [dict(zip(json.loads(table.read_text())["columns"], data, strict=True)) for data in _data(table)] == rows
    [chart] = media.glob("table/report/bubble_table*.json")
    assert _data(chart) == [
        [2, f"K=2 {name}", rows[0][column]]
        for name, column in (
            ("measured", "bubble_fraction"),
            ("replayed", "bubble_replayed"),
            ("bound", "bubble_bound"),
        )
    ]
    [copy] = media.glob("images/figures/bubble*.png")
    assert copy.read_bytes() == picture.read_bytes()


def test_a_column_of_words_and_numbers_becomes_words_in_the_result_table(
    folder: Path, warnings_told: list[str]
) -> None:
    rows = [
        {**row, "threads": threads}
        for row, threads in zip(rows_of([a_result("aaa")] * 3), ("auto", 2, None), strict=True)
    ]
    trackers = make_trackers(a_config(), folder, "my sweep", warnings_told.append)
    trackers.log_sweep(rows, [])
    trackers.finish()

    assert warnings_told == []
    [table] = run_of(folder, REPORT).glob("files/media/table/results*.json")
    column = json.loads(table.read_text())["columns"].index("threads")
    assert [data[column] for data in _data(table)] == ["auto", "2", None]


def test_a_run_that_is_written_again_takes_the_place_of_the_first(folder: Path, warnings_told: list[str]) -> None:
    log(folder, [a_result("aaa")], warnings_told)
    first = run_folders(folder)
    log(folder, [dataclasses.replace(a_result("aaa"), message="again")], warnings_told)

    assert warnings_told == []
    assert len(run_folders(folder)) == len(first) == 2
    assert set(run_folders(folder)).isdisjoint(first)
    assert summary(run_of(folder, "aaa"))["summary"]["message"] == "again"


def test_a_run_that_cannot_be_written_again_leaves_the_first(
    folder: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise OSError("No space left on device")

    log(folder, [a_result("aaa")], warnings_told)
    first = run_folders(folder)
    monkeypatch.setattr(wandb, "Table", refuse)
    log(folder, [a_result("aaa")], warnings_told)

    assert len(warnings_told) == 1
    assert run_folders(folder) == first


def test_online_the_runs_reach_the_server_and_the_sweep_s_address_is_told(
    folder: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        trackers = make_trackers(a_config(mode="online"), folder, "my sweep", warnings_told.append)
        [row] = log_to(trackers, [a_result("aaa")])

    assert warnings_told == []
    point, sweep = run_id(folder, "aaa"), run_id(folder, REPORT)
    assert [(run["name"], run["jobType"], run["groupName"]) for run in server.runs] == [
        (point, "point", folder.name),
        (sweep, REPORT, folder.name),
    ]
    assert [item["loss"] for item in server.history[point] if "loss" in item][:4] == [2.0, 1.5, 1.25, 1.0]
    assert [item["bubble/K=2 measured"] for item in server.history[sweep] if "M" in item] == [row["bubble_fraction"]]
    assert trackers.where() == [("W&B", f"{server.url}/{ENTITY}/pipebench/runs/{sweep}")]


class Broken:
    """A tracker that can do nothing."""

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        raise ValueError("broken\nin two lines")

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        raise ValueError("broken again")

    def finish(self) -> None:
        raise ValueError("broken for good")

    def where(self) -> list[str]:
        return []


class Listening:
    """One that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        self.told.append(result.key)

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        self.told.append(f"{len(rows)} rows")

    def finish(self) -> None:
        self.told.append("end")

    def where(self) -> list[str]:
        return []


def test_a_tracker_that_fails_is_told_of_once_and_stops_no_other(warnings_told: list[str]) -> None:
    listening = Listening()
    trackers = Trackers({"A": Broken(), "B": listening}, warnings_told.append)
    log_to(trackers, [a_result("aaa"), a_result("bbb")])

    assert listening.told == ["aaa", "bbb", "2 rows", "end"]
    assert warnings_told == ["A lacks some of the sweep, its files have all: broken"]


def test_every_name_that_a_user_may_write_is_a_tracker() -> None:
    assert set(KINDS) == set(TRACKERS)


def test_a_tracker_without_its_package_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(a_config(), trackers=["wandb", "tensorboard"])
    check_installed(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else "found")

    with pytest.raises(ConfigError) as caught:
        check_installed(config)
    assert str(caught.value) == "trackers=tensorboard: expected its package: pip install 'pipebench[tensorboard]'"
    check_installed(a_config())


def test_runs_inside_an_agent_of_wandb_are_those_of_the_sweep(
    folder: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent names a sweep and a run; a second write must find the runs of the first."""
    for name in ("SWEEP_ID", "RUN_ID", "NAME", "NOTES", "PROJECT", "RUN_GROUP", "TAGS", "SERVICE"):
        monkeypatch.setenv(f"WANDB_{name}", f"{name.lower()}-of-another")
    variables = dict(os.environ)
    for _ in range(2):
        log(folder, [a_result("aaa"), a_result("bbb")], warnings_told)

    assert warnings_told == []
    ids = [run_id(folder, key) for key in ("aaa", "bbb", REPORT)]
    assert sorted(found for run in run_folders(folder) for found in ids if found in run.name) == sorted(ids)
    assert len(run_folders(folder)) == 3
    assert b"-of-another" not in all_bytes(folder)
    assert dict(os.environ) == variables
