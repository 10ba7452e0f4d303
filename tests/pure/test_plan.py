"""What a sweep will run: the point that is measured twice, and what has none."""

import shlex
from pathlib import Path

import pytest

from pipebench import machine
from pipebench.compose import compose_grid
from pipebench.config import resolve
from pipebench.harness.sweep import Plan, plan_sweep
from pipebench.machine import Machine

TWO_CORES = Machine(num_cores=2, num_gpus=0)
COSTS = "forward_s: 1\ninput_s: 1\nweight_s: 1\n"


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: TWO_CORES)


def planned(command_line: str) -> Plan:
    grid = compose_grid(shlex.split(command_line))
    assert grid is not None
    return plan_sweep([resolve(point, TWO_CORES) for point in grid.points], grid.swept, "test")


@pytest.mark.parametrize(
    ("command_line", "stages", "micro"),
    [
        ("-m stages=2 micro=4,8", 2, 4),
        ("-m stages=1,2 micro=4,8", 2, 4),
        ("-m stages=4,2 micro=4,8", 2, 4),  # 4 stages have to share two cores
        ("-m stages=8,4 micro=4,8", 8, 4),  # all have to
        ("-m stages=8,4 micro=4,8 model=synthetic", 8, 4),
    ],
)
def test_the_point_with_most_devices_of_its_own_is_measured_twice(command_line: str, stages: int, micro: int) -> None:
    plan = planned(command_line)
    assert plan.again is not None
    assert (plan.points[plan.again].stages, plan.points[plan.again].micro) == (stages, micro)


def test_it_is_one_that_runs(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(COSTS)
    both = f"profile={tmp_path / 'costs.yaml'} micro=4,8 -m engine=simulate,pipebench"
    plan = planned(both)
    assert plan.again is not None
    assert plan.points[plan.again].engine == "pipebench"


@pytest.mark.parametrize(
    "command_line",
    [
        "stages=2 micro=4",
        "-m stages=2 micro=4,4",
        "-m micro=4,8 noise_floor=false",
        "-m micro=4,8 model=synthetic engine=simulate",
        "-m micro=4 model=synthetic engine=simulate,pipebench",
    ],
    ids=["one point", "the same point", "not asked for", "nothing runs", "one of them runs"],
)
def test_nothing_is_measured_twice_where_there_is_nothing_to_compare(command_line: str) -> None:
    assert planned(command_line).again is None


def test_one_device_sends_nothing_so_points_that_differ_in_transport_share_its_reference() -> None:
    plan = planned("-m stages=2 micro=2,4 transport=shared,network")
    assert (len(plan.points), len(plan.references)) == (4, 1)
