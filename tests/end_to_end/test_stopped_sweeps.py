"""Sweeps that are killed, interrupted, short of room or beside one another: the same command again ends them well.

PIPEBENCH_KILLS sets at how many random moments the sweep is killed (`make kills`: 20).
"""

import csv
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from wandb_server import KEY, wandb_server

from pipebench.record import read_json, read_result

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("PIPEBENCH_KILLS", "5"))
GRID = (
    "-m", "model=synthetic", "model.layers=2", "model.forward_s=0.002", "model.backward_s=0.002", "stages=1,2",
    "micro=2", "batch=4", "steps=2", "warmup=1", "partition=uniform", "threads=1",
)  # fmt: skip
NO_TRACKER = "trackers=[]"


GONE_S = 5.0


def start(folder: Path, *arguments: str, temporary: Path | None = None) -> subprocess.Popen[str]:
    """Start the command line as a user would, in a session of its own."""
    own = {} if temporary is None else {"TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-m", "pipebench", *GRID, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **own}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder: Path, *arguments: str, temporary: Path | None = None) -> tuple[int, str, str]:
    process = start(folder, *arguments, temporary=temporary)
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    assert any(line.startswith(beginning) for line in process.stdout), process.communicate()[1]


def wait_until_empty(folder: Path) -> None:
    """Wait as long as a fork server may take that was still loading when its sweep ended."""
    deadline = time.monotonic() + GONE_S
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, sorted(folder.rglob("*"))
        time.sleep(0.05)


def wait_until_it_listens(process: subprocess.Popen[str]) -> None:
    """Wait until the command catches SIGTERM, which Python by itself does not: before that, no line of ours has run."""
    while not int(caught_signals(process.pid), 16) >> (signal.SIGTERM - 1) & 1:
        assert process.poll() is None
        time.sleep(0.001)


def caught_signals(pid: int) -> str:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return line.split()[1]


def sweeps(folder: Path) -> list[Path]:
    return sorted((folder / "results").iterdir())


def table(sweep: Path) -> list[tuple[str, ...]]:
    """Return of each row what does not depend on the clock."""
    with (sweep / "results.csv").open() as file:
        return [(row["key"], row["status"], row["stages"], row["micro"]) for row in csv.DictReader(file)]


def finished_points(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("results/*/runs/*/result.json")}


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A sweep that nobody stopped: where it ran, in which temporary folder, and for how long."""

    folder: Path
    temporary: Path
    whole_s: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Its temporary folder has a path that is too long for sockets."""
    folder = tmp_path_factory.mktemp("undisturbed")
    temporary = folder / ("x" * 80)
    temporary.mkdir()
    began = time.monotonic()
    code, _, errors = run(folder, NO_TRACKER, temporary=temporary)
    assert (code, errors) == (0, "")
    return Undisturbed(folder, temporary, time.monotonic() - began)


