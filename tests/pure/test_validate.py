"""A schedule with one thing wrong is refused, and the message says which."""

import pytest
from cases import NAMES, actions, make
from hypothesis import given
from hypothesis import strategies as st

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Action, Op, Schedule
from pipebench.schedule.builders import Recompute, with_optimizer
from pipebench.schedule.validate import validate


def rows(*lines: str) -> list[list[Action]]:
    return [actions(line) for line in lines]


@pytest.mark.parametrize(
    ("what", "broken", "message"),
    [
        (
            "a backward is missing",
            rows("0F0 0F1 0B1 0B0", "1F0 1F1 1B1"),
            "schedule s: 1B0 stands 0 times: expected once",
        ),
        (
            "a forward is missing",
            rows("0F0 0B1 0B0", "1F0 1F1 1B1 1B0"),
            "schedule s: 0F1 stands 0 times: expected once",
        ),
        (
            "a forward is doubled",
            rows("0F0 0F1 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"),
            "schedule s: 0F1 stands 2 times: expected once",
        ),
        (
            "a recompute is doubled",
            rows("0F0 0R0 0R0 0B0"),
            "schedule s: 0R0 stands 2 times: expected at most once",
        ),
        (
            "an optimizer step is doubled",
            rows("0F0 0B0 0O 0O"),
            "schedule s: 0O stands 2 times: expected at most once",
        ),
        (
            "a recompute comes after its backward",
            rows("0F0 0B0 0R0"),
            "schedule s cannot proceed: rank 0 at 0B0 waits for 0R0",
        ),
        (
            "a recompute comes before its forward",
            rows("0R0 0F0 0B0"),
            "schedule s cannot proceed: rank 0 at 0R0 waits for 0F0",
        ),
        (
            "an optimizer steps before the last backward",
            rows("0F0 0F1 0B1 0O 0B0"),
            "schedule s cannot proceed: rank 0 at 0O waits for 0B0",
        ),
        (
            "a backward comes before its forward",
            rows("0B0 0F0"),
            "schedule s cannot proceed: rank 0 at 0B0 waits for 0F0",
        ),
        (
            "two ranks wait for each other",
            rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
            "schedule s cannot proceed: rank 0 at 0B0 waits for 1B0, rank 1 at 1F1 waits for 0F1",
        ),
        (
            "a weight gradient is missing",
            rows("0F0 0I0"),
            "schedule s: 0W0 stands 0 times: expected once, after its I",
        ),
        (
            "a weight gradient has no input gradient",
            rows("0F0 0W0"),
            "schedule s: 0I0 stands 0 times: expected once, before its W",
        ),
        (
            "a backward is whole and split",
            rows("0F0 0B0 0I0 0W0"),
            "schedule s: 0B0 stands beside I or W: expected B, or I and W",
        ),
        (
            "a weight gradient comes before its input gradient",
            rows("0F0 0W0 0I0"),
            "schedule s cannot proceed: rank 0 at 0W0 waits for 0I0",
        ),
        (
            "an optimizer steps before the last weight gradient",
            rows("0F0 0F1 0I0 0I1 0W1 0O 0W0"),
            "schedule s cannot proceed: rank 0 at 0O waits for 0W0",
        ),
        (
            "a rank is idle",
            rows("0F0 0B0", ""),
            "schedule s: rank 1 has no stage: expected at least one on each rank",
        ),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) and ":" not in value else "",
)
def test_broken_rows_are_refused(what: str, broken: list[list[Action]], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("s", broken))
    assert str(caught.value) == message


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("s", rows("0F0 0B0 1B0", "1F0"))
    assert str(caught.value) == "schedule s: 1F0 stands on rank 1, but stage 1 belongs to rank 0"


def test_a_gap_between_stages_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule("s", rows("0F0 0B0", "2F0 2B0"))
    assert str(caught.value) == "schedule s: stages [0, 2]: expected all of 0 to 2"


sizes = st.integers(2, 4)
some_schedule = st.builds(
    lambda name, stages, micro_batches, recompute: with_optimizer(make(name, stages, micro_batches, recompute)),
    st.sampled_from(NAMES), sizes, sizes, st.sampled_from([Recompute.EXCEPT_LAST, Recompute.ALWAYS]),
)  # fmt: skip


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return Schedule("mutant", (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


def picked(schedule: Schedule, data: st.DataObject) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.rows[rank]) - 1))


@given(some_schedule, st.data())
def test_taking_any_forward_or_backward_away_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank, place = picked(schedule, data)
    row = list(schedule.rows[rank])
    removed = row.pop(place)
    if removed.op not in (Op.RECOMPUTE, Op.OPTIMIZER):
        with pytest.raises(ScheduleError, match=f"{removed} stands 0 times: expected once"):
            validate(with_row(schedule, rank, row))


@given(some_schedule, st.data())
def test_doubling_any_action_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank, place = picked(schedule, data)
    row = list(schedule.rows[rank])
    doubled = row[place]
    row.insert(data.draw(st.integers(0, len(row))), doubled)
    with pytest.raises(ScheduleError, match=f"{doubled} stands 2 times"):
        validate(with_row(schedule, rank, row))


@given(some_schedule, st.data())
def test_moving_any_action_to_another_rank_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rank, place = picked(schedule, data)
    other = (rank + 1) % schedule.num_ranks
    rows = [list(row) for row in schedule.rows]
    moved = rows[rank].pop(place)
    rows[other].insert(0, moved)
    with pytest.raises(ScheduleError, match=r"stands on rank \d, but stage \d belongs to rank \d"):
        Schedule("mutant", tuple(map(tuple, rows)))


@given(some_schedule, st.data())
def test_a_recompute_after_its_backward_cannot_proceed(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.rows[rank])
    recompute = data.draw(st.sampled_from([action for action in row if action.op == Op.RECOMPUTE]))
    place = row.index(recompute)
    row[place], row[place + 1] = row[place + 1], row[place]
    with pytest.raises(ScheduleError, match=f"cannot proceed: .*{row[place]} waits for {recompute}"):
        validate(with_row(schedule, rank, row))


def test_the_grid_marks_the_failing_row_and_action() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("s", rows("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1")))
    assert caught.value.grid.splitlines() == [
        "> rank 0 |  0F0  0F1  0B0 [0B1]",
        "> rank 1 |  1F0  1B0 [1B1] 1F1 ",
    ]


def test_a_long_row_is_shown_around_its_failing_action() -> None:
    row = " ".join(f"0F{m} 0B{m}" for m in range(20)).replace("0F10 0B10", "0B10 0F10")
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("s", rows(row)))
    assert caught.value.grid == (
        "> rank 0 | ...  0F7  0B7  0F8  0B8  0F9  0B9 [0B10] 0F10  0F11  0B11  0F12  0B12  0F13  ..."
    )
