"""What a user sees before anything runs: help, and one line for every mistake."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pipebench.cli import main

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "pipebench", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stagess=2"], "stagess=2: unknown key 'stagess' (did you mean 'stages'?); --help lists the keys"),
        (["schedule=1f2b"], "schedule=1f2b: expected one of gpipe, naive, 1f1b, interleaved, "),
        (["stages=19"], "stages=19: expected at most 18, the layers of model=transformer"),
        (["micro=33"], "micro=33: expected at most 32, the samples of a mini-batch (batch)"),
        (["micro=0"], "micro=0: expected a whole number of at least 1"),
        (
            ["partition=[9,8]"],
            "partition=[9, 8]: expected 2 counts (stages x chunks) that add up to 18, the layers of model=transformer",
        ),
        (["replicas=2"], "replicas=2: expected 1 (data parallelism beside the pipeline is not built yet)"),
        (["stages=2,4"], "stages=2,4: several values: expected one, or -m on the command line"),
        (["experiment=quick"], "experiment=quick: sweeps stages, micro: expected -m on the command line"),
        (["-m", "stages=2,4,99", "micro=4"], "stages=99: expected at most 18, the layers of model=transformer"),
        (["data.path=no/such/file"], "data.path=no/such/file: expected a file or folder that exists"),
        (["stages=two"], "stages=two: expected a whole number"),
        (["data.path=/dev/null"], "data.path=/dev/null: expected a file or folder that exists"),
        (["data.max_bytes=1"], "data.max_bytes=1: expected at least 65, a sample's tokens and one more"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: expected a folder that exists"),
        (["--bogus"], "unrecognized arguments: --bogus; --hydra-help lists the flags"),
        (["--cfg", "job", "stagess=2"], "stagess=2: unknown key 'stagess'"),
        (["wandb=disabled"], "wandb=disabled: expected one of wandb.mode, wandb.project, wandb.entity"),
        (["-m", "repeats=1,2"], "repeats=1,2: expected one value; points cannot differ in repeats alone"),
        (["+stages=3"], "+stages=3: expected stages=3; the key is there already"),
        (["steps=99999999999"], "steps=99999999999: expected at most 1000000"),
    ],
)
def test_a_bad_grid_is_one_line_code_2_and_nothing_written(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capfd.readouterr()
    assert told.err.startswith(f"ConfigError: {line}")
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_flags_may_stand_after_keys_and_the_exit_code_is_that_of_the_process(tmp_path: Path) -> None:
    done = run("model=mlp", "-m", "stages=2,99", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "ConfigError: stages=99: expected at most 18, the layers of model=mlp\n"
    assert list(tmp_path.iterdir()) == []


def test_help_fits_a_screen_and_needs_no_torch(tmp_path: Path) -> None:
    done = run("--help", folder=tmp_path)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 50
    assert max(len(line) for line in done.stdout.splitlines()) <= 120
    for key in ("stages", "micro", "schedule", "recompute", "partition", "experiment", "wandb.mode"):
        assert key in done.stdout
    heavy = ("torch", "wandb", "pandas", "seaborn")
    program = f"import sys, pipebench.cli; sys.exit(any(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_carries_its_configuration_and_runs_from_another_folder(tmp_path: Path) -> None:
    """The console script of an installed wheel, outside the checkout; dependencies come from this environment."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT)],
        check=True,
        capture_output=True,
    )
    [wheel] = (tmp_path / "dist").glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    [site] = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{here}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    without_ours = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [environment / "bin" / "pipebench", "-m", "experiment=quick", "micro=2", "stages=2", "steps=2", "warmup=1",
         "model.layers=2", "model.width=32", "model.sequence=16", "batch=4", "wandb.mode=disabled"],
        cwd=elsewhere, capture_output=True, text=True, timeout=240, check=False, env=without_ours,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = (elsewhere / "results").iterdir()
    assert (results / "results.csv").exists()
    assert (results / "report.html").exists(), "the page's template and scripts are package data"
    shown = subprocess.run(
        [python, "-c", "import pipebench.compose as c; print(c.CONF_DIR)"],
        cwd=elsewhere, capture_output=True, text=True, check=True, env=without_ours,
    )  # fmt: skip
    assert str(site) in shown.stdout
