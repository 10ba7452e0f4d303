"""W&B as a view: what it writes offline, what it keeps to itself, and that its failures cost no result."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipebench.config import MlpConfig, OptimizerConfig, RunConfig, TeacherConfig, WandbConfig
from pipebench.record import RankRecord, Repeat, RunResult, StageMemory
from pipebench.rows import Row, row_of, stage_rows
from pipebench.tracking import commands, make_tracker
from pipebench.tracking.wandb_runs import SETTINGS

WANDB = str(Path(sys.executable).with_name("wandb"))
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"
FAKE_SECRET = "a-secret-that-must-not-be-written"
HOST_NAME = "a-host-name-that-must-not-be-written"
WARMUP_STEPS, TIMED_STEPS = 2, 3


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing reach a real server, nor the home folder, and put in place what must not be written."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", FAKE_SECRET)
    monkeypatch.setattr("socket.gethostname", lambda: HOST_NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "20260101-120000-my sweep"  # a space, as a user's path may have
    path.mkdir()
    return path


@pytest.fixture
def warnings_told() -> list[str]:
    return []


def a_config(micro: int = 2, mode: str = "offline") -> RunConfig:
    return RunConfig(
        stages=2,
        micro=micro,
        replicas=1,
        schedule="gpipe",
        chunks=1,
        memory_limit="auto",
        recompute="never",
        partition="time",
        engine="pipebench",
        profile=None,
        batch=8,
        model=MlpConfig(name="mlp", layers=2, width=8, inputs=4, outputs=2, task="regression", dropout=0.0),
        data=TeacherConfig(name="teacher"),
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        precision="fp32",
        device="cpu",
        threads=1,
        warmup=WARMUP_STEPS,
        steps=TIMED_STEPS,
        repeats=2,
        seed=0,
        gate="on",
        results_dir="results",
        wandb=WandbConfig(mode=mode, project="pipebench", entity=None),
    )


def a_rank(rank: int, num_actions: int) -> RankRecord:
    spans = [[(0.1 * i, 0.1 * i + 0.05 + 0.01 * step, 0.0) for i in range(num_actions)] for step in range(TIMED_STEPS)]
    return RankRecord(
        rank=rank,
        warmup_step_s=[0.6] * WARMUP_STEPS,
        step_s=[0.5, 0.6, 0.7],
        steady=True,
        losses=[2.0, 1.5, 1.25, 1.0, math.nan] if rank == 1 else [],
        grad_rel_error=1e-7,
        transfer_s=[0.001 * rank],
        latency_s=[0.0],
        spans=spans,
        memory=StageMemory(100, 200, 300, 400, 0, 0),
        peak_rss_bytes=10_000,
        phases_s=dict.fromkeys(("checking gradients", "warming up", "measuring", "profiling memory"), 0.25),
    )


def a_result(key: str, micro: int = 2) -> RunResult:
    rows = [[f"{stage}{op}{i}" for op in "FB" for i in range(micro)] + [f"{stage}O"] for stage in range(2)]
    ranks = [a_rank(rank, len(row)) for rank, row in enumerate(rows)]
    return RunResult(
        key=key,
        config=a_config(micro),
        status="ok",
        message="",
        oversubscribed=False,
        environment={"python": "3.11", "cores": 2},
        layers_per_stage=[2, 2],
        rows=rows,
        profile=None,
        repeats=[Repeat(ranks, wall_s=2.0), Repeat(ranks, wall_s=2.5)],
    )


def a_failure(key: str) -> RunResult:
    failed = {"status": "error", "message": "rank 1 failed at 1F0: boom", "layers_per_stage": [], "rows": []}
    return dataclasses.replace(a_result(key), **failed, repeats=[])


def log(folder: Path, results: list[RunResult], told: list[str], mode: str = "offline") -> list[Row]:
    """Log points as a sweep over a learning rate would, and return their rows."""
    tracker = make_tracker(a_config(mode=mode).wandb, folder, "my sweep", told.append)
    rows = [row_of(result, None, ["micro", "optimizer.lr"]) for result in results]
    for result, row in zip(results, rows, strict=True):
        tracker.log_point(result, row, stage_rows(result) if result.repeats else [])
    tracker.finish()
    return rows


def run_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "wandb").glob("*run-*-*") if path.is_dir())


def inspect(run: Path, *options: str) -> str:
    command = [WANDB, "leet", "inspect", *options, "--json", str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def summaries(folder: Path) -> dict[str, Any]:
    found = [json.loads(inspect(run, "--summary")) for run in run_folders(folder)]
    return {view["summary"]["key"]: view for view in found}


def logged_keys(folder: Path, keys: list[str]) -> list[str]:
    """Return the keys that runs hold, read roughly: `wandb leet` takes a second for each run."""
    logs = [log.read_bytes() for run in run_folders(folder) for log in run.glob("*.wandb")]
    return sorted(key for key in keys for log in logs if f'"{key}"'.encode() in log)


def all_bytes(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_each_point_becomes_one_run_with_the_whole_row(
    folder: Path, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    results = [a_result("aaa"), a_result("bbb", micro=4), a_failure("ccc")]
    rows = log(folder, results, warnings_told)

    assert warnings_told == []
    assert capfd.readouterr() == ("", "")
    assert len(run_folders(folder)) == 3
    views = summaries(folder)
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
    for secret in (FAKE_KEY, FAKE_SECRET, HOST_NAME):
        assert secret.encode() not in written


def test_every_sample_of_every_group_is_in_the_history(folder: Path, warnings_told: list[str]) -> None:
    result = a_result("aaa")
    log(folder, [result], warnings_told)

    lines = [json.loads(line) for line in inspect(run_folders(folder)[0]).splitlines()]
    items = [line["history"]["item"] for line in lines if line["type"] == "history"]
    for suffix in ("", "_repeat_2"):
        steps = [item for item in items if "loss" + suffix in item]
        assert [item["training_step"] for item in steps] == [1, 2, 3, 4, 5]
        assert [item["loss" + suffix] for item in steps[:4]] == [2.0, 1.5, 1.25, 1.0]
        assert [item.get("step_s" + suffix) for item in steps] == [None, None, 0.5, 0.6, 0.7]
        assert ["bubble_fraction" + suffix in item for item in steps] == [False, False, True, True, True]
    [table] = folder.glob("wandb/offline-run-*/files/media/table/per_stage*.json")
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
    tracker = make_tracker(a_config().wandb, folder, "my sweep", warnings_told.append)
    for key in ("aaa", "bbb"):
        result = a_result(key)
        tracker.log_point(result, row_of(result, None), stage_rows(result))
        for pid in service_processes():
            os.kill(pid, signal.SIGKILL)
    tracker.finish()

    assert warnings_told == []
    assert capfd.readouterr() == ("", "")
    assert len(run_folders(folder)) == 2
    assert logged_keys(folder, ["aaa", "bbb"]) == ["aaa", "bbb"]


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
        monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    if fault == "mute":
        monkeypatch.setenv("WANDB_BASE_URL", mute_server)
    began = time.perf_counter()
    log(folder, [a_result("aaa"), a_result("bbb")], warnings_told, mode="online")

    assert time.perf_counter() - began < 15
    assert len(warnings_told) == 1
    assert "offline from here on" in warnings_told[0]
    assert "\n" not in warnings_told[0]
    assert capfd.readouterr() == ("", "")
    assert [path.name.startswith("offline-run-") for path in run_folders(folder)] == [True, True]
    assert logged_keys(folder, ["aaa", "bbb"]) == ["aaa", "bbb"]
    assert FAKE_KEY.encode() not in all_bytes(folder.parent)


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

    assert warnings_told == ["W&B lacks some points, result.json has them: No space left on device"]
    assert capfd.readouterr() == ("", "")
    assert run_folders(folder) == []


def test_disabled_writes_nothing_and_does_not_import_wandb(folder: Path) -> None:
    code = """
import sys
from pathlib import Path
from pipebench.config import WandbConfig
from pipebench.tracking import make_tracker
tracker = make_tracker(WandbConfig("disabled", "pipebench"), Path(sys.argv[1]), "my sweep", print)
tracker.log_point(None, {}, [])
tracker.finish()
print([name for name in ("wandb", "torch") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout == "[]\n"
    assert list(folder.iterdir()) == []


def test_commands_quote_the_folder(folder: Path) -> None:
    view, sync = commands(folder)

    assert view == f"wandb leet '{folder}/wandb'"
    assert sync == f"wandb sync '{folder}/wandb'/offline-run-*"
