"""The learning rate against torch's own schedulers, which step it instead of computing it."""

import pytest
import torch
from torch.optim import lr_scheduler

from pipebench.config import OptimizerConfig
from pipebench.learning_rate import lr_at

WARMUP, DECAY, FLOOR = 4, 15, 0.2


def rates(make_scheduler, num_updates: int) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = make_scheduler(optimizer)
    found = []
    for _ in range(num_updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warmed_up(optimizer: torch.optim.Optimizer, then: lr_scheduler.LRScheduler) -> lr_scheduler.SequentialLR:
    growing = lr_scheduler.LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    return lr_scheduler.SequentialLR(optimizer, [growing, then], milestones=[WARMUP])


def constant(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ConstantLR(optimizer, factor=1.0)


def linear(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=FLOOR, total_iters=DECAY - WARMUP)


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=DECAY - WARMUP, eta_min=0.3 * FLOOR)


@pytest.mark.parametrize("after", [constant, linear, cosine], ids=lambda after: after.__name__)
def test_it_is_that_of_torchs_schedulers_after_a_warm_up(after) -> None:  # type: ignore[no-untyped-def]
    falls = after is not constant
    config = OptimizerConfig(
        name="sgd",
        lr=0.3,
        lr_schedule=after.__name__,
        lr_warmup=WARMUP,
        lr_decay=DECAY if falls else None,
        lr_floor=FLOOR if falls else 0.0,
    )
    expected = rates(lambda optimizer: warmed_up(optimizer, after(optimizer)), DECAY + 1)
    assert [lr_at(config, update) for update in range(DECAY + 1)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_lowest_rate_stays(schedule: str) -> None:
    config = OptimizerConfig(name="sgd", lr=0.3, lr_schedule=schedule, lr_decay=DECAY, lr_floor=FLOOR)
    assert [lr_at(config, update) for update in (DECAY, DECAY + 1, 10 * DECAY)] == pytest.approx([0.06] * 3)


def test_without_a_schedule_it_is_constant() -> None:
    assert {lr_at(OptimizerConfig(name="sgd", lr=0.3), update) for update in (0, 1, 1000)} == {0.3}
