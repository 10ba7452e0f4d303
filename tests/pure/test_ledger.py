"""The ledger of a step: parts that add up, each what its cause alone would have cost."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pipebench.compose import compose_grid
from pipebench.config import resolve
from pipebench.costs import profile_of
from pipebench.harness.simulated import simulate_point
from pipebench.ledger import PARTS, Ledger, in_words, ledger_of
from pipebench.machine import Machine
from pipebench.record import RunResult
from pipebench.report.advice import Advice, best_change
from pipebench.report.advice import in_words as advice_in_words
from pipebench.schedule.builders import SCHEDULES

K, M, FORWARD_S, BACKWARD_S = 4, 8, 0.010, 0.020


def point(*overrides: str, profile: str = "") -> RunResult:
    """Return a simulated point of four stages of 10 ms forward and 20 ms backward, or with the YAML costs given."""
    costs = [f"profile={profile}"] if profile else []
    grid = compose_grid(
        ["engine=simulate", "model=synthetic", f"stages={K}", f"micro={M}", f"batch={M}", "model.layers=4",
         f"model.forward_s={FORWARD_S}", f"model.backward_s={BACKWARD_S}", *costs, *overrides]
    )  # fmt: skip
    assert grid is not None
    config = resolve(grid.points[0], Machine(2, 0))
    return simulate_point(RunResult("0" * 12, config, "ok", "", False, {}, [], [], None))


def ledger(result: RunResult) -> Ledger:
    found = ledger_of(result)
    assert found is not None
    return found


def slowed(result: RunResult, change: object) -> RunResult:
    """Return the point with its spans put through `change(rank, index, start, end) -> (start, end, delay)`."""
    [repeat] = result.repeats
    ranks = [
        dataclasses.replace(
            record, spans=[[change(record.rank, i, *span[:2]) for i, span in enumerate(step)] for step in record.spans]
        )
        for record in repeat.ranks
    ]
    return dataclasses.replace(result, repeats=[dataclasses.replace(repeat, ranks=ranks)])


def test_equal_stages_and_free_links_leave_the_bound_alone() -> None:
    parts = ledger(point())
    work = FORWARD_S + BACKWARD_S
    expected = dict.fromkeys(PARTS, 0.0) | {"compute_s": M * work, "fill_and_drain_s": (K - 1) * work}
    assert dataclasses.asdict(parts) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_parts_add_up_to_the_step_for_every_schedule(name: str, recompute: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(
        "forward_s: [0.01, 0.02, 0.01, 0.02, 0.01, 0.01, 0.01, 0.03]\nbackward_s: 0.02\noptimizer_s: 0.001\n"
        "latency_s: 0.0005\n"
    )
    result = point(f"schedule={name}", f"recompute={recompute}", "model.layers=8", profile=str(path))
    parts = ledger(result)
    assert parts.step_s == pytest.approx(result.repeats[0].ranks[0].step_s[0], rel=1e-12)
    assert parts.transfers_s > 0
    assert parts.optimizer_s > 0
    assert (abs(parts.imbalance_s) > 1e-9) == (name != "naive" or recompute == "always"), "one at a time, it adds up"
    assert (parts.recompute_s > 0) == (recompute == "always")
    assert parts.jitter_s == pytest.approx(0, abs=1e-12)
    assert parts.overhead_s == pytest.approx(0, abs=1e-12)


def test_a_slow_stage_shows_as_imbalance_alone() -> None:
    # The last stage takes half as long again: 15 + 30 ms. GPipe then takes M of its turns and the others' once.
    parts = ledger(point("model.imbalance=0.5"))
    work, slow = FORWARD_S + BACKWARD_S, 1.5 * (FORWARD_S + BACKWARD_S)
    mean = (3 * work + slow) / 4
    assert parts.compute_s == pytest.approx(M * mean)
    assert parts.fill_and_drain_s == pytest.approx((K - 1) * mean)
    assert parts.imbalance_s == pytest.approx(M * slow + 3 * work - (M + K - 1) * mean)
    assert parts.transfers_s == parts.recompute_s == parts.overhead_s == pytest.approx(0, abs=1e-12)


def test_hops_on_the_critical_path_show_as_transfers(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("forward_s: 0.01\nbackward_s: 0.02\nlatency_s: 0.001\n")
    assert ledger(point(profile=str(path))).transfers_s == pytest.approx(2 * (K - 1) * 0.001)


def test_recompute_shows_as_itself() -> None:
    assert ledger(point("recompute=always")).recompute_s == pytest.approx(M * FORWARD_S)


def test_uneven_actions_of_one_stage_show_as_jitter() -> None:
    result = point()

    def change(rank: int, index: int, start: float, end: float) -> tuple[float, float, float]:
        late = 0.004 if rank == 3 and index == 0 else -0.004 if rank == 3 and index == 1 else 0.0
        return start, end + late, 0.0

    parts = ledger(slowed(result, change))
    assert parts.imbalance_s == pytest.approx(0, abs=1e-12), "the mean forward of the stage is as before"
    assert parts.jitter_s == pytest.approx(0, abs=1e-12), "a late forward that catches up costs nothing"

    def later(rank: int, index: int, start: float, end: float) -> tuple[float, float, float]:
        late = 0.004 if rank == 0 and index == 0 else -0.004 if rank == 0 and index == 7 else 0.0
        return start, end + late, 0.0

    assert ledger(slowed(result, later)).jitter_s == pytest.approx(0.004, abs=1e-9), "the first forward fills the pipe"


def test_waiting_for_a_core_and_gaps_between_actions_show_as_overhead() -> None:
    result = point()
    [repeat] = result.repeats
    longer = [dataclasses.replace(record, step_s=[record.step_s[0] + 0.1]) for record in repeat.ranks]
    result = dataclasses.replace(result, repeats=[dataclasses.replace(repeat, ranks=longer)])
    waited = slowed(result, lambda rank, index, start, end: (start, end + 0.003, 0.003))
    for each in (result, waited):
        parts = ledger(each)
        assert parts.overhead_s == pytest.approx(0.1, abs=1e-9)
        assert parts.jitter_s == pytest.approx(0, abs=1e-12)


def test_an_engine_without_spans_has_no_ledger() -> None:
    result = point()
    [repeat] = result.repeats
    bare = [dataclasses.replace(record, spans=[]) for record in repeat.ranks]
    assert ledger_of(dataclasses.replace(result, repeats=[dataclasses.replace(repeat, ranks=bare)])) is None


def test_several_steps_give_the_median_of_each_part_and_the_rest_to_overhead() -> None:
    result = point()
    [repeat] = result.repeats
    factors = [1.0, 1.2, 2.0, 1.1]
    ranks = [
        dataclasses.replace(
            record,
            step_s=[record.step_s[0] * factor + 0.01 for factor in factors],
            spans=[[(s * f, e * f, 0.0) for s, e, _ in record.spans[0]] for f in factors],
        )
        for record in repeat.ranks
    ]
    parts = ledger(dataclasses.replace(result, repeats=[dataclasses.replace(repeat, ranks=ranks)]))
    step_s = float(np.median([repeat.ranks[0].step_s[0] * factor + 0.01 for factor in factors]))
    assert parts.step_s == pytest.approx(step_s, rel=1e-12)
    assert parts.compute_s == pytest.approx(1.15 * M * (FORWARD_S + BACKWARD_S))
    assert parts.overhead_s == pytest.approx(0.01)


def test_a_ledger_reads_as_a_sentence_largest_part_first() -> None:
    parts = Ledger(0.7, 0.05, 0.0, 0.12, 0.02, 0.001, 0.004, 0.105)
    assert in_words(parts, [1.0, 1.3, 0.7]) == (
        "300.0 ms of 1000.0 ms beyond forward and backward: 120.0 imbalance (rank 1 takes 30% more than the mean), "
        "105.0 overhead and contention, 50.0 fill and drain, 20.0 transfers"
    )
    assert "120.0 imbalance (now one rank is slower, now another)" in in_words(parts, [1.0, 1.001])
    assert in_words(Ledger(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), [1.0]) == (
        "0.0 ms of 1000.0 ms beyond forward and backward: nothing large"
    )


def advice(result: RunResult) -> Advice | None:
    profile = profile_of(result)
    assert profile is not None
    return best_change(result.config, result.layers_per_stage, profile)


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["recompute=always", "stages=1", "model.layers=1"], "recompute=never"),
        (["model.imbalance=2", "model.layers=12", "micro=12", "batch=12", "partition=[3,3,3,3]", "schedule=zb_h2"],
         "moving a layer from stage 3 to stage 2 (partition=[3,3,4,2])"),
        (["model.layers=7", "micro=16", "batch=16", "partition=[3,1,2,1]", "schedule=zb_h2"], "partition=[1,2,2,2]"),
        (["micro=4", "batch=64", "schedule=zb_h2"], "micro=8"),
        (["schedule=naive"], "schedule=zb_h1"),
    ],
)  # fmt: skip
def test_the_change_that_would_gain_most_is_named(overrides: list[str], change: str) -> None:
    found = advice(point(*overrides))
    assert found is not None
    assert found.change == change
    assert 0.02 < found.gain_fraction < 1


def test_a_predicted_gain_is_what_the_changed_point_really_gains() -> None:
    before, after = point("schedule=naive"), point("schedule=zb_h1")
    found = advice(before)
    assert found is not None
    step_s = [result.repeats[0].ranks[0].step_s[0] for result in (before, after)]
    assert found.gain_fraction == pytest.approx(1 - step_s[1] / step_s[0])
    assert advice_in_words(found, None).startswith("most is expected of schedule=zb_h1: 72% less time, ")


def test_nothing_is_advised_where_nothing_is_to_be_gained() -> None:
    assert advice(point("stages=1", "model.layers=1")) is None
    assert advice_in_words(None, None) == "no single change is expected to gain 2%"
