"""A real sweep as its trackers hold it: every number of the table, during the sweep and pushed again from its files."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tracked import history, run_folders, run_of, summary
from wandb_server import ENTITY, KEY, wandb_server

from pipebench.record import read_json
from pipebench.report.sweep import read_sweep
from pipebench.tracking.curves import run_name, series_of
from pipebench.tracking.wandb_runs import REPORT

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model=mlp", "model.layers=2", "model.width=8", "batch=4", "steps=2", "warmup=1", "partition=uniform",
    "threads=1",
)  # fmt: skip
WORDS = ("key", "status", "schedule", "recompute", "partition", "model", "engine", "message", "flags")
COUNTS = ("stages", "micro", "replicas", "chunks")
GRID = ("-m", "stages=2,1", "micro=2,1", *SMALL)


def environment() -> dict[str, str]:
    """Return this process's, without a word to W&B, and with our code in front."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "PYTHONPATH": str(ROOT), "WANDB_BASE_URL": "http://127.0.0.1:9"}


def run(module: str, *arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder, env={**environment(), **variables}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep over K and M with both trackers, and what the command printed."""
    folder = tmp_path_factory.mktemp("sweep")
    done = run("pipebench", *GRID, "trackers=[wandb,tensorboard]", "wandb.project=mine", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = (folder / "results").iterdir()
    return results, done.stdout


def copy_of(results: Path, parent: Path) -> Path:
    """Return a copy of a sweep's folder without what trackers wrote."""
    theirs = shutil.ignore_patterns("wandb", "tensorboard")
    return Path(shutil.copytree(results, parent / "copied sweep", ignore=theirs))


@pytest.fixture
def copy(sweep: tuple[Path, str], tmp_path: Path) -> Path:
    return copy_of(sweep[0], tmp_path)


def csv_rows(results: Path) -> list[dict[str, str]]:
    with (results / "results.csv").open() as file:
        return list(csv.DictReader(file))


def numbers(row: dict[str, str]) -> dict[str, float]:
    """Return the columns of a line of results.csv that hold a number, or a flag as 0 or 1."""
    flags = {"True": "1", "False": "0"}
    return {name: float(flags.get(text, text)) for name, text in row.items() if text and name not in WORDS}


def assert_wandb_holds(results: Path) -> None:
    table = csv_rows(results)
    assert len(table) == 4
    for row in table:
        held = summary(run_of(results, row["key"]))["summary"]
        assert len(numbers(row)) > 25
        assert {name: held.get(name) for name in numbers(row)} == pytest.approx(numbers(row)), row["key"]


def test_wandb_holds_every_number_of_the_csv(sweep: tuple[Path, str]) -> None:
    results, _ = sweep
    assert len(run_folders(results)) == 5  # four points, the one-device reference among them, and the sweep's own
    assert_wandb_holds(results)


def test_wandb_s_run_of_the_sweep_holds_the_series_the_table_and_the_figures(sweep: tuple[Path, str]) -> None:
    results, _ = sweep
    table = read_sweep(results).rows
    run_folder = run_of(results, REPORT)
    over_micro = {item["M"]: item for item in history(run_folder) if "M" in item}

    assert list(over_micro) == [1, 2]
    series = series_of(table)
    assert {line.name for line in series if line.chart == "bubble"} == {
        f"K={stages} {how}" for stages in (1, 2) for how in ("measured", "replayed", "bound")
    }
    for line in series:
        for micro, value in line.values.items():
            assert over_micro[micro][f"{line.chart}/{line.name}"] == pytest.approx(value)
    [written] = run_folder.glob("files/media/table/results*.json")
    held = json.loads(written.read_text())
    assert [dict(zip(held["columns"], line, strict=True)) for line in held["data"]] == table
    figures = {path.name.partition("_")[0]: path for path in run_folder.glob("files/media/images/figures/*.png")}
    assert set(figures) == {path.stem for path in results.glob("*.png")} >= {"bubble", "throughput"}
    for name, path in figures.items():
        assert path.read_bytes() == (results / f"{name}.png").read_bytes()


def test_tensorboard_holds_every_number_of_the_csv(sweep: tuple[Path, str]) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs pipebench[tensorboard]"
    )
    results, _ = sweep
    names = {row["key"]: run_name(row) for row in read_sweep(results).rows}
    for row in csv_rows(results):
        events = event_accumulator.EventAccumulator(str(results / "tensorboard" / names[row["key"]])).Reload()
        held = {tag.removeprefix("summary/"): events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
        measured = {
            name: value for name, value in numbers(row).items() if name not in ("stages", "micro", "replicas", "chunks")
        }
        assert {name: held.get(name) for name in measured} == pytest.approx(measured, rel=1e-5), row["key"]


def test_the_end_of_a_sweep_says_how_to_look_at_the_runs(sweep: tuple[Path, str]) -> None:
    results, printed = sweep
    told = [line.split(maxsplit=1) for line in printed.splitlines()[-3:]]

    where = f"results/{results.name}"
    assert told == [
        ["W&B", f"wandb leet {where}/wandb"],
        ["W&B", f"wandb sync {where}/wandb/offline-run-*"],
        ["TensorBoard", f"tensorboard --logdir {where}/tensorboard"],
    ]


@pytest.fixture(scope="module")
def pushed(sweep: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The sweep's folder as of before trackers and pictures, then pushed twice, and what each push printed."""
    folder = copy_of(sweep[0], tmp_path_factory.mktemp("pushed"))
    for picture in folder.glob("*.png"):
        picture.unlink()
    printed = []
    for _ in range(2):
        done = run("pipebench.push", str(folder), "--project", "other", folder=folder.parent)
        assert (done.returncode, done.stderr) == (0, "")
        printed.append(done.stdout)
    return folder, printed


def test_pushing_twice_leaves_one_run_a_point_and_one_of_the_sweep(pushed: tuple[Path, list[str]]) -> None:
    folder, _ = pushed
    assert len(run_folders(folder)) == 5
    assert_wandb_holds(folder)


def test_pushing_takes_what_it_is_told_and_makes_the_pictures_that_are_missing(
    pushed: tuple[Path, list[str]],
) -> None:
    folder, _ = pushed
    run_folder = run_of(folder, REPORT)
    assert summary(run_folder)["project"] == "other"
    assert len(list(run_folder.glob("files/media/images/figures/*.png"))) == len(list(folder.glob("*.png"))) > 0


def test_pushing_says_how_many_runs_there_are_and_how_to_look_at_them(pushed: tuple[Path, list[str]]) -> None:
    folder, printed = pushed
    runs = shlex.quote(str(folder / "wandb"))
    for each in printed:
        assert each.splitlines() == [
            "4 runs of points and 1 of the sweep are in place",
            f"W&B         wandb leet {runs}",
            f"W&B         wandb sync {runs}/offline-run-*",
        ]


def test_pushing_twice_online_sends_the_same_runs(copy: Path) -> None:
    with wandb_server() as server:
        for _ in range(2):
            done = run(
                "pipebench.push", str(copy), "--mode", "online", "--entity", ENTITY,
                folder=copy.parent, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")
    address = done.stdout.split()[-1]

    first, second = server.runs[:5], server.runs[5:]
    assert [run["name"] for run in first] == [run["name"] for run in second]
    assert len({run["name"] for run in first}) == 5
    assert {run["entity"] for run in first} == {ENTITY}
    assert [run["jobType"] for run in first] == ["point"] * 4 + [REPORT]
    assert address == f"{server.url}/{ENTITY}/mine/runs/{first[-1]['name']}"
    assert "wandb sync" not in done.stdout


def test_pushing_online_without_a_key_leaves_offline_runs_and_fails(copy: Path) -> None:
    done = run("pipebench.push", str(copy), "--mode", "online", folder=copy.parent, HOME=str(copy.parent))

    assert done.returncode == 1
    assert done.stderr.startswith("W&B is not reachable, logging offline from here on: ")
    assert done.stderr.count("\n") == 1
    assert "in place" not in done.stdout
    assert "wandb sync" in done.stdout
    assert len(run_folders(copy)) == 5


def test_a_folder_that_is_no_sweep_is_one_line_and_code_2(copy: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, copy):
        shutil.rmtree(copy / "runs", ignore_errors=True)
        done = run("pipebench.push", str(folder), folder=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"ResultError: {folder}")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
        assert not (folder / "wandb").exists()


def test_an_interrupted_sweep_still_has_its_runs(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipebench", *GRID, "steps=50", "trackers=[wandb]"],
        cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert next(line for line in process.stdout if line.startswith("[1/5]"))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: W&B's service and the workers get it too
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert errors.splitlines() == [
        "interrupted: what was measured so far follows",
        "interrupted: the same command goes on from here",
    ]
    assert "pending" in output
    [results] = (tmp_path / "results").iterdir()
    done = [point["key"] for point in read_json(results / "sweep.json")["points"] if point["state"] == "ok"]
    assert 1 <= len(done) < 4
    assert len(run_folders(results)) == len(done) + 1
    assert summary(run_of(results, REPORT))["exit_code"] == 0
