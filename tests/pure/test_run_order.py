"""In what order a sweep runs: whoever is told of a point must already know what it is compared with."""

from functools import cache

import pytest

from pipebench.compose import compose_grid
from pipebench.config import resolve
from pipebench.harness.sweep import Plan, plan_sweep
from pipebench.machine import Machine


@cache
def plan(*arguments: str) -> Plan:
    grid = compose_grid(["-m", "model=mlp", "threads=1", *arguments])
    assert grid is not None
    return plan_sweep([resolve(point, Machine(2, 0)) for point in grid.points], grid.swept, "order")


@pytest.mark.parametrize("partition", ["time", "uniform"])
def test_the_one_device_reference_runs_before_the_points_compared_with_it(partition: str) -> None:
    asked_for = plan("stages=4,2,1", "micro=2,1", f"partition={partition}")
    order = list(asked_for.all)

    assert sorted(order) == sorted({*asked_for.points, *asked_for.references})
    assert (len(asked_for.references) == 0) == (partition == "uniform")  # there K=1, M=1 is a point itself
    for key in asked_for.points:
        assert order.index(asked_for.reference_of[key]) <= order.index(key)


def test_the_table_keeps_the_order_asked_for() -> None:
    points = plan("stages=4,2,1", "micro=2,1", "partition=uniform").points.values()

    assert [(point.stages, point.micro) for point in points] == [(4, 2), (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)]
