"""At a glance: the answers that rows made by hand allow, honest where nothing can be told apart."""

from typing import Any

from hand_made import MIB, table_rows

from pipebench.report.glance import Answer, at_a_glance
from pipebench.rows import Row

LEDGER = {
    "ledger_compute_s": 5.0,
    "ledger_fill_and_drain_s": 3.0,
    "ledger_recompute_s": 0.0,
    "ledger_imbalance_s": 0.3,
    "ledger_transfers_s": 0.0,
    "ledger_optimizer_s": 0.0,
    "ledger_jitter_s": 0.0,
    "ledger_overhead_s": 0.7,
}


def point(key: str, step_s: float, mebibytes: float, half_width_s: float = 0.01, **changes: Any) -> Row:
    [row] = table_rows(
        key=key,
        step_s=step_s,
        step_ci_low_s=step_s - half_width_s,
        step_ci_high_s=step_s + half_width_s,
        samples_per_s=18 / step_s,
        speedup=12 / step_s,
        peak_memory_bytes=mebibytes * MIB,
        **{name: seconds * step_s / 9 for name, seconds in LEDGER.items()},
    )
    return {**row, **changes}


def answers(*rows: Row, floor: float = 1.0) -> dict[str, Answer]:
    return {answer.question: answer for answer in at_a_glance(rows, floor)}


def test_the_fastest_point_is_named_with_its_speed_and_interval() -> None:
    answer = answers(point("a", 9.0, 3), point("b", 6.0, 3, micro=4))["Fastest"]
    assert answer.answer == "3.00 samples/s, 2.00 times one device"
    assert answer.because == "K=2, M=4: 6000 [5990, 6010] ms a step."
    assert answer.keys == ("b",)


def test_points_whose_intervals_overlap_are_not_told_apart() -> None:
    rows = point("a", 9.0, 3, 0.3), point("b", 8.8, 4, 0.3, micro=4), point("c", 8.0, 5, micro=8)
    assert "Not told apart" not in answers(*rows)["Fastest"].because
    answer = answers(*rows[:2])["Fastest"]
    assert answer.because.endswith("Not told apart from it: K=2, M=2.")
    assert answer.keys == ("b", "a")


def test_of_points_that_are_not_told_apart_the_lightest_is_to_choose() -> None:
    answer = answers(point("a", 9.0, 3, 0.3), point("b", 8.8, 4, 0.3, micro=4))["What to choose"]
    assert answer.answer == "K=2, M=2"
    assert "Not told apart from K=2, M=4, the fastest, and lighter: 3.00 MiB instead of 4.00." in answer.because


def test_points_closer_than_the_noise_floor_are_not_told_apart_either() -> None:
    rows = point("a", 9.0, 3), point("b", 8.8, 4, micro=4)
    assert "Not told apart" not in answers(*rows, floor=1.02)["Fastest"].because
    assert answers(*rows, floor=1.03)["Fastest"].keys == ("b", "a")
    assert answers(*rows, floor=1.03)["What to choose"].answer == "K=2, M=2"


def test_a_point_that_scatters_widely_is_not_chosen_for_that() -> None:
    wide = {"step_ci_low_s": 5.0, "step_ci_high_s": 20.0, "micro": 4}
    answer = answers(point("a", 6.0, 4), point("b", 12.0, 3, **wide))
    assert answer["Fastest"].keys == ("a", "b")
    assert answer["What to choose"].answer == "K=2, M=2"


def test_a_pipeline_that_one_device_beats_is_called_so() -> None:
    found = answers(point("a", 16.0, 3), point("b", 20.0, 3, micro=4))
    assert "One device is faster than any of these." in found["Fastest"].because
    assert found["What to choose"].because.endswith("One device is faster: it takes 0.750 of this step's time.")
    assert "One device" not in answers(point("a", 9.0, 3))["Fastest"].because


def test_slower_points_are_offered_only_for_much_less_memory() -> None:
    rows = point("a", 6.0, 10), point("b", 7.0, 9.9, micro=4), point("c", 8.0, 5, micro=8), point("d", 9.0, 6, micro=16)
    answer = answers(*rows)["What to choose"]
    assert answer.answer == "K=2, M=2"
    assert answer.because == "The fastest. For less memory: K=2, M=8 (2.25 samples/s, 5.00 MiB)."
    assert answer.keys == ("a", "c")
    shared = answers(rows[0], {**rows[2], "oversubscribed": True})["What to choose"]
    assert "For less memory: K=2, M=8* (2.25 samples/s, 5.00 MiB)." in shared.because
    assert answers(*rows[:2])["What to choose"].because == "The fastest. None takes 5% less memory."


