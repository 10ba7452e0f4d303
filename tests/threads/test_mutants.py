"""Schedules changed at random: what the validator lets pass runs to the right gradients, and nothing hangs."""

import random
from collections import Counter
from functools import cache

import pytest
from plain import MODELS, assert_close, build, gradients, mini_batch, plain_backward
from ranks import Point, run
from torch import Tensor

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import IN_ROWS, SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import build as build_schedule
from pipebench.schedule.validate import validate

NUM_MUTANTS = 600
NUM_MICRO_BATCHES = 3
NUM_SAMPLES = 7


def swap_neighbours(rows: list[list[Action]], choose: random.Random) -> None:
    row = choose.choice(rows)
    place = choose.randrange(len(row) - 1)
    row[place], row[place + 1] = row[place + 1], row[place]


def move(rows: list[list[Action]], choose: random.Random) -> None:
    row = choose.choice(rows)
    action = row.pop(choose.randrange(len(row)))
    row.insert(choose.randrange(len(row) + 1), action)


def drop(rows: list[list[Action]], choose: random.Random) -> None:
    row = choose.choice(rows)
    del row[choose.randrange(len(row))]


def double(rows: list[list[Action]], choose: random.Random) -> None:
    row = choose.choice(rows)
    row.insert(choose.randrange(len(row) + 1), choose.choice(row))


def split_or_join(rows: list[list[Action]], choose: random.Random) -> None:
    """Cut a whole backward in two, the weights' part at the row's end, or fuse two parts where the first stands."""
    row = choose.choice(rows)
    place, action = choose.choice([(p, a) for p, a in enumerate(row) if a.op in (Op.BACKWARD, Op.INPUT_GRADIENT)])
    of_weights = Action(Op.WEIGHT_GRADIENT, action.stage, action.micro_batch)
    if action.op == Op.BACKWARD:
        row[place] = Action(Op.INPUT_GRADIENT, action.stage, action.micro_batch)
        row.append(of_weights)
    else:
        row[place] = Action(Op.BACKWARD, action.stage, action.micro_batch)
        if of_weights in row:
            row.remove(of_weights)


def drop_recompute(rows: list[list[Action]], choose: random.Random) -> None:
    row = choose.choice(rows)
    row[:] = [action for action in row if action.op != Op.RECOMPUTE or choose.random() < 0.5]


CHANGES = [swap_neighbours, swap_neighbours, move, move, drop, double, split_or_join, split_or_join, drop_recompute]


def mutant(number: int) -> tuple[str, Schedule]:
    """Return a schedule after one to four changes; the same number gives the same one."""
    choose = random.Random(number)
    name = choose.choice(list(SCHEDULES))
    original = build_schedule(name, choose.randint(1, 3), NUM_MICRO_BATCHES)
    original = with_recompute(original, choose.choice([Recompute.NEVER, *IN_ROWS]))
    rows = [list(row) for row in original.rows]
    for _ in range(choose.randint(1, 4)):
        choose.choice(CHANGES)(rows, choose)
    return name, Schedule(f"mutant {number} of {name}", rows)


@cache
def expected(model: str) -> dict[str, Tensor]:
    layers, loss_of = build(MODELS[model])
    plain_backward(layers, loss_of, mini_batch(MODELS[model], 0, NUM_SAMPLES), NUM_MICRO_BATCHES)
    return gradients(layers)


def assert_runs_right(schedule: Schedule, model: str) -> None:
    outcome = run(Point(MODELS[model], rows=schedule, num_micro_batches=NUM_MICRO_BATCHES, num_samples=NUM_SAMPLES))
    assert_close(gradients(outcome.layers), expected(model))


def test_every_accepted_mutant_runs_to_the_right_gradients_and_none_hangs() -> None:
    outcomes: Counter[str] = Counter()
    accepted_of: Counter[str] = Counter()
    for number in range(NUM_MUTANTS):
        try:
            name, schedule = mutant(number)
            validate(schedule)
        except ScheduleError:
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        accepted_of[name] += 1
        assert_runs_right(schedule, ["synthetic", "mlp", "transformer"][number % 3])
    assert outcomes["refused"] > NUM_MUTANTS / 5, "the changes must do harm"
    assert outcomes["accepted"] > NUM_MUTANTS / 10, "some changes must be harmless"
    assert set(accepted_of) == set(SCHEDULES)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_that_keeps_the_waits_is_accepted_and_right(seed: int) -> None:
    """Draw the rows of one global order in which everything stands after what it waits for."""
    choose = random.Random(seed)
    names = ["zb_v", "interleaved", "zb_h1", "1f1b"]
    original = with_recompute(
        build_schedule(names[seed % 4], 2, NUM_MICRO_BATCHES), choose.choice([Recompute.NEVER, *IN_ROWS])
    )
    rows: list[list[Action]] = [[] for _ in original.rows]
    left = list(original)
    done: set[Action] = set()
    while left:
        action = choose.choice([a for a in left if done.issuperset(original.dependencies(a))])
        left.remove(action)
        done.add(action)
        rows[original.rank_of(action)].append(action)
    schedule = Schedule("drawn", rows)
    validate(schedule)
    assert_runs_right(schedule, "mlp")
