"""Numbers read off traces and samples whose answers are known."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench import metrics
from pipebench.metrics import (
    Ratio,
    action_costs,
    bubble_fraction,
    critical_path,
    imbalance,
    median_interval,
    noise_floor,
    paired_ratio,
    ratio_of_medians,
    stage_times,
    step_costs,
)
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import SCHEDULES, Recompute, with_optimizer, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.simulate import Costs, simulate
from pipebench.trace import Span, Trace

STEADY = [1.0] * 10
SLOWER = [2.0] * 10
SAMPLES = st.lists(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=12), min_size=1, max_size=4)


def span(rank: int, action: str, start_s: float, end_s: float, delay_s: float = 0.0) -> Span:
    return Span(rank, Action.parse(action), start_s, end_s, delay_s)


def test_the_bubble_is_the_idle_share_of_all_ranks_until_the_last_span_ends() -> None:
    trace = Trace.of([span(0, "0F0", 0, 1), span(0, "0B0", 2, 4), span(1, "1F0", 1, 3)], num_ranks=2)
    assert trace.makespan_s == 4
    assert bubble_fraction(trace) == pytest.approx(1 - 5 / 8)


def test_a_step_that_begins_late_was_idle_until_then() -> None:
    assert bubble_fraction(Trace.of([span(0, "0F0", 3, 4)], num_ranks=1)) == pytest.approx(0.75)


def test_a_rank_without_work_is_idle_throughout() -> None:
    assert bubble_fraction(Trace.of([span(0, "0F0", 0, 4)], num_ranks=4)) == pytest.approx(0.75)


def test_a_trace_without_spans_ends_at_once() -> None:
    assert Trace.of([], num_ranks=2).makespan_s == 0.0


def test_an_action_costs_its_time_without_the_wait_for_a_core() -> None:
    trace = Trace.of([span(0, "0F0", 0, 5, delay_s=2), span(0, "0B0", 5, 9)], num_ranks=1)
    assert action_costs([trace]) == {(0, Op.FORWARD): 3.0, (0, Op.BACKWARD): 4.0}


def test_an_action_that_seems_to_have_waited_all_along_took_some_time() -> None:
    trace = Trace.of([span(0, "0F0", 0, 5, delay_s=5), span(0, "0B0", 5, 9, delay_s=5)], num_ranks=1)
    assert all(cost > 0 for cost in step_costs(trace).values())


def test_costs_are_means_over_micro_batches_and_medians_over_steps() -> None:
    def step(*forwards: float) -> Trace:
        return Trace.of([span(0, f"0F{m}", 0, seconds) for m, seconds in enumerate(forwards)], num_ranks=1)

    assert action_costs([step(1, 3), step(2, 4), step(90, 110)]) == {(0, Op.FORWARD): 3.0}


def test_stages_are_told_apart() -> None:
    trace = Trace.of([span(0, "0F0", 0, 1), span(1, "1F0", 1, 4)], num_ranks=2)
    assert action_costs([trace]) == {(0, Op.FORWARD): 1.0, (1, Op.FORWARD): 3.0}


def test_a_stages_time_is_the_sum_of_its_actions_without_the_optimizer() -> None:
    costs = {(0, Op.FORWARD): 1.0, (0, Op.BACKWARD): 2.0, (0, Op.OPTIMIZER): 50.0, (1, Op.FORWARD): 7.0}
    actions = [Action.parse(text) for text in ("1F0", "0F0", "0F1", "0B1", "0B0", "0O")]
    assert stage_times(costs, actions) == [6.0, 7.0]


def test_imbalance_is_the_slowest_stage_over_the_mean() -> None:
    assert imbalance([2.0, 2.0, 2.0]) == 1.0
    assert imbalance([1.0, 3.0]) == 1.5


def test_equal_samples_leave_no_doubt_about_their_median() -> None:
    assert median_interval([STEADY]) == (1.0, 1.0)


def test_the_interval_agrees_with_order_statistics() -> None:
    # 95 % of the time the median of 101 samples lies between the 41st and the 61st.
    low, high = median_interval([[float(sample) for sample in range(1, 102)]])
    assert low == pytest.approx(41, abs=2)
    assert high == pytest.approx(61, abs=2)


def test_the_median_of_an_even_number_lies_between_the_middle_two() -> None:
    # Of ten draws from these, five are zeros 2.6 % of the time and more are 0.6 %: the low end is a half.
    assert median_interval([[0.0] * 2 + [1.0] * 8]) == (0.5, 1.0)


def test_groups_that_disagree_widen_the_interval_to_both() -> None:
    assert median_interval([STEADY, SLOWER]) == (1.0, 2.0)


def test_one_outlier_moves_nothing() -> None:
    assert median_interval([[1.0] * 30 + [100.0]]) == (1.0, 1.0)


def test_the_same_samples_give_the_same_interval_and_empty_groups_do_not_count() -> None:
    samples = [[1.0, 1.3, 0.9, 1.1], [1.2, 1.0, 1.4]]
    assert median_interval(samples) == median_interval(samples)
    assert median_interval([*samples, []]) == median_interval(samples)


def test_the_ratio_of_two_points_is_that_of_their_medians_with_its_interval() -> None:
    assert paired_ratio([SLOWER], [STEADY]) == (2.0, 2.0, 2.0)
    ratio, low, high = paired_ratio([STEADY, SLOWER], [STEADY, STEADY])
    assert (ratio, low, high) == (1.5, 1.0, 2.0)


def test_a_paired_ratio_is_free_of_a_drift_that_both_sides_share() -> None:
    baseline = [[1.0, 1.01, 0.99], [2.0, 2.02, 1.98], [4.0, 4.04, 3.96]]
    twice = [[2 * value for value in group] for group in baseline]
    ratio, low, high = paired_ratio(twice, baseline)
    assert ratio == pytest.approx(2.0)
    assert 1.9 < low <= ratio <= high < 2.1


def test_points_measured_apart_are_compared_by_their_medians_alone() -> None:
    assert ratio_of_medians([SLOWER], [STEADY]) == (2.0, 2.0, 2.0)
    assert ratio_of_medians([SLOWER[:3], SLOWER], [STEADY]) == (2.0, 2.0, 2.0), "their groups need not be as many"


def test_groups_that_disagree_widen_the_ratio_to_both_whichever_side_they_stand_on() -> None:
    assert ratio_of_medians([STEADY, SLOWER], [STEADY]) == (1.5, 1.0, 2.0)
    assert ratio_of_medians([STEADY], [STEADY, SLOWER]) == (1 / 1.5, 0.5, 1.0)


def test_a_shared_drift_widens_a_ratio_of_medians_which_knows_no_pairs() -> None:
    baseline = [[1.0, 1.01, 0.99], [2.0, 2.02, 1.98], [4.0, 4.04, 3.96]]
    twice = [[2 * value for value in group] for group in baseline]
    apart, paired = ratio_of_medians(twice, baseline), paired_ratio(twice, baseline)
    assert apart.value == pytest.approx(paired.value) == pytest.approx(2.0)
    assert apart.low < 1 < paired.low < paired.high < 4 < apart.high


@given(SAMPLES, SAMPLES)
def test_the_other_way_round_a_ratio_is_its_inverse(one: list[list[float]], other: list[list[float]]) -> None:
    there, back = ratio_of_medians(one, other), ratio_of_medians(other, one)
    assert there.value == pytest.approx(1 / back.value)
    assert there.low <= there.high
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low), rel=0.2)


def test_a_baseline_that_took_no_time_has_no_ratio() -> None:
    with pytest.raises(ArithmeticError):
        ratio_of_medians([STEADY], [[0.0, 0.0]])


@pytest.mark.parametrize(
    ("again", "floor"),
    [
        (Ratio(1.0, 1.0, 1.0), 1.0),
        (Ratio(1.0, 0.96, 1.05), 1.05),
        (Ratio(1.0, 0.8, 1.05), 1.25),
        (Ratio(0.9, 0.8, 0.95), 1.25),  # a difference that is sure is noise all the same: nothing was changed
        (Ratio(1.2, 1.1, 1.3), 1.3),
    ],
)
def test_the_noise_floor_is_the_far_end_of_an_a_a_pair(again: Ratio, floor: float) -> None:
    assert noise_floor(again) == pytest.approx(floor)


@pytest.mark.parametrize("sizes", [[10], [9, 6], [7, 1, 20], [5, 5, 5]])
@pytest.mark.parametrize("at_once", [10_000_000, 50])
def test_drawing_all_at_once_means_what_drawing_one_by_one_does(
    sizes: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_MOST_DRAWN_AT_ONCE", at_once)
    random = np.random.default_rng(5)
    groups = [random.normal(10.0, 1.0, size).tolist() for size in sizes]
    one_by_one = [
        np.median(np.concatenate([random.choice(groups[index], len(groups[index])) for index in chosen]))
        for chosen in random.integers(0, len(groups), (10_000, len(groups)))
    ]
    assert median_interval(groups) == pytest.approx(np.quantile(one_by_one, [0.025, 0.975]), abs=0.03)


def row(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def equal_costs(schedule: Schedule, seconds: dict[Op, float]) -> Costs:
    return {(stage, op): each for stage in range(schedule.num_stages) for op, each in seconds.items()}


TWO_RANKS = Schedule("two ranks", [row("0F0 0F1 0B0 0B1"), row("1F0 1B0 1F1 1B1")])
ONE_AND_TWO = {(stage, op): seconds for stage in (0, 1) for op, seconds in ((Op.FORWARD, 1.0), (Op.BACKWARD, 2.0))}


def names(path: list[Span]) -> str:
    return " ".join(str(span.action) for span in path)


def test_the_critical_path_follows_the_rank_that_never_waits() -> None:
    # rank 0 | F0 F1 .  B0 B0 .  B1 B1
    # rank 1 | .  F0 B0 B0 F1 B1 B1 .    a column a second, but rank 0's B0 starts at 4
    path = critical_path(TWO_RANKS, simulate(TWO_RANKS, ONE_AND_TWO))
    assert names(path) == "0F0 1F0 1B0 1F1 1B1 0B1"
    assert [(span.start_s, span.end_s) for span in path] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7), (7, 9)]


def test_a_transfer_is_a_wait_on_the_critical_path() -> None:
    path = critical_path(TWO_RANKS, simulate(TWO_RANKS, ONE_AND_TWO, 0.5), 0.5)
    assert names(path) == "0F0 1F0 1B0 1F1 1B1 0B1"
    assert [after.start_s - before.end_s for before, after in pairwise(path)] == [0.5, 0, 0, 0, 0.5]


def test_each_boundary_may_have_a_transfer_time_of_its_own() -> None:
    schedule = Schedule("loop", [row("0F0 2F0 2B0 0B0"), row("1F0 1B0")])
    costs = equal_costs(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 1.0})
    trace = simulate(schedule, costs, [0.0, 9.0, 1.0])
    assert names(critical_path(schedule, trace, [0.0, 9.0, 1.0])) == "0F0 1F0 2F0 2B0 1B0 0B0"
    assert trace.makespan_s == 6 + 9 + 1 + 1 + 9


def test_a_measured_trace_has_a_path_too_and_its_optimizer_ends_it() -> None:
    schedule = with_optimizer(Schedule("one rank", [row("0F0 0B0")]))
    trace = Trace.of([span(0, "0F0", 0.5, 1), span(0, "0B0", 1.25, 3), span(0, "0O", 3, 4)], num_ranks=1)
    assert names(critical_path(schedule, trace)) == "0F0 0B0 0O"


def test_the_critical_path_of_nothing_is_empty() -> None:
    assert critical_path(Schedule("nothing", []), Trace.of([], num_ranks=0)) == []


def test_a_trace_of_other_rows_has_no_path_here() -> None:
    with pytest.raises(AssertionError, match="not of these rows"):
        critical_path(TWO_RANKS, Trace.of([span(0, "0F0", 0, 1)], num_ranks=1))


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.25, 3.0]),
    st.sampled_from([Recompute.NEVER, Recompute.ALWAYS]),
    st.lists(st.integers(1, 8), min_size=30, max_size=30),
)
def test_the_path_leads_from_the_start_to_the_end_and_waits_only_for_transfers(
    name: str, num_ranks: int, num_micro_batches: int, transfer_s: float, recompute: Recompute, seconds: list[int]
) -> None:
    schedule = with_optimizer(with_recompute(build(name, num_ranks, num_micro_batches), recompute))
    each = iter(seconds * 3)
    costs = {(stage, op): next(each) / 4 for stage in range(schedule.num_stages) for op in Op}
    trace = simulate(schedule, costs, transfer_s)
    path = critical_path(schedule, trace, transfer_s)
    assert path[0].start_s == 0
    assert path[-1].end_s == trace.makespan_s
    waits = [after.start_s - before.end_s for before, after in pairwise(path)]
    assert sum(waits) + sum(span.duration_s for span in path) == trace.makespan_s
    for wait_s, (before, after) in zip(waits, pairwise(path), strict=True):
        assert wait_s == (0 if before.rank == after.rank else transfer_s)
        assert before.rank == after.rank or before.action in schedule.dependencies(after.action)


def test_a_thousand_ranks_have_their_path_in_no_time() -> None:
    schedule = build("1f1b", 512, 1024)
    trace = simulate(schedule, equal_costs(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}))
    began = time.perf_counter()
    path = critical_path(schedule, trace)
    assert time.perf_counter() - began < 5
    assert sum(span.duration_s for span in path) == trace.makespan_s == 3 * (1024 + 511)


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.1, 9), st.floats(0.1, 9))
def test_the_costs_of_a_simulated_step_are_those_it_was_played_at(
    num_ranks: int, num_micro_batches: int, forward_s: float, backward_s: float
) -> None:
    schedule = build("1f1b", num_ranks, num_micro_batches)
    costs = equal_costs(schedule, {Op.FORWARD: forward_s, Op.BACKWARD: backward_s})
    assert step_costs(simulate(schedule, costs)) == pytest.approx(costs)


def test_a_step_without_spans_has_no_costs() -> None:
    assert step_costs(Trace.of([], num_ranks=2)) == step_costs(Trace.of([], num_ranks=0)) == {}
