"""Two real sweeps compared from outside, and copies of one whose step times were made longer or shorter."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POINTS = {"K=2, M=2", "K=2, M=4"}
FAR = 100
"""No machine is so busy that a step takes a hundred times as long the second time."""


def run(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which sweeps `a` and `b` lie, of the same two points."""
    folder = tmp_path_factory.mktemp("sweeps")
    for name in ("a", "b"):
        done = run(
            "pipebench", "-m", "stages=2", "micro=2,4", "model=synthetic", "model.layers=4", "model.forward_s=0.001",
            "model.backward_s=0.002", "batch=4", "steps=3", "warmup=1", "wandb.mode=disabled", f"results_dir={name}.d",
            folder=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        [results] = (folder / f"{name}.d").iterdir()
        results.rename(folder / name)
    return folder


def scaled(sweep: Path, factor: float, name: str) -> Path:
    """Return a copy of a sweep whose points took `factor` as long."""
    copy = sweep.with_name(name)
    shutil.copytree(sweep, copy)
    for path in copy.glob("runs/*/*.json"):
        content = json.loads(path.read_text())
        content.pop("sha256", None)
        for repeat in content.get("repeats", []):
            for rank in repeat["ranks"]:
                rank["step_s"] = [factor * seconds for seconds in rank["step_s"]]
        path.write_text(json.dumps(content))
    return copy


def verdicts(page: str) -> dict[str, str]:
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| K=")]
    return {cells[1].strip(): cells[2].strip(" *") for cells in lines}


def test_two_sweeps_of_the_same_are_compared_point_by_point(sweeps: Path) -> None:
    done = run("pipebench.compare", "a", "b", "--output", "page.md", folder=sweeps)
    found = verdicts(done.stdout)
    assert set(found) == POINTS
    assert set(found.values()) <= {"slower", "faster", "same", "undecided"}
    assert done.returncode == (1 if "slower" in found.values() else 3 if "undecided" in found.values() else 0)
    assert done.stdout.count("K=2, M=2 measured twice: ratio ") == 2
    assert (sweeps / "page.md").read_text() == done.stdout


def test_a_sweep_is_never_slower_or_faster_than_itself(sweeps: Path) -> None:
    done = run("pipebench.compare", "a", "a", folder=sweeps)
    found = verdicts(done.stdout)
    assert set(found) == POINTS
    assert set(found.values()) <= {"same", "undecided"}
    assert done.returncode in (0, 3)


@pytest.mark.parametrize(("factor", "verdict", "code"), [(FAR, "slower", 1), (1 / FAR, "faster", 0)])
def test_a_sweep_that_took_far_longer_is_slower_and_the_exit_code_says_so(
    factor: float, verdict: str, code: int, sweeps: Path
) -> None:
    scaled(sweeps / "b", factor, verdict)
    done = run("pipebench.compare", "a", verdict, folder=sweeps)
    assert done.returncode == code, done.stderr
    assert verdicts(done.stdout) == dict.fromkeys(POINTS, verdict)
    assert done.stdout.startswith(f"**2 of 2 points {verdict}.**\n")


def test_the_command_loads_nothing_slow(sweeps: Path) -> None:
    slow = ("torch", "wandb", "pandas", "matplotlib")
    program = (
        "import sys; from pipebench.compare import main; main(['a', 'b']); "
        f"sys.exit(any(name in sys.modules for name in {slow}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=sweeps, env=environment, check=True, capture_output=True)
