"""What a stage holds, counted by hand."""

import pytest
from cases import GRID, NAMES, actions, make

from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.builders import Recompute, with_optimizer
from pipebench.schedule.catalogue import build
from pipebench.schedule.memory import (
    Peak,
    StageActivations,
    held_bytes,
    most_activation_bytes,
    peak_activation_bytes,
    peak_in_flight,
)

TEN = StageActivations(full_bytes=10, input_bytes=3)
HUNDRED = StageActivations(full_bytes=100, input_bytes=30)


@pytest.mark.parametrize(
    ("name", "recompute", "peaks"),
    [
        # M=4 on a stage of 10 bytes (3 of them its input) and one of 100 (30).
        ("gpipe", Recompute.NEVER, [40, 400]),
        ("gpipe", Recompute.ALWAYS, [3 * 3 + 10, 3 * 30 + 100]),
        ("gpipe", Recompute.EXCEPT_LAST, [3 * 3 + 10, 3 * 30 + 100]),
        ("1f1b", Recompute.NEVER, [20, 100]),
        ("1f1b", Recompute.ALWAYS, [3 + 10, 100]),
        ("1f1b", Recompute.EXCEPT_LAST, [10 + 10, 100]),  # 0R2 while all of micro-batch 3 is held
        ("naive", Recompute.NEVER, [10, 100]),
        ("naive", Recompute.ALWAYS, [10, 100]),
    ],
)
def test_two_stages_and_four_micro_batches_hold_at_most(name: str, recompute: Recompute, peaks: list[float]) -> None:
    assert peak_activation_bytes(make(name, 2, 4, recompute), [TEN, HUNDRED]) == peaks


def test_the_last_micro_batch_of_1f1b_is_held_whole_when_it_is_not_recomputed() -> None:
    # Rank 0 runs 0F0 0F1 0R0 0B0 0B1: an input (3), all of micro-batch 1 beside it (13), then both whole (20).
    assert peak_activation_bytes(make("1f1b", 2, 2, Recompute.EXCEPT_LAST), [TEN, TEN]) == [20, 10]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), GRID)
def test_gpipe_with_recompute_holds_all_inputs_and_one_full_activation(num_stages: int, num_micro_batches: int) -> None:
    # Huang et al. 2019, section 2.3; the input of the micro-batch in work is part of its full activation.
    schedule = make("gpipe", num_stages, num_micro_batches, Recompute.ALWAYS)
    expected = (num_micro_batches - 1) * 3 + 10
    assert peak_activation_bytes(schedule, [TEN] * num_stages) == [expected] * num_stages


@pytest.mark.parametrize("name", NAMES)
def test_recompute_and_the_optimizer_leave_the_number_of_micro_batches_in_flight_alone(name: str) -> None:
    assert peak_in_flight(with_optimizer(make(name, 4, 6, Recompute.ALWAYS))) == peak_in_flight(make(name, 4, 6))


def test_the_weights_part_of_a_split_backward_keeps_its_own_bytes_until_it_runs() -> None:
    schedule = Schedule("s", [actions("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2")])
    kept = StageActivations(full_bytes=10, input_bytes=0, weight_bytes=6)
    assert held_bytes(schedule, schedule.rows[0], [kept]).tolist() == [10, 20, 16, 26, 22, 16, 12, 6, 0]
    assert peak_activation_bytes(schedule, [kept]) == [26]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(p, m) for p, m in GRID if m >= 2 * p])
def test_zb_h1_takes_the_memory_of_1f1b_and_zb_h2_almost_twice_that(num_stages: int, num_micro_batches: int) -> None:
    # Qi et al. 2024, table 2, in M_B = M_W.
    one = [StageActivations(1, 1, 1)] * num_stages
    h1 = peak_activation_bytes(make("zb_h1", num_stages, num_micro_batches), one)
    h2 = peak_activation_bytes(make("zb_h2", num_stages, num_micro_batches), one)
    assert h1 == [num_stages] * num_stages
    assert h2 == [2 * num_stages - 1] * num_stages


def test_the_most_activations_may_be_held_before_the_gradients_make_a_peak() -> None:
    """A limit on activations holds at any time, not only when activations and gradients together are at their most."""
    schedule = build("gpipe", 1, 2)
    kept = StageActivations(3.0, 0.0, first_peaks={Op.BACKWARD: Peak(1.0, 10.0)}, gradient_bytes={Op.BACKWARD: 10.0})
    [at_the_peak] = peak_activation_bytes(schedule, [kept])
    assert most_activation_bytes(schedule, schedule.rows[0], [kept]) >= 6.0
    assert most_activation_bytes(schedule, schedule.rows[0], [kept]) >= at_the_peak
