"""A point that goes wrong is a row that says so, and the sweep goes on."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipebench.cli import main
from pipebench.compose import compose_grid
from pipebench.config import RunConfig, key_of, resolve
from pipebench.errors import PointError
from pipebench.harness import sweep as harness
from pipebench.harness.jobs import MEASURE_RANK, RankJob
from pipebench.harness.launch import PRELOADED, run_group
from pipebench.harness.sweep import Observer, Plan, plan_sweep, run_sweep
from pipebench.machine import Machine
from pipebench.record import RunResult, read_result
from pipebench.report.sweep import read_sweep
from pipebench.rows import row_of

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = (
    "-m", "stages=2", "micro=1,2", "model.layers=1", "model.width=16", "model.feed_forward=32", "model.sequence=8",
    "batch=4", "steps=2", "warmup=1", "partition=uniform",
)  # fmt: skip


SILENCE_S = 6.0
GONE_S = 5.0
FINE = "ok"
HOW_IT_ENDS = {
    "raise": ("error", "rank 1 failed {where}: {error}", "ZeroDivisionError: division by zero"),
    "exit": ("crashed", "rank 1 died {where}, exit code 7", "exit code 7"),
    "kill": ("crashed", "rank 1 was killed {where} by SIGKILL", "SIGKILL"),
    "stop": ("timeout", "no progress for 6 s (progress_limit_s): rank 1 is stopped and ", "no progress for 6 s"),
    "sleep": ("timeout", "no progress for 6 s (progress_limit_s): rank ", "no progress for 6 s"),
    "allocate": ("oom", "rank 1 failed {where}: ", "memory"),
    "lose": ("nan", "rank 1: the loss of step ", "nan"),
}
"""Status, how the message begins, and what the exception's name holds."""

PHASES = {"checking": "checking gradients", "warming": "warming up", "measuring": "measuring",
          "profiling": "profiling memory", "leaving": "leaving"}  # fmt: skip


def plan_of(folder: Path, *arguments: str) -> Plan:
    """Plan a two-point sweep without its reference; `folder` is where a broken rank notes when it broke."""
    grid = compose_grid([*ARGUMENTS, f"results_dir={folder}", *arguments])
    assert grid is not None
    plan = plan_sweep([resolve(point, Machine(2, 0)) for point in grid.points], grid.swept, "faults")
    return dataclasses.replace(plan, references={}, reference_of={}, again=None)


def break_with(worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(harness, "MEASURE_RANK", f"broken_worker:{worker}")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))