@pytest.mark.fault("SIGKILL of the parent at random moments", "rows and keys of an undisturbed sweep, no point twice")
def test_a_sweep_killed_at_random_moments_ends_with_the_table_of_an_undisturbed_one(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    killed = tmp_path
    moments, stopped, before = random.Random(5), 0, {}
    for _ in range(KILLS):
        process = start(killed, NO_TRACKER)
        try:
            process.communicate(timeout=moments.uniform(0.1, undisturbed.whole_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            stopped += 1
        after = finished_points(killed)
        assert before.items() <= after.items(), "a finished point was run again"
        assert all(read_result(path).status == "ok" for path in after), "a point is half written"
        before = after
    code, _, errors = run(killed, NO_TRACKER)

    assert stopped > 0
    assert (code, errors) == (0, "")
    assert before.items() <= finished_points(killed).items()
    [expected] = [table(sweep) for sweep in sweeps(undisturbed.folder)]
    for sweep in (path for path in sweeps(killed) if (path / "sweep.json").exists()):
        assert table(sweep) == expected
        assert read_json(sweep / "sweep.json")["finished"]
        assert [path.name for path in sweep.rglob(".*") if path.is_file()] == [".lock"]


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.9, 1.6, 2.5])
@pytest.mark.fault(
    "Ctrl-C {after_s} s after the start", "a line or two, exit code 130, nothing left that holds nothing"
)
def test_an_interrupt_at_any_moment_of_the_start_is_a_line_or_two(
    after_s: float, tmp_path: Path, temporary: Path
) -> None:
    process = start(tmp_path, NO_TRACKER, temporary=temporary)
    wait_until_it_listens(process)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert re.fullmatch("interrupted.*\n(interrupted: .* goes on from here\n)?", errors), errors
    assert process.returncode == 130
    wait_until_empty(temporary)
    if (tmp_path / "results").exists():
        assert all((sweep / "sweep.json").exists() for sweep in sweeps(tmp_path))


@pytest.mark.fault("Ctrl-C while the process ends", "the exit code of the sweep or 130, at most one line")
def test_an_interrupt_at_the_very_end_says_little(tmp_path: Path, temporary: Path) -> None:
    process = start(tmp_path, NO_TRACKER, "engine=simulate", temporary=temporary)
    wait_for_line(process, "again ")
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    _, errors = process.communicate()
    assert process.returncode in (0, 130)
    [sweep] = sweeps(tmp_path)
    on = "" if read_json(sweep / "sweep.json")["finished"] else "interrupted: the same command goes on from here\n"
    assert errors in ("", "interrupted\n", on)
    wait_until_empty(temporary)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.fault("{number.name} once", "one line, a report, exit code 130, the point interrupted and run again")
def test_a_point_that_is_interrupted_says_so_and_is_run_again(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, NO_TRACKER, "steps=50")
    wait_for_line(process, "[1/4]")
    time.sleep(0.5)
    os.killpg(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    first, last = errors.splitlines()
    assert first == "interrupted: what was measured so far follows"
    assert last == "interrupted: the same command goes on from here"
    [sweep] = sweeps(tmp_path)
    assert [row[1] for row in table(sweep)] == ["interrupted", "pending"]
    assert [point["state"] for point in read_json(sweep / "sweep.json")["points"]] == ["interrupted", "pending"]

    before = finished_points(tmp_path)
    code, output, errors = run(tmp_path, NO_TRACKER, "steps=50")
    assert (code, errors) == (0, "")
    first, second, *_ = output.splitlines()
    assert first == "resuming: 0 of 2 done in " + str(sweep.relative_to(tmp_path)) + "; resume=never starts anew"
    assert second.endswith(": interrupted")
    assert [row[1] for row in table(sweep)] == ["ok", "ok"]
    assert sum(before[path] == content for path, content in finished_points(tmp_path).items() if path in before) == 1


@pytest.mark.fault("Ctrl-C twice", "at once, exit code 130, no temporary file, results whole, resumed")
def test_a_second_interrupt_leaves_at_once_and_nothing_corrupt(tmp_path: Path, temporary: Path) -> None:
    process = start(tmp_path, NO_TRACKER, temporary=temporary)
    wait_for_line(process, "[2/4]")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # the report takes seconds
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert process.returncode == 130
    wait_until_empty(temporary)
    assert all(read_result(path).status in ("ok", "interrupted") for path in finished_points(tmp_path))
    code, output, errors = run(tmp_path, NO_TRACKER)
    assert (code, errors) == (0, "")
    assert output.startswith("resuming: ")
    [sweep] = sweeps(tmp_path)
    assert [row[1] for row in table(sweep)] == ["ok", "ok"]


def test_a_sweep_told_to_start_anew_says_with_what_its_command_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, NO_TRACKER, "steps=50", "resume=never")
    wait_for_line(process, "[1/4]")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("interrupted: the same command, with resume=auto, goes on from here\n")
    code, output, errors = run(tmp_path, NO_TRACKER, "steps=50", "resume=never", "resume=auto")
    assert (code, errors) == (0, "")
    assert output.startswith("resuming: ")


def test_a_result_that_becomes_unreadable_while_the_sweep_runs_makes_the_exit_code_1(tmp_path: Path) -> None:
    process = start(tmp_path, NO_TRACKER, "steps=50")
    wait_for_line(process, "[2/4]")
    process.send_signal(signal.SIGSTOP)
    [path, _] = sorted(finished_points(tmp_path), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    path.write_text(path.read_text().replace('"status":"ok"', '"status":"unchecked"'))
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (1, "")
    [sweep] = sweeps(tmp_path)
    assert [row[1] for row in table(sweep)] == ["unreadable", "ok"]


@pytest.mark.fault("two sweeps at once in one folder", "neither sees the other")
def test_two_sweeps_at_once_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    both = [start(tmp_path, NO_TRACKER) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=240)
        assert (process.returncode, errors) == (0, "")
    first, second = sweeps(tmp_path)
    assert table(first) == table(second)
    assert {row[1] for row in table(first)} == {"ok"}


@pytest.mark.fault("disk full", "one line, other results untouched, resumed when there is room")
def test_a_full_disk_is_one_line_and_the_same_command_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A limit on the size of a file refuses to write as a full disk does."""
    process = start(tmp_path, NO_TRACKER)
    wait_for_line(process, "[2/4]")
    usual = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    _, errors = process.communicate(timeout=60)
    assert usual[1] == resource.RLIM_INFINITY
    assert process.returncode == 1
    assert errors.startswith("ResultError: ")
    assert errors.count("\n") == 1
    assert "cannot be written: " in errors
    assert errors.endswith("; once it can be, the same command goes on from here\n")
    before = finished_points(tmp_path)
    assert len(before) >= 2
    code, output, errors = run(tmp_path, NO_TRACKER)
    assert (code, errors) == (0, "")
    assert output.startswith("resuming: ")
    assert before.items() <= finished_points(tmp_path).items()


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.fault("SIGKILL of the parent, W&B {mode}", "no temporary file after 5 s")
def test_a_killed_sweep_leaves_no_temporary_file_of_wandb(
    mode: str, loopback_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        process = start(tmp_path, "trackers=[wandb]", f"wandb.mode={mode}", temporary=temporary)
        wait_for_line(process, "[2/4]")
        assert list(temporary.glob("*/*wandb*"))
        process.kill()
        process.communicate()
        wait_until_empty(temporary)


@pytest.mark.fault("W&B's port refused", "no temporary file after the sweep")
def test_a_sweep_without_its_server_leaves_no_temporary_file(
    loopback_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    process = start(tmp_path, "trackers=[wandb]", "wandb.mode=online", "engine=simulate", temporary=temporary)
    output, _ = process.communicate(timeout=120)
    assert "W&B is not reachable" in output
    assert process.returncode == 0
    assert list(temporary.iterdir()) == []


def test_what_a_dead_sweep_left_is_removed_by_the_next(tmp_path: Path, temporary: Path) -> None:
    """Without workers there is no fork server that could."""
    process = start(tmp_path, NO_TRACKER, "engine=simulate", temporary=temporary)
    wait_for_line(process, "[1/")
    process.kill()
    process.communicate()
    [left] = temporary.iterdir()
    (temporary / "pipebench-of-another").mkdir()
    assert run(tmp_path, NO_TRACKER, "engine=simulate", temporary=temporary)[0] == 0
    assert [path.name for path in temporary.iterdir()] == ["pipebench-of-another"], left


def test_a_temporary_folder_with_a_long_path_does_not_keep_a_sweep_from_running(undisturbed: Undisturbed) -> None:
    [sweep] = sweeps(undisturbed.folder)
    assert [row[1] for row in table(sweep)] == ["ok", "ok"]
    assert list(undisturbed.temporary.iterdir()) == []


def test_trackers_have_each_point_of_a_resumed_sweep_once(loopback_only: None, tmp_path: Path) -> None:
    arguments = ["trackers=[wandb,tensorboard]"]
    process = start(tmp_path, *arguments)
    wait_for_line(process, "[2/4]")
    process.kill()
    process.communicate()
    assert run(tmp_path, *arguments)[0] == 0
    assert run(tmp_path, *arguments, f"resume={sweeps(tmp_path)[0]}", "retry=all")[0] == 0
    [sweep] = sweeps(tmp_path)
    runs = [path.name.rpartition("-")[2] for path in (sweep / "wandb").glob("offline-run-*")]
    assert len(runs) == len(set(runs)) == 3 + 1  # two points, a reference, the report
    files = [path.name.rpartition(".")[2] for path in sweep.glob("tensorboard/*/*") if not path.name.endswith(".sweep")]
    assert sorted(files) == sorted(path.name for path in (sweep / "runs").iterdir())
    assert max(len(list(folder.iterdir())) for folder in (sweep / "tensorboard").iterdir()) == 1