def test_the_bubble_of_the_fastest_is_taken_apart() -> None:
    answer = answers(point("a", 6.0, 3), point("b", 9.0, 3, micro=4))["Bubble against the bound"]
    assert answer.answer == "0.400 / 0.350 / 0.333"
    assert "measured is 0.050 above replayed (overhead and contention)" in answer.because
    assert "which is 0.017 above the bound (imbalance, transfers)" in answer.because
    assert answer.keys == ("a",)


def test_where_stages_share_cores_the_replayed_bubble_says_more() -> None:
    found = answers(point("a", 6.0, 3, oversubscribed=True), point("b", 9.0, 3, micro=4))
    assert "replayed says more than measured" in found["Bubble against the bound"].because
    assert "oversubscribed" in found["Fastest"].because
    assert "oversubscribed" in found["What to choose"].because


def test_a_schedule_without_a_known_bound_says_so() -> None:
    answer = answers(point("a", 6.0, 3, bubble_bound=None, schedule="v_min"))["Bubble against the bound"]
    assert "no bound is known for v_min here" in answer.because


def test_what_eats_the_rest_is_the_largest_part_of_the_fastest_beyond_the_bound() -> None:
    mostly_imbalance = {"ledger_imbalance_s": 5.0, "micro": 4}
    answer = answers(point("a", 9.0, 3), point("b", 12.0, 3, **mostly_imbalance))["What eats the rest"]
    assert answer.answer == "Overhead and contention, 7.8% of the step"
    assert answer.because == (
        "Of K=2, M=2, 9000 ms a step: compute 55.6%, fill and drain 33.3%, "
        "overhead and contention 7.8%, imbalance 3.3%."
    )
    assert answer.keys == ("a",)


def test_memory_says_what_the_fastest_takes_and_who_takes_least() -> None:
    answer = answers(point("a", 6.0, 4), point("b", 9.0, 3, micro=4))["Memory"]
    assert answer.answer == "4.00 MiB for the fastest"
    assert answer.because == "Peak of the largest stage. K=2, M=4 takes least: 3.00 MiB, 0.750 of that."


def test_wrong_failed_and_pending_points_are_no_answer() -> None:
    nothing = {"step_s": None, "samples_per_s": None, "peak_memory_bytes": None, "bubble_fraction": None}
    bad = table_rows(key="b", status="wrong", step_s=0.1, samples_per_s=180.0)
    bad += table_rows(key="c", status="error", **nothing) + table_rows(key="d", status="pending", **nothing)
    assert at_a_glance(bad) == []
    assert answers(point("a", 9.0, 3), *bad)["Fastest"].keys == ("a",)


def test_a_simulated_point_is_the_fastest_only_where_nothing_was_measured() -> None:
    simulated = point("s", 1.0, 1, status="simulated", engine="simulate")
    assert answers(point("a", 9.0, 3, engine="pipebench"), simulated)["Fastest"].keys == ("a",)
    alone = answers(simulated)["Fastest"]
    assert alone.keys == ("s",)
    assert "simulated" in alone.because
    assert "simulated is 0.050 above replayed" in answers(simulated)["Bubble against the bound"].because


def test_models_are_compared_by_speed_up_and_a_choice_is_made_for_each() -> None:
    small = point("a", 9.0, 3, samples_per_s=900.0, speedup=1.2)
    large = point("b", 9.0, 3, samples_per_s=9.0, speedup=1.8)
    rows = [{"status": "ok", "model": "mlp", **small}, {"status": "ok", "model": "transformer", **large}]
    found = answers(*rows)
    assert found["Fastest"].keys == ("b",)
    assert "Judged by speed-up" in found["Fastest"].because
    assert found["What to choose"].answer == "One point for each of 2 models"
    assert found["What to choose"].keys == ("a", "b")


def test_an_engine_without_spans_has_no_bubble_and_no_ledger_to_tell() -> None:
    bare = point("a", 9.0, 3, bubble_fraction=None, ledger_compute_s=None)
    assert set(answers(bare)) == {"Fastest", "Memory"}