def run_with(worker: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[int, RunResult]:
    """Run a two-point sweep with another worker function; return the results by M."""
    break_with(worker, monkeypatch, tmp_path)
    plan = plan_of(tmp_path, *arguments)
    folder = tmp_path / "sweep"
    folder.mkdir()
    results = run_sweep(plan, folder, Observer(*[lambda *_: None] * 5))
    assert [row["status"] for row in read_sweep(folder).rows] == [results[key].status for key in plan.points]
    assert list((tmp_path / "scratch").iterdir()) == []
    return {config.micro: results[key] for key, config in plan.points.items()}


def workers() -> list[psutil.Process]:
    """Return the living descendants of this process that are neither the fork server nor its helper."""
    servers = ("multiprocessing.forkserver import", "multiprocessing.resource_tracker import")
    direct = psutil.Process().children()
    helpers = {child.pid for child in direct if any(name in " ".join(child.cmdline()) for name in servers)}
    everybody = psutil.Process().children(recursive=True)
    return [child for child in everybody if child.pid not in helpers and child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def num_descriptors() -> int:
    """Return how many files this process holds open between sweeps, the fork server's among them."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return psutil.Process().num_fds()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "phase"),
    [(fault, phase) for fault in HOW_IT_ENDS for phase in PHASES if fault != "lose"]
    + [("lose", "warming"), ("lose", "measuring")],
)
def test_a_fault_is_a_row_with_its_cause_and_costs_no_other_point(
    fault: str,
    phase: str,
    num_descriptors: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    promise: Callable[[str, str, str], None],
) -> None:
    """The whole story, for every fault in every phase: status, cause, time, what is left, and the next point."""
    status, message, exception = HOW_IT_ENDS[fault]
    # Asleep between two actions, a rank looks like those that wait for it.
    cause = None if (fault, phase) == ("sleep", "leaving") else 1
    promised = f"{status}, cause rank {cause}, all gone within {GONE_S:.0f} s, next point {FINE}"
    promise(f"{fault} while {PHASES[phase]}", promised, "broken")
    break_with(f"{fault}_while_{phase}", monkeypatch, tmp_path)
    plan = plan_of(tmp_path, f"progress_limit_s={SILENCE_S}")
    done_s: list[float] = []
    left: list[psutil.Process] = []

    def point_done(result: RunResult) -> None:
        done_s.append(time.perf_counter())
        left.extend(workers())

    observer = Observer(*[lambda *_: None] * 2, point_done, *[lambda *_: None] * 2)
    first, second = run_sweep(plan, tmp_path, observer).values()
    assert first.failure is not None
    where = f"while {PHASES[phase]}" if phase == "leaving" else f"at {first.failure.action}"
    assert first.failure.rank == cause
    assert first.failure.stage == (None if phase == "leaving" or fault == "lose" else 1)
    gone_s = done_s[0] - float((tmp_path / "fault").read_text()) - (SILENCE_S if status == "timeout" else 0.0)
    assert first.status == status, first
    error = exception if phase == "leaving" else "division by zero"
    assert first.message.startswith(message.format(where=where, error=error))
    assert exception in first.failure.exception
    assert gone_s < GONE_S
    assert left == []
    assert (second.status, second.failure) == (FINE, None)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert psutil.Process().num_fds() <= num_descriptors
    gone = f"all gone within {max(1, math.ceil(gone_s))} s"
    seen = f"{first.status}, cause rank {first.failure.rank}, {gone}, next point {second.status}"
    promise(f"{fault} while {PHASES[phase]}", promised, seen)


@pytest.mark.fault("gradients 0.1 % too large", "wrong, no speed-up")
def test_slightly_wrong_gradients_make_a_point_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for result in run_with("scaled_gradient", monkeypatch, tmp_path).values():
        assert result.status == "wrong"
        row = row_of(result, result)
        assert row["grad_rel_error"] == pytest.approx(1e-3, rel=1e-3)
        assert row["speedup"] is None


def test_a_raising_stage_is_named_before_the_ranks_that_failed_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_with("raise_while_measuring", monkeypatch, tmp_path)[1]
    assert result.message == "rank 1 failed at 1F0: division by zero"
    assert result.failure is not None
    assert (result.failure.rank, result.failure.stage, result.failure.action) == (1, 1, "1F0")
    assert result.failure.output[-1] == "ZeroDivisionError: division by zero"
    assert len(result.failure.output) <= 20
    assert read_result(tmp_path / "sweep" / "runs" / result.key / "result.json").failure == result.failure


def test_a_killed_rank_is_the_cause_and_its_neighbours_error_comes_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failure = run_with("kill_while_measuring", monkeypatch, tmp_path)[1].failure
    assert failure is not None
    assert (failure.rank, failure.action, failure.exception) == (1, "1F0", "SIGKILL")
    [other] = failure.others
    assert other.startswith("rank 0 failed ")


@pytest.mark.alone
def test_a_hang_says_for_each_rank_what_it_waits_for_and_from_whom(
    num_descriptors: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run_with("stop_while_measuring", monkeypatch, tmp_path, f"progress_limit_s={SILENCE_S}")[1]
    assert re.fullmatch(
        r"no progress for 6 s \(progress_limit_s\): rank 1 is stopped and runs 1F0 since [5-7] s; "
        r"rank 0 waits at 0B0 for 1B0 from rank 1 since [5-7] s",
        result.message,
    )


@pytest.mark.fault("a point that takes longer than point_limit_s", "timeout, what each rank does named")
def test_a_point_that_takes_longer_than_its_limit_ends_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run_with("sleep_while_warming", monkeypatch, tmp_path, "point_limit_s=8", "progress_limit_s=60")[1]
    assert result.status == "timeout"
    assert result.message.startswith("not done after 8 s (point_limit_s): rank 1 runs 1F0 since ")


def test_a_point_that_is_cut_off_between_steps_says_how_many_were_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = ("point_limit_s=8", "progress_limit_s=60")
    result = run_with("talkative", monkeypatch, tmp_path, "micro=1", "steps=100000", *limits)[1]
    assert result.status == "timeout"
    assert re.match(
        r"not done after 8 s \(point_limit_s\), measuring, [1-9]\d* of 100000 steps done: rank [01] ", result.message
    )
    assert "is measuring" not in result.message


def test_what_workers_print_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with("talkative", monkeypatch, tmp_path)
    assert capsys.readouterr().err == "rank 0 of 2 says so\nrank 1 of 2 says so\n" * 2


@pytest.mark.fault("temporary folder full in mid-sweep", "error, the cause and TMPDIR named")
def test_a_full_temporary_folder_is_the_cause_that_is_named(
    num_descriptors: int, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a rank says of its failure goes into a file that lies there too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(harness, "MEASURE_RANK", "broken_worker:fills_the_disk")
    monkeypatch.setattr("tempfile.tempdir", str(tiny_disk))
    plan = plan_of(tmp_path, "micro=1")
    [result] = run_sweep(plan, tmp_path, Observer(*[lambda *_: None] * 5)).values()
    assert result.status == "error"
    cause = "rank 0 failed while starting: OSError: [Errno 28] No space left on device"
    assert result.message == f"{cause}; no room is left in {tiny_disk} (TMPDIR)"


@pytest.mark.fault("a point fails and on_failure=stop", "the rest stays pending, exit code 1")
def test_a_sweep_told_to_stop_at_a_failure_runs_no_further_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_with("raise_while_warming", monkeypatch, tmp_path)
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled", "on_failure=stop"]) == 1
    assert "stopped after a failure (on_failure=stop): 1 of 2 points were not run" in capsys.readouterr().out
    [folder] = tmp_path.glob("*-sweep")
    assert [row["status"] for row in read_sweep(folder).rows] == ["error", "pending"]
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled", "on_failure=stop"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("resuming: 1 of 2 done")
    assert "gone past (on_failure=stop): stages=2 micro=1: error; retry=failed measures it again" in output
    assert "stopped after a failure" not in output
    assert [row["status"] for row in read_sweep(folder).rows] == ["error", "ok"]


def test_a_failed_point_is_not_run_again_in_later_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_with("raise_while_checking", monkeypatch, tmp_path)
    started = []

    def point_started(config: RunConfig, round_number: int) -> None:
        started.append((config.micro, round_number))

    run_sweep(plan_of(tmp_path, "repeats=2"), tmp_path, Observer(point_started, *[lambda *_: None] * 4))
    assert started == [(1, 0), (2, 0), (2, 1)]


@pytest.mark.alone
@pytest.mark.fault
@pytest.mark.parametrize("stopped", [False, True], ids=["", "one rank stopped"])
def test_workers_of_a_killed_parent_end_themselves_and_clean_up(
    stopped: bool, tmp_path: Path, temporary: Path, promise: Callable[[str, str, str], None]
) -> None:
    fault = "SIGKILL of the parent" + (", a rank of which is stopped" if stopped else "")
    promised = "workers, fork server and all temporary files gone within 5 s"
    promise(fault, promised, "broken")
    command = [sys.executable, "-m", "pipebench", "stages=2", "micro=2", "model=synthetic", "model.layers=4",
               "model.forward_s=0.0002",
               "model.backward_s=0.0002", "steps=500", "batch=8", "gate=off", "wandb.mode=disabled"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as parent:
        try:
            wait_for(lambda: any("output-1" in names for _, _, names in os.walk(temporary)), 90)
            time.sleep(1)
            descendants = psutil.Process(parent.pid).children(recursive=True)
            if stopped:
                max(descendants, key=lambda process: process.create_time()).suspend()
        finally:
            parent.kill()
    assert len(descendants) >= 4  # the fork server, its resource tracker, two ranks
    began = time.monotonic()
    wait_for(lambda: not any(is_alive(process) for process in descendants), GONE_S)
    wait_for(lambda: not list(temporary.iterdir()), GONE_S)
    promise(fault, promised, f"gone within {max(1, math.ceil(time.monotonic() - began))} s")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(look: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.05)


def fail_the_second_time(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a point is measured that was measured before."""
    measured = set()

    def run_once(function: str, jobs: list[RankJob], *rest: Any) -> Any:
        key = key_of(jobs[0].config)
        if function == MEASURE_RANK and key in measured:
            raise error
        measured.update([key] if function == MEASURE_RANK else [])
        return run_group(function, jobs, *rest)

    monkeypatch.setattr(harness, "run_group", run_once)


def test_a_second_look_that_fails_is_one_warning_and_costs_no_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_the_second_time(PointError("gone the second time"), monkeypatch)
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled"]) == 0
    told = capsys.readouterr()
    [line] = [line for line in told.out.splitlines() if line.startswith("[") and "gone the second time" in line]
    assert line == "[4/4] stages=2 micro=1 again, for the noise floor error  gone the second time"
    [folder] = tmp_path.iterdir()
    assert [row["status"] for row in read_sweep(folder).rows] == ["ok", "ok"]
    assert "K=2, M=1 measured twice, error: gone the second time." in (folder / "report.md").read_text()


def test_a_sweep_that_is_interrupted_in_its_second_look_says_so_and_has_its_points(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_the_second_time(KeyboardInterrupt(), monkeypatch)
    assert main([*ARGUMENTS, f"results_dir={tmp_path}", "wandb.mode=disabled"]) == 130
    [folder] = tmp_path.iterdir()
    assert [row["status"] for row in read_sweep(folder).rows] == ["ok", "ok"]
    assert "**Noise floor.** Not measured." in (folder / "report.md").read_text()
