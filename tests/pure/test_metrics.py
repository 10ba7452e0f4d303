"""Numbers read off traces and samples whose answers are known."""

import pytest

from pipebench.metrics import (
    action_costs,
    bubble_fraction,
    imbalance,
    median_interval,
    paired_ratio,
    stage_times,
)
from pipebench.schedule.action import Action, Op
from pipebench.trace import Span, Trace

STEADY = [1.0] * 10
SLOWER = [2.0] * 10


def span(rank: int, action: str, start_s: float, end_s: float, delay_s: float = 0.0) -> Span:
    return Span(rank, Action.parse(action), start_s, end_s, delay_s)


def test_the_bubble_is_the_idle_share_of_all_ranks_until_the_last_span_ends() -> None:
    trace = Trace((span(0, "0F0", 0, 1), span(0, "0B0", 2, 4), span(1, "1F0", 1, 3)), num_ranks=2)
    assert trace.makespan_s == 4
    assert bubble_fraction(trace) == pytest.approx(1 - 5 / 8)


def test_a_step_that_begins_late_was_idle_until_then() -> None:
    assert bubble_fraction(Trace((span(0, "0F0", 3, 4),), num_ranks=1)) == pytest.approx(0.75)


def test_a_rank_without_work_is_idle_throughout() -> None:
    assert bubble_fraction(Trace((span(0, "0F0", 0, 4),), num_ranks=4)) == pytest.approx(0.75)


def test_a_trace_without_spans_ends_at_once() -> None:
    assert Trace((), num_ranks=2).makespan_s == 0.0


def test_an_action_costs_its_time_without_the_wait_for_a_core() -> None:
    trace = Trace((span(0, "0F0", 0, 5, delay_s=2), span(0, "0B0", 5, 9)), num_ranks=1)
    assert action_costs([trace]) == {(0, Op.FORWARD): 3.0, (0, Op.BACKWARD): 4.0}


def test_costs_are_means_over_micro_batches_and_medians_over_steps() -> None:
    def step(*forwards: float) -> Trace:
        return Trace(tuple(span(0, f"0F{m}", 0, seconds) for m, seconds in enumerate(forwards)), num_ranks=1)

    assert action_costs([step(1, 3), step(2, 4), step(90, 110)]) == {(0, Op.FORWARD): 3.0}


def test_stages_are_told_apart() -> None:
    trace = Trace((span(0, "0F0", 0, 1), span(1, "1F0", 1, 4)), num_ranks=2)
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
