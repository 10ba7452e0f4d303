"""From a user's own file to a report, by the words of the README; and what stops one before anything is written."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["steps=1", "warmup=1", "batch=8", "micro=2", "noise_floor=false", "trackers=[]"]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "pipebench", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def rows_of(table: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(table.read_text().splitlines()))


def walkthrough() -> tuple[str, list[str], int]:
    """Return the file and the arguments of the README's section, and how many lines both take."""
    section = (ROOT / "README.md").read_text().partition("## Your own model\n")[2].partition("\n## ")[0]
    file, command = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)[:2]
    num_lines = section.partition(command)[0].count("\n") + 1
    return re.sub("^    ", "", file, flags=re.MULTILINE), shlex.split(command)[3:], num_lines


def test_the_readmes_own_model_ends_in_a_report(tmp_path: Path) -> None:
    file, arguments, num_lines = walkthrough()
    assert num_lines < 20
    (tmp_path / "mine.py").write_text(file)
    done = run(*arguments, *QUICK, "stages=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [report] = tmp_path.glob("results/*/report.html")
    rows = rows_of(report.parent / "results.csv")
    assert [(row["stages"], row["model.arguments.width"], row["status"]) for row in rows] == [
        ("2", "64", "ok"),
        ("2", "256", "ok"),
    ]


def test_an_example_is_found_beside_its_configuration(tmp_path: Path) -> None:
    arguments = ["--config-dir", str(ROOT / "examples"), "model=unet", "stages=2", "schedule=1f1b"]
    done = run(*arguments, *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [table] = tmp_path.glob("results/*/results.csv")
    [row] = rows_of(table)
    assert (row["model"], row["status"]) == ("unet", "ok")


def test_a_model_that_cannot_be_cut_writes_nothing(tmp_path: Path) -> None:
    file = "from torch import nn\ndef model():\n    return nn.Linear(1, 1)\ndef data(step, batch, seed):\n    exit()\n"
    (tmp_path / "mine.py").write_text(file)
    for dry_run in ("true", "false"):
        done = run("model=custom", "model.target=mine:model", "data.target=mine:data", f"dry_run={dry_run}", *QUICK,
                   folder=tmp_path)  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("ConfigError: model.target=mine:model: returned a Linear: expected ")
        assert done.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
