"""Real sweeps: real processes over gloo, real files, read back.

The first is started from outside, as a user would; where that makes no difference, sweeps run in this process, which
has its imports and its fork server already.
"""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from test_stopped_sweeps import wait_until_empty

from pipebench.cli import main
from pipebench.compose import EXPERIMENTS_DIR
from pipebench.peers.abilities import TORCH_SCHEDULES
from pipebench.record import read_result, traces
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import ZB_AUTO
from pipebench.schedule.validate import validate
from pipebench.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=2", "model.width=32", "model.feed_forward=64", "model.sequence=16", "batch=6"]
QUICK = ["steps=3", "warmup=2"]
OF_THIS_VENV = ["engine=pipebench,torch", "recompute=never"]


def run(*arguments: str, folder: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "pipebench", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def sweep_here(folder: Path, *arguments: str) -> Path:
    """Run the command line in this process, and return the folder of the sweep."""
    results_dir = folder / "results"
    assert main([*arguments, f"results_dir={results_dir}", "wandb.mode=disabled", "noise_floor=false"]) == 0
    [results] = results_dir.iterdir()
    return results


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A real sweep: two processes a point, a ragged mini-batch, recompute on and off, every schedule."""
    folder = tmp_path_factory.mktemp("sweep")
    done = run(
        "-m",
        "stages=2",
        "micro=4",
        "schedule=gpipe,1f1b,naive",
        "recompute=never,always",
        "repeats=2",
        *SMALL,
        *QUICK,
        folder=folder,
    )
    [results] = (folder / "results").iterdir()
    return results, done


def rows_of(results: Path) -> list[dict[str, str]]:
    with (results / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_ends_well_and_says_where_things_are(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = sweep
    assert done.returncode == 0, done.stderr
    for word in ("results.csv", "report.md", "pipebench.report", "wandb sync", "bubble"):
        assert word in done.stdout


def test_every_point_is_a_row_with_right_gradients(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    results, _ = sweep
    rows = rows_of(results)
    assert len(rows) == 6
    assert {(row["schedule"], row["recompute"]) for row in rows} == {
        (schedule, recompute) for schedule in ("gpipe", "1f1b", "naive") for recompute in ("never", "always")
    }
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["grad_rel_error"]) < 1e-5
        assert float(row["step_ci_low_s"]) <= float(row["step_s"]) <= float(row["step_ci_high_s"])
        assert float(row["samples_per_s"]) == pytest.approx(6 / float(row["step_s"]))
        assert float(row["tokens_per_s"]) == pytest.approx(16 * 6 / float(row["step_s"]))
        assert 0 <= float(row["bubble_replayed"]) < 1
        assert float(row["peak_memory_bytes"]) > 0
        assert float(row["speedup"]) > 0


def test_bounds_in_the_table_are_the_closed_forms(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for row in rows_of(sweep[0]):
        plain = 0.5 if row["schedule"] == "naive" else 1 / (int(row["micro"]) + 1)
        if row["recompute"] == "never":
            assert float(row["bubble_bound"]) == pytest.approx(plain)
        else:  # work that everybody has, and no more fill and drain
            assert float(row["bubble_bound"]) < plain


def test_losses_do_not_depend_on_schedule_or_recompute(
    sweep: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    for column in ("loss_first", "loss_last"):
        losses = [float(row[column]) for row in rows_of(sweep[0])]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def test_one_point_is_measured_a_second_time_for_the_noise_floor(
    sweep: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Apart from the point's own result, in as many groups of processes, and counted in what is shown."""
    results, done = sweep
    state = json.loads((results / "sweep.json").read_text())
    assert [path.parent.name for path in results.rglob("again.json")] == [state["noise_floor"]]
    assert state["noise_floor"] == state["points"][0]["key"]
    point = results / "runs" / state["noise_floor"]
    first, again = (json.loads((point / name).read_text()) for name in ("result.json", "again.json"))
    assert (again["key"], again["config"], again["status"]) == (first["key"], first["config"], "ok")
    steps = [[rank["step_s"] for repeat in each["repeats"] for rank in repeat["ranks"]] for each in (first, again)]
    assert [len(each) for each in steps] == [4, 4]
    assert steps[0] != steps[1]
    assert "[16/16] stages=2 micro=4 schedule=gpipe recompute=never again, for the noise floor ok" in done.stdout
    assert "K=2, M=4, schedule=gpipe, recompute=never measured twice: ratio " in (results / "report.md").read_text()


def test_recompute_saves_memory(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    peaks = {
        row["recompute"]: float(row["peak_memory_bytes"]) for row in rows_of(sweep[0]) if row["schedule"] == "gpipe"
    }
    assert peaks["always"] < peaks["never"]


def test_raw_samples_and_traces_are_on_disk(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    results, _ = sweep
    state = json.loads((results / "sweep.json").read_text())
    assert [point["state"] for point in state["points"]] == ["ok"] * 6
    for point in state["points"]:
        result = json.loads((results / "runs" / point["key"] / "result.json").read_text())
        assert len(result["repeats"]) == 2
        for repeat in result["repeats"]:
            assert [rank["rank"] for rank in repeat["ranks"]] == [0, 1]
            for rank in repeat["ranks"]:
                assert len(rank["step_s"]) == len(rank["spans"]) == 3
        trace = json.loads((results / "runs" / point["key"] / "trace.json").read_text())
        names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {"0F0", "1B0", "0O", "1O"} <= names


def test_the_report_can_be_rebuilt_from_files_without_torch(
    sweep: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    results, _ = sweep
    before = (results / "results.csv").read_text()
    (results / "results.csv").unlink()
    program = (
        "import sys; from pipebench.report.__main__ import main; code = main([sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(results)], check=True, cwd=tmp_path, env=environment)
    assert (results / "results.csv").read_text() == before


def test_nothing_is_left_behind(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    results, _ = sweep
    assert not [path for path in results.rglob(".*") if path.is_file() and "result.json" in path.name]
    assert {path.name for path in results.iterdir()} >= {"sweep.json", "runs", "results.csv", "report.md", "wandb"}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS_DIR.glob("*.yaml")))
def test_every_experiment_runs_with_two_steps(name: str, tmp_path: Path) -> None:
    smaller = {
        "schedules": ["model.layers=3", *SMALL[1:], "micro=4", "schedule=gpipe,interleaved,zb_v"],
        "bubble_vs_bound": ["model.forward_s=0.0001", "model.backward_s=0.0002", "batch=4"],
        "mlp": ["batch=32", "model.layers=4"],
        "peers": [*OF_THIS_VENV, *SMALL, "micro=3", "partition=uniform"],
        "peers_mlp": [*OF_THIS_VENV, "batch=32", "model.layers=4", "micro=4"],
    }
    overrides = smaller.get(name, SMALL)
    fixed = ["stages=2", "micro=2,4", "steps=2", "warmup=1", "repeats=1"]
    results = sweep_here(tmp_path, "-m", f"experiment={name}", *fixed, *overrides)
    assert not list(results.rglob("again.json"))
    assert results.name.endswith(f"-{name}")
    skipped = {"skipped"} if name.startswith("peers") else set()  # not every engine has every schedule
    assert {row["status"] for row in rows_of(results)} - skipped == {"ok"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_reports_what_it_has_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipebench", "-m", "micro=1,2,3", "steps=1000", *SMALL, "wandb.mode=disabled"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not list(temporary.rglob("store")):  # a point is running
        time.sleep(0.1)
        assert process.poll() is None, process.communicate()
    time.sleep(1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "pending" in output
    wait_until_empty(temporary)
    [results] = (tmp_path / "results").iterdir()
    assert len(rows_of(results)) == 3


@pytest.mark.alone
def test_sleeping_stages_come_close_to_the_bound(tmp_path: Path) -> None:
    """K=4 on any machine, 10 ms stages: far from the naive 0.75, and never better than the bound by more than noise."""
    done = run(
        "model=synthetic", "model.layers=4", "model.forward_s=0.01", "model.backward_s=0.02", "stages=4", "micro=8",
        "batch=8", "steps=3", "warmup=1", "gate=off", "wandb.mode=disabled", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = (tmp_path / "results").iterdir()
    [row] = rows_of(results)
    assert float(row["bubble_bound"]) == pytest.approx(3 / 11)
    assert 0.25 < float(row["bubble_fraction"]) < 0.5
    assert row["oversubscribed"] == "False"


@pytest.fixture(scope="module")
def torch_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every schedule of torch.distributed.pipelining, with recompute and without."""
    results = sweep_here(
        tmp_path_factory.mktemp("torch"), "-m", "engine=torch", f"schedule={','.join(TORCH_SCHEDULES)}",
        "recompute=never,always", "stages=2", "micro=3", *SMALL, "steps=2", "warmup=1",
    )  # fmt: skip
    assert [row["status"] for row in rows_of(results)].count("ok") == 10
    return results


def test_every_schedule_of_torch_is_measured_and_checked_as_our_own(torch_engine: Path) -> None:
    rows = [row for row in rows_of(torch_engine) if row["status"] == "ok"]
    assert {row["schedule"] for row in rows} == set(TORCH_SCHEDULES)
    for row in rows:
        assert float(row["grad_rel_error"]) < 1e-5
        assert float(row["loss_last"]) == pytest.approx(float(rows[0]["loss_last"]), rel=1e-5)
        assert 0 < float(row["bubble_fraction"]) < 1
        parts = [float(value) for name, value in row.items() if name.startswith("ledger_")]
        assert sum(parts) == pytest.approx(float(row["step_s"]))


def test_torch_recomputes_to_save_memory_and_never_in_a_split_backward(torch_engine: Path) -> None:
    rows = {(row["schedule"], row["recompute"]): row for row in rows_of(torch_engine)}
    for schedule in TORCH_SCHEDULES:
        again = rows[schedule, "always"]
        if schedule in ("zb_h1", "zb_v"):
            assert (again["status"], "split backward" in again["message"]) == ("skipped", True)
        else:
            assert float(again["activations_bytes"]) < float(rows[schedule, "never"]["activations_bytes"])


TORCH_ROWS = {
    "gpipe": "0F0 0F1 0F2 0B0 0B1 0B2 0O / 1F0 1F1 1F2 1B0 1B1 1B2 1O",
    "1f1b": "0F0 0F1 0B0 0F2 0B1 0B2 0O / 1F0 1B0 1F1 1B1 1F2 1B2 1O",
    "zb_h1": "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 0O / 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1O",
}
"""What torch's own schedules say."""


def test_rows_are_what_torch_ran(torch_engine: Path) -> None:
    for row in rows_of(torch_engine):
        if row["status"] == "ok":
            result = read_result(torch_engine / "runs" / row["key"] / "result.json")
            validate(result.schedule)
            if row["schedule"] in TORCH_ROWS:
                assert " / ".join(" ".join(each) for each in result.rows) == TORCH_ROWS[row["schedule"]]
            for repeat in result.repeats:
                for trace in traces(result, repeat):
                    assert_one_after_the_other(trace)


def assert_one_after_the_other(trace: Trace) -> None:
    for rank in range(trace.num_ranks):
        own = [span for span in trace.spans if span.rank == rank]
        assert all(span.start_s <= span.end_s for span in own)
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))


def test_the_mlp_learns(tmp_path: Path) -> None:
    results = sweep_here(
        tmp_path, "-m", "model=mlp,mlp_classifier", "model.layers=2", "model.width=64", "model.dropout=0",
        "optimizer.lr=0.01", "batch=64", "micro=4", "steps=30", "warmup=1",
    )  # fmt: skip
    rows = rows_of(results)
    assert [row["model"] for row in rows] == ["mlp", "mlp_classifier"]
    for row in rows:
        assert float(row["loss_last"]) < 0.8 * float(row["loss_first"])


def test_bf16_passes_the_gate_and_without_a_gate_a_row_is_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = ("model.tied=true", "optimizer.clip_norm=0.1", "stages=2")  # ranks add up gradients and their norm
    results = sweep_here(tmp_path, "-m", "precision=fp32,bf16", "gate=on,off", "micro=2", *agreed, *SMALL, *QUICK)
    rows = rows_of(results)
    assert [row["status"] for row in rows] == ["ok", "unchecked"] * 2
    assert [row["grad_rel_error"] == "" for row in rows] == [False, True] * 2
    assert "unchecked" in capsys.readouterr().out
    assert "unchecked" in (results / "report.md").read_text()


HAND_WRITTEN = """0F0,0F1,,0F2,0I0,0W0,0F3,0I1,0I2,0B3,0W2,0W1
,1F0,1B0,1F1,1I1,1F2,1B2,1F3,1B3,1W1
"""


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every schedule once in real processes, a hand-written one among them."""
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "mine.csv").write_text(HAND_WRITTEN)
    names = ",".join([*SCHEDULES, ZB_AUTO, "mine.csv"])
    with contextlib.chdir(folder):
        return sweep_here(folder, "-m", f"schedule={names}", "stages=2", "micro=4", *SMALL, "steps=2", "warmup=1")


def test_every_schedule_runs_in_real_processes_with_right_gradients(schedules: Path) -> None:
    rows = rows_of(schedules)
    assert [row["schedule"] for row in rows] == [*SCHEDULES, ZB_AUTO, "mine.csv"]
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["grad_rel_error"]) < 1e-5
        assert float(row["loss_last"]) == pytest.approx(float(rows[0]["loss_last"]), rel=1e-5)
        assert (row["bubble_bound"] == "") == (row["schedule"] in ("v_half", "v_min", "mine.csv"))  # K=2 is too small
    by_name = {row["schedule"]: row for row in rows}
    assert by_name["zb_v"]["chunks"] == by_name["interleaved"]["chunks"] == "2"
    assert by_name["gpipe"]["chunks"] == by_name["mine.csv"]["chunks"] == "1"
    assert "predicts" in by_name["zb_auto"]["message"]


def test_the_report_orders_schedules_by_step_time(schedules: Path) -> None:
    page = (schedules / "report.md").read_text()
    table = page[page.index("### Schedules by step time") :].splitlines()[4:]
    order = [line.split("|")[1].strip().rstrip("!~\\*") for line in table[: len(SCHEDULES) + 2]]
    fastest_first = sorted(rows_of(schedules), key=lambda row: float(row["step_s"]))
    assert order == [row["schedule"] for row in fastest_first]
    assert (schedules / "schedules.png").stat().st_size > 10_000


def test_a_measured_point_is_the_profile_of_simulated_ones(schedules: Path, tmp_path: Path) -> None:
    key = next(row["key"] for row in rows_of(schedules) if row["schedule"] == "zb_h1")
    done = run(
        "-m", "engine=simulate", f"profile={schedules / 'runs' / key / 'result.json'}", "stages=2,4",
        "micro=4", "schedule=gpipe,zb_h1,zb_auto", *SMALL, "wandb.mode=offline", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("simulated") >= 6
    [simulated] = (tmp_path / "results").iterdir()
    rows = rows_of(simulated)
    assert [(row["status"], row["simulated"]) for row in rows] == [("simulated", "True")] * 6
    page = (simulated / "report.md").read_text()
    assert "| zb_h1 simulated " in page
    assert page.count("predicts ") == 2
    for row in rows:
        assert float(row["bubble_fraction"]) == pytest.approx(float(row["bubble_replayed"]))
    assert len(list((simulated / "wandb").glob("offline-run-*"))) == 8  # and the one device's, and the sweep's own


@pytest.mark.fault(
    "schedule file that cannot proceed", "refused before the start, the waiting ranks named, exit code 2"
)
def test_a_schedule_file_that_cannot_proceed_is_refused_with_its_grid(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n")
    done = run("schedule=bad.csv", "micro=2", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ScheduleError: schedule bad.csv cannot proceed: rank 0 at 0B1 waits for 1B1, rank 1 at 1B1 waits for 1F1",
        "> rank 0 |  0F0  0F1  0B0 [0B1]",
        "> rank 1 |  1F0  1B0 [1B1] 1F1 ",
    ]
    assert not (tmp_path / "results").exists()


def test_a_memory_limit_that_nothing_keeps_is_an_error_row_with_what_is_needed(tmp_path: Path) -> None:
    done = run(
        "schedule=zb_auto", "memory_limit=0.0001", "micro=4", "model=synthetic", "engine=simulate",
        "wandb.mode=disabled", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    [results] = (tmp_path / "results").iterdir()
    [row] = rows_of(results)
    assert row["status"] == "error"
    assert "memory limit" in row["message"]
