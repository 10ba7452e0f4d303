"""A pipeline trains what one device trains: dropout on, everything recomputed, and not one bit apart.

The control adds the same gradients up in another order, so it does drift: what it shows is rounding.
"""

import pytest
from plain import TRANSFORMER, assert_identical, parameters
from ranks import Outcome, Point, run

from pipebench.config import OptimizerConfig
from pipebench.report.figures.drift import drift
from pipebench.rounding import largest_drift
from pipebench.schedule.builders import Recompute

NUM_STEPS = 12


def trained(name: str, stages: int) -> Outcome:
    point = Point(TRANSFORMER, name, Recompute.ALWAYS, num_stages=stages, num_micro_batches=4)
    return run(point, NUM_STEPS, True, OptimizerConfig(name="adamw", lr=0.001))


@pytest.fixture(scope="module")
def one_device() -> Outcome:
    return trained("1f1b", stages=1)


def test_four_stages_train_as_one_does_to_the_last_bit(one_device: Outcome) -> None:
    pipeline = trained("1f1b", stages=4)
    assert pipeline.losses == one_device.losses
    assert_identical(parameters(pipeline.layers), parameters(one_device.layers))


def test_another_order_of_gradients_drifts_as_far_as_rounding_explains(one_device: Outcome) -> None:
    found = drift(trained("gpipe", stages=4).losses, one_device.losses)
    assert len(found) == NUM_STEPS
    assert max(found) > 0
    assert all(value <= largest_drift(step) for step, value in enumerate(found, start=1))


def test_a_mistake_of_a_thousandth_in_one_step_is_more_than_rounding_explains(one_device: Outcome) -> None:
    """The bound is no formality: a learning rate that is off by as much leaves it at once."""
    point = Point(TRANSFORMER, "1f1b", num_stages=4, num_micro_batches=4)
    other = run(point, NUM_STEPS, True, OptimizerConfig(name="adamw", lr=0.001001))
    found = drift(other.losses, one_device.losses)
    assert any(value > largest_drift(step) for step, value in enumerate(found, start=1))
