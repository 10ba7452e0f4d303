"""What stages cost, from layers; and profiles read from files."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.activations import stage_activations
from pipebench.compose import compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.costs import Profile, for_samples, load_profile, stage_costs, transfer_times
from pipebench.errors import ConfigError, LimitError
from pipebench.harness.prepare import prepare
from pipebench.harness.simulated import simulate_point
from pipebench.machine import this_machine
from pipebench.record import LayerProfile, LayerRun, RunResult, write_result
from pipebench.rows import row_of, stage_rows
from pipebench.schedule.action import Op
from pipebench.schedule.memory import StageActivations
from pipebench.schedule.simulate import Link

LAYERS = LayerProfile(
    num_samples=2,
    names=["a", "b", "c"],
    forward_s=[1.0, 2.0, 3.0],
    backward_s=[2.0, 5.0, 6.0],
    input_s=[1.0, 2.0, 3.0],
    weight_s=[1.0, 3.0, 3.0],
    parameter_bytes=[10, 20, 30],
    saved_bytes=[100, 200, 300],
    put_off_bytes=[0, 50, 60],
    input_bytes=[8, 16, 24],
    saves_input=[True, True, False],
)
PROFILE = Profile(LAYERS, optimizer_s=[0.1, 0.2, 0.3], link=Link(latency_s=1.0, bytes_per_s=4.0))


def point(*overrides: str) -> RunConfig:
    grid = compose_grid(overrides)
    assert grid is not None
    return resolve(grid.points[0], this_machine())


def unmeasured(config: RunConfig) -> RunResult:
    return RunResult("0" * 12, config, "ok", "", False, {}, [], [], None)


def test_a_stage_costs_what_its_layers_cost_in_proportion_to_the_samples() -> None:
    costs = stage_costs(for_samples(PROFILE, 4), [2, 1])
    assert costs[0, Op.FORWARD] == costs[0, Op.RECOMPUTE] == 6
    assert costs[0, Op.BACKWARD] == 14
    assert costs[0, Op.INPUT_GRADIENT] == 6
    assert costs[0, Op.WEIGHT_GRADIENT] == 8
    assert costs[0, Op.OPTIMIZER] == pytest.approx(0.3), "the weights do not grow with the samples"
    assert costs[1, Op.FORWARD] == 6


def test_a_stage_keeps_what_its_layers_save_and_the_input_that_came_from_before() -> None:
    first, second = stage_activations(LAYERS, [1, 2])
    assert first == StageActivations(full_bytes=100, input_bytes=0, weight_bytes=100), "nothing can be put off"
    # Layer c does not save its input; layer b's came from the stage before.
    assert second == StageActivations(full_bytes=200 + 300 + 16, input_bytes=16, weight_bytes=110)


def test_a_transfer_takes_latency_and_its_bytes_share_of_the_bandwidth() -> None:
    assert transfer_times(for_samples(PROFILE, 4), [1, 1, 1]) == [0, 1 + 2 * 16 / 4, 1 + 2 * 24 / 4]


def test_the_synthetic_model_needs_no_profile() -> None:
    config = point("engine=simulate", "model=synthetic", "stages=4", "micro=16", "batch=16", "model.layers=4",
                   "model.forward_s=0.01", "model.backward_s=0.02", "schedule=zb_h1")  # fmt: skip
    result = simulate_point(unmeasured(config))
    row = row_of(result, None)
    assert row["status"] == "simulated"
    assert row["simulated"] is True
    assert row["step_s"] == pytest.approx(0.01 * (3 * 16 + 3))
    assert (
        row["bubble_fraction"] == row["bubble_replayed"] == pytest.approx(row["bubble_bound"]) == pytest.approx(3 / 51)
    )
    assert row["grad_rel_error"] is None
    assert row["loss_first"] is None
    assert [stage.forward_s for stage in stage_rows(result)] == pytest.approx([0.01] * 4)


def test_a_yaml_profile_gives_one_number_for_all_layers_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(
        "num_samples: 2\nforward_s: 0.001\ninput_s: 0.001\nweight_s: [" + "0.002, " * 17 + "0.5]\n"
        "parameter_bytes: 1000\nlatency_s: 0.25\nbytes_per_s: 1.0e+9\n"
    )
    profile = load_profile(point("engine=simulate", f"profile={path}"))
    assert profile.layers.num_samples == 2
    assert profile.layers.forward_s == [0.001] * 18
    assert profile.layers.weight_s == [0.002] * 17 + [0.5]
    assert profile.layers.backward_s == pytest.approx([0.003] * 17 + [0.501])
    assert profile.layers.parameter_bytes == [1000] * 18
    assert profile.link == Link(0.25, 1e9)


def test_without_its_two_parts_a_backward_is_cut_in_half(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("forward_s: 1\nbackward_s: 3\n")
    profile = load_profile(point("engine=simulate", f"profile={path}"))
    assert profile.layers.input_s == profile.layers.weight_s == [1.5] * 18


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward: 1", "expected keys of num_samples, forward_s, "),
        ("- 1", "expected keys of "),
        ("forward_s: 1", "backward_s=None: expected a number of at least 0, or a list of such"),
        ("forward_s: [1, 2]\nbackward_s: 1", "forward_s: has 2 numbers: expected 18, one a layer"),
        ("forward_s: -1\nbackward_s: 1", "forward_s=-1: expected a number of at least 0, or a list of such"),
        ("forward_s: 1\nbackward_s: 1\nlatency_s: much", "latency_s=much: expected a number of at least 0"),
        ("forward_s: 1\nbackward_s: 1\nnum_samples: 0", "num_samples=0: expected a whole number of at least 1"),
        ("forward_s: 1\nbackward_s: 1\nnum_samples: 0.5", "num_samples=0.5: expected a whole number of at least 1"),
        ("forward_s: 0\nbackward_s: 0", "forward_s=0: expected some seconds above 0"),
        ("forward_s: .inf\nbackward_s: 1", "forward_s=inf: expected a number of at least 0, or a list of such"),
        ("forward_s: 1\nbackward_s: 1\nlatency_s: .inf", "latency_s=inf: expected a number of at least 0"),
        ("forward_s: 1\nbackward_s: 1\nbytes_per_s: 0", "bytes_per_s=0: expected a number above 0"),
        ("forward_s: [", "cannot be read: "),
    ],
)
def test_a_yaml_that_is_no_profile_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(point("engine=simulate", f"profile={path}"))
    assert str(caught.value).startswith(f"profile={path}: {message}")
    assert "\n" not in str(caught.value)


def simulated_run(tmp_path: Path, *overrides: str) -> tuple[RunResult, Path]:
    """Write a result whose costs are known, as a real run would have."""
    config = point("engine=simulate", "model=synthetic", "model.layers=8", "model.forward_s=0.004",
                   "model.backward_s=0.008", "batch=16", *overrides)  # fmt: skip
    result = simulate_point(unmeasured(config))
    path = tmp_path / "result.json"
    write_result(path, result)
    return result, path


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_v"])
def test_the_result_of_a_run_gives_back_that_very_run(schedule: str, tmp_path: Path) -> None:
    result, path = simulated_run(tmp_path, "stages=2", "micro=8", f"schedule={schedule}", "model.imbalance=0.5")
    again = simulate_point(unmeasured(dataclasses.replace(result.config, profile=str(path))))
    assert row_of(again, None)["step_s"] == pytest.approx(row_of(result, None)["step_s"])


def test_the_result_of_one_run_predicts_others(tmp_path: Path) -> None:
    _, path = simulated_run(tmp_path, "stages=2", "micro=8", "schedule=zb_h1")
    other = ["stages=4", "micro=16", "schedule=interleaved"]
    expected, _ = simulated_run(tmp_path / "other", *other)
    predicted = simulate_point(unmeasured(dataclasses.replace(expected.config, profile=str(path))))
    assert row_of(predicted, None)["step_s"] == pytest.approx(row_of(expected, None)["step_s"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "error", "repeats": []}, "status error: expected the result of a measured point"),
        ({"profile": None}, "status simulated: expected the result of a measured point"),
    ],
)
def test_a_result_without_costs_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    result, path = simulated_run(tmp_path, "stages=2", "micro=8")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change, "sha256": None}))
    with pytest.raises(ConfigError) as caught:
        load_profile(dataclasses.replace(result.config, profile=str(path)))
    assert str(caught.value) == f"profile={path}: {message}"


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    result, path = simulated_run(tmp_path, "stages=2", "micro=8")
    wider = dataclasses.replace(result.config.model, width=32)
    with pytest.raises(ConfigError) as caught:
        load_profile(dataclasses.replace(result.config, model=wider, profile=str(path)))
    settings = "model.layers=8, model.width={}, model.forward_s=0.004, model.backward_s=0.008, model.weight_share=0.5"
    told = "model.name=synthetic, " + settings + ", model.imbalance=0.0"
    assert str(caught.value) == f"profile={path}: is of {told.format(16)}: expected {told.format(32)}"
    costs = tmp_path / "costs.yaml"
    costs.write_text("forward_s: [1, 2]\nbackward_s: [1, 2]\n")
    with pytest.raises(ConfigError, match="forward_s: has 2 numbers: expected 18, one a layer"):
        load_profile(point("engine=simulate", f"profile={costs}"))


def measured(tmp_path: Path, rows: list[str], spans: list[list[float]], **changes: object) -> RunConfig:
    """Write a result of two stages whose actions took the given seconds, and return a point that simulates from it."""
    result, path = simulated_run(tmp_path, "stages=2", "micro=2", "batch=2", "model.layers=2")
    [repeat] = result.repeats
    ranks = []
    for record, row in zip(repeat.ranks, spans, strict=True):
        ends = list(itertools.accumulate(row))
        steps = [[(end - seconds, end, 0.0) for end, seconds in zip(ends, row, strict=True)]]
        ranks.append(dataclasses.replace(record, spans=steps, **changes))
    repeats = [dataclasses.replace(repeat, ranks=ranks)]
    write_result(path, dataclasses.replace(result, rows=[row.split() for row in rows], repeats=repeats))
    return dataclasses.replace(result.config, profile=str(path))


def test_stages_that_split_and_stages_that_do_not_each_give_what_they_measured(tmp_path: Path) -> None:
    rows = ["0F0 0F1 0B0 0B1 0O", "1F0 1F1 1I0 1B1 1W0 1O"]
    config = measured(tmp_path, rows, [[1, 1, 6, 6, 0.5], [2, 2, 3, 9, 5, 0.25]])
    profile = load_profile(config)
    assert profile.layers.forward_s == pytest.approx([1, 2])
    assert profile.layers.backward_s == pytest.approx([6, 9])
    assert profile.layers.input_s == pytest.approx([3, 3])  # half of the whole; what was measured
    assert profile.layers.weight_s == pytest.approx([3, 5])
    assert profile.optimizer_s == pytest.approx([0.5, 0.25])


def test_a_run_gives_its_links_latency_and_bandwidth(tmp_path: Path) -> None:
    rows = ["0F0 0F1 0B0 0B1 0O", "1F0 1F1 1B0 1B1 1O"]
    config = measured(tmp_path, rows, [[1, 1, 2, 2, 0]] * 2, transfer_s=[0.5], latency_s=[0.1])
    link = load_profile(config).link
    boundary_bytes = load_profile(config).layers.input_bytes[1]
    assert link.latency_s == pytest.approx(0.1)
    assert link.transfer_s(boundary_bytes) == pytest.approx(0.5)
    assert link.transfer_s(2 * boundary_bytes) == pytest.approx(0.9)


def search_point(*overrides: str) -> RunConfig:
    return point("engine=simulate", "model=synthetic", "stages=4", "micro=8", "schedule=zb_auto", *overrides)


@pytest.mark.parametrize("limit", ["auto", "1p", "2p", "1.5p"])
def test_a_search_says_what_it_predicts_and_keeps_its_limit(limit: str) -> None:
    config = search_point(f"memory_limit={limit}")
    result = simulate_point(unmeasured(config))
    row = row_of(result, None)
    assert result.message.startswith(f"predicts {row['step_s'] * 1e3:.1f} ms before the optimizer, within ")
    assert "; best hand-written: " in result.message


def test_more_memory_lets_this_search_find_faster_orders() -> None:
    steps = [
        row_of(simulate_point(unmeasured(search_point(f"memory_limit={limit}"))), None)["step_s"]
        for limit in ("0.7p", "1p", "2p", "4p")
    ]
    assert steps == sorted(steps, reverse=True)


def test_a_search_weighs_every_number_of_stages_that_the_model_has_layers_for() -> None:
    config = search_point("model.layers=16", "memory_limit=4p")
    best = row_of(simulate_point(unmeasured(config)), None)["step_s"]
    for chunks in (1, 2, 3, 4):
        hand_written = dataclasses.replace(config, schedule="interleaved", chunks=chunks, memory_limit="auto")
        assert best <= row_of(simulate_point(unmeasured(hand_written)), None)["step_s"] + 1e-12


def test_a_limit_that_nothing_keeps_names_the_least_that_would_do() -> None:
    with pytest.raises(LimitError, match="expected at least") as caught:
        simulate_point(unmeasured(search_point("memory_limit=0.000001")))
    needed = []
    for chunks in (1, 2):
        with pytest.raises(LimitError) as one:
            simulate_point(unmeasured(search_point("memory_limit=0.000001", f"chunks={chunks}")))
        needed.append(one.value.needed_bytes)
    assert caught.value.needed_bytes == min(needed)


def test_a_search_may_be_told_how_many_stages_a_rank_has() -> None:
    for chunks in (1, 2):
        config = search_point(f"chunks={chunks}")
        prepared = prepare(config, load_profile(config))
        assert prepared.schedule.num_stages == 4 * chunks == len(prepared.layers_per_stage)


def test_a_backward_inside_which_layers_run_again_takes_their_forward_longer() -> None:
    again = (LayerRun.AGAIN, LayerRun.KEEP, LayerRun.SELECTIVE)
    profile = Profile(replace(LAYERS, selective_s=[0.0, 0.0, 0.25]), [0.0] * 3, Link())
    plain, longer = stage_costs(profile, [2, 1]), stage_costs(profile, [2, 1], again)
    assert longer[0, Op.BACKWARD] - plain[0, Op.BACKWARD] == pytest.approx(LAYERS.forward_s[0])
    assert longer[0, Op.INPUT_GRADIENT] - plain[0, Op.INPUT_GRADIENT] == pytest.approx(LAYERS.forward_s[0])
    assert longer[1, Op.BACKWARD] - plain[1, Op.BACKWARD] == pytest.approx(0.25)
    assert all(longer[s, op] == plain[s, op] for s in (0, 1) for op in (Op.FORWARD, Op.WEIGHT_GRADIENT))


def test_without_footprints_a_layer_that_runs_again_keeps_its_input_and_needs_the_rest_meanwhile() -> None:
    [first, second] = stage_activations(LAYERS, [1, 2], [LayerRun.KEEP, LayerRun.AGAIN, LayerRun.AGAIN])
    assert first == stage_activations(LAYERS, [1, 2])[0]
    assert second.full_bytes == 16 + 24, "the stage's input and that of its second layer"
    assert second.peaks[Op.BACKWARD].activation_bytes == 300, "that layer's, on top of both inputs"
