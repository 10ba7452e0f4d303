"""What `make perf` measures beside sweeps, in real processes."""

from pipebench.compose import compose_grid
from pipebench.config import resolve
from pipebench.harness.jobs import MEASURE_SPAN_COST
from pipebench.harness.prepare import prepare
from pipebench.harness.sweep import Known, profile_of_point, run_ranks
from pipebench.machine import this_machine


def test_steps_with_spans_and_steps_without_take_turns_in_one_group() -> None:
    small = ["model=mlp", "model.layers=4", "model.width=32", "batch=8", "micro=4", "partition=uniform"]
    grid = compose_grid([*small, "stages=2", "steps=3", "warmup=1"])
    assert grid is not None
    config = resolve(grid.points[0], this_machine())
    profile = profile_of_point(config, Known({}, {}, {}), lambda progress: None)
    ranks = run_ranks(MEASURE_SPAN_COST, config, prepare(config, profile), profile.layers, lambda progress: None)
    assert [(len(with_spans), len(without)) for with_spans, without in ranks] == [(3, 3), (3, 3)]
    assert all(0 < seconds < 10 for rank in ranks for way in rank for seconds in way)
