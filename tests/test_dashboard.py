"""The dashboard is a specification: the same each time, of names that runs really have, and never a question."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tracked import a_result, rows_of
from wandb_server import ENTITY, KEY, wandb_server

from pipebench import dashboard
from pipebench.dashboard import without_ids
from pipebench.tracking.curves import samples_of, series_of
from pipebench.tracking.wandb_runs import MICRO_BATCHES, TRAINING_STEP

pytest.importorskip("wandb_workspaces.expr", reason="needs pipebench[dashboard]")

GOLDEN = Path(__file__).parent / "data" / "dashboard.json"

pytestmark = pytest.mark.usefixtures("loopback_only")


def run(*arguments: str, how: Sequence[str] = ("-m", "pipebench.dashboard")) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *how, *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sections() -> dict[str, list[dict[str, Any]]]:
    found = json.loads(GOLDEN.read_text())["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in found}


def configs(sections: dict[str, list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    return [panel["config"] for panels in sections.values() for panel in panels if panel["viewType"] == kind]


def test_without_saving_it_prints_the_golden_specification() -> None:
    done = run()

    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text())
    assert done.stderr == "not saved; with a key (wandb login): python -m pipebench.dashboard --save\n"


def test_project_and_entity_are_as_asked_for() -> None:
    shown = json.loads(run("--project", "mine", "--entity", "us").stdout)

    assert (shown["entity"], shown["project"]) == ("us", "mine")


def test_it_has_the_five_sections(sections: dict[str, list[dict[str, Any]]]) -> None:
    assert list(sections) == ["throughput", "bubble", "memory", "ledger", "training"]
    assert all(sections.values())


def test_every_line_over_m_finds_its_series(sections: dict[str, list[dict[str, Any]]]) -> None:
    [row] = rows_of([a_result("aaa")])
    complete = {**row, "tokens_per_s": 1.0, "speedup": 1.0}
    names = [f"{series.chart}/{series.name}" for series in series_of([complete])]
    lines = [config for config in configs(sections, "Run History Line Plot") if config["xAxis"] == MICRO_BATCHES]

    found = [[name for name in names if re.search(line["metricRegex"], name)] for line in lines]
    assert all(found)
    assert sorted(name for names_of_line in found for name in names_of_line) == sorted(names)  # each in one panel


def test_every_line_over_training_steps_is_sampled(sections: dict[str, list[dict[str, Any]]]) -> None:
    sampled = {name for step in samples_of(a_result("aaa")) for name in step.values}
    lines = [config for config in configs(sections, "Run History Line Plot") if config["xAxis"] == TRAINING_STEP]

    assert len(lines) == 3
    assert {name for line in lines for name in line["metrics"]} <= sampled


def test_every_bar_and_scatter_is_a_column_of_the_table(sections: dict[str, list[dict[str, Any]]]) -> None:
    [row] = rows_of([a_result("aaa")])
    bars = {name for config in configs(sections, "Bar Chart") for name in config["metrics"]}
    scatters = {config[axis] for config in configs(sections, "Scatter Plot") for axis in ("xAxis", "yAxis")}

    assert {name for name in row if name.startswith("ledger_")} <= bars <= set(row)
    assert {name.removeprefix("summary:") for name in scatters} <= set(row)


def test_saving_without_a_key_shows_what_it_would_save_and_fails() -> None:
    done = run("--save")

    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads(GOLDEN.read_text())
    assert [line for line in done.stderr.splitlines() if "Traceback" in line] == []
    assert done.stderr.startswith("W&B: No API key configured.")
    assert done.stderr.count("\n") == 2


def test_saving_without_a_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up after `MOST_S`, within 15 s more; the test need not wait as long as a user may."""
    assert dashboard.MOST_S + 15 == 60
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    impatient = "import sys; from pipebench import dashboard; dashboard.MOST_S = 5.0; sys.exit(dashboard.main())"
    began = time.monotonic()
    done = run("--save", "--entity", "us", how=("-c", impatient))

    assert 5 < time.monotonic() - began < 5 + 15
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("the workspace could not be saved: ")
    assert done.stderr.count("\n") == 1
    assert KEY not in done.stderr


def test_saving_sends_the_golden_specification_and_prints_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        done = run("--save")

    [view] = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == (ENTITY, "pipebench", "pipebench")
    assert without_ids(json.loads(view["spec"])) == json.loads(GOLDEN.read_text())["spec"]
    assert done.returncode == 0
    assert done.stdout.startswith(f"{server.url}/{ENTITY}/pipebench?nw=")
    assert done.stdout.count("\n") == 1


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)

    assert dashboard.main([]) == 1
    assert capsys.readouterr().err == "wandb-workspaces is missing: pip install 'pipebench[dashboard]'\n"
