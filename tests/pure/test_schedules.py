"""What every schedule must be, over schedules x recompute x (K, M), K=1, M=1 and M<K included."""

from collections import Counter

import pytest
from cases import GRID, LOOPED, NAMES, STAGES, STRAIGHT, UNIT, V_SHAPED, actions, costs, make
from hypothesis import given
from hypothesis import strategies as st

from pipebench.errors import ConfigError, ScheduleError
from pipebench.metrics import bubble_fraction
from pipebench.schedule.action import Action, Op, Schedule, Transfer
from pipebench.schedule.bounds import PassCosts, bubble_bound
from pipebench.schedule.builders import IN_ROWS, SCHEDULES, Recompute, with_optimizer, with_optimizer_last
from pipebench.schedule.catalogue import build
from pipebench.schedule.memory import peak_in_flight
from pipebench.schedule.simulate import simulate
from pipebench.schedule.validate import validate

every_schedule = pytest.mark.parametrize("name", NAMES)
every_recompute = pytest.mark.parametrize(
    "recompute", [Recompute.NEVER, *IN_ROWS], ids=lambda recompute: recompute.value
)
every_size = pytest.mark.parametrize(("num_stages", "num_micro_batches"), GRID)

some_size = st.integers(1, 9)
some_seconds = st.floats(0.01, 10.0)


def test_the_grid_covers_every_registered_schedule_and_each_has_a_bound() -> None:
    assert sorted(NAMES) == sorted(SCHEDULES)
    for name, recipe in SCHEDULES.items():
        assert bubble_bound(name, 4, 16, recipe.usual_chunks) is not None


@every_schedule
@every_recompute
@every_size
def test_a_built_schedule_is_valid_with_and_without_its_optimizer(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int
) -> None:
    schedule = make(name, num_stages, num_micro_batches, recompute)
    validate(schedule)
    validate(with_optimizer(schedule))


@every_schedule
@every_recompute
@every_size
def test_each_action_stands_once_on_the_rank_of_its_stage(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int
) -> None:
    schedule = with_optimizer(make(name, num_stages, num_micro_batches, recompute))
    num_recomputed = {
        Recompute.NEVER: 0,
        Recompute.EXCEPT_LAST: num_micro_batches - 1,
        Recompute.ALWAYS: num_micro_batches,
    }[recompute]
    for rank, row in enumerate(schedule.rows):
        expected = []
        for stage in schedule.stages_of_rank(rank):
            expected += [Action(Op.OPTIMIZER, stage)]
            expected += [Action(Op.FORWARD, stage, m) for m in range(num_micro_batches)]
            expected += [Action(Op.RECOMPUTE, stage, m) for m in range(num_recomputed)]
            for m in range(num_micro_batches):
                split = schedule.runs(Op.INPUT_GRADIENT, stage, m)
                ops = (Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT) if split else (Op.BACKWARD,)
                expected += [Action(op, stage, m) for op in ops]
        assert Counter(row) == Counter(expected)
    assert schedule.num_ranks == num_stages
    assert schedule.num_micro_batches == num_micro_batches


@pytest.mark.parametrize(
    ("name", "chunks", "stage_ranks"),
    [
        *((name, 1, (0, 1, 2)) for name in STRAIGHT),
        *((name, chunks, (0, 1, 2) * chunks) for name in LOOPED for chunks in (1, 2, 3)),
        *((name, 2, (0, 1, 2, 2, 1, 0)) for name in V_SHAPED),
    ],
)
def test_stages_lie_straight_looped_or_folded_over_the_ranks(
    name: str, chunks: int, stage_ranks: tuple[int, ...]
) -> None:
    assert make(name, 3, 4, chunks=chunks).stage_ranks == stage_ranks


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@every_size
def test_looped_schedules_are_valid_for_any_number_of_chunks_and_micro_batches(
    name: str, chunks: int, num_stages: int, num_micro_batches: int
) -> None:
    validate(make(name, num_stages, num_micro_batches, Recompute.ALWAYS, chunks))


@pytest.mark.parametrize(("looped", "straight"), [("interleaved", "1f1b"), ("looped_bfs", "gpipe")])
@every_size
def test_with_one_chunk_a_looped_schedule_is_the_straight_one(
    looped: str, straight: str, num_stages: int, num_micro_batches: int
) -> None:
    rows = make(looped, num_stages, num_micro_batches, chunks=1).rows
    assert rows == make(straight, num_stages, num_micro_batches).rows


@pytest.mark.parametrize(
    ("name", "chunks", "wanted"),
    [("gpipe", 2, "1"), ("zb_h1", 2, "1"), ("zb_v", 1, "2"), ("interleaved", 0, "at least 1")],
)
def test_chunks_that_a_schedule_is_not_defined_for_are_refused(name: str, chunks: int, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, 2, 4, chunks)
    assert str(caught.value) == f"chunks={chunks}: expected {wanted} with schedule={name}"


@every_schedule
@every_size
def test_a_recompute_stands_right_before_its_backward_or_input_gradient(
    name: str, num_stages: int, num_micro_batches: int
) -> None:
    for row in make(name, num_stages, num_micro_batches, Recompute.ALWAYS).rows:
        actions = list(row)
        for place, action in enumerate(actions):
            if action.op in (Op.BACKWARD, Op.INPUT_GRADIENT):
                assert actions[place - 1] == Action(Op.RECOMPUTE, action.stage, action.micro_batch)


@every_schedule
@every_recompute
@every_size
def test_where_ranks_agree_on_updates_all_optimizers_stand_at_the_ends_of_the_rows(
    name: str, num_stages: int, num_micro_batches: int, recompute: Recompute
) -> None:
    schedule = make(name, num_stages, num_micro_batches, recompute)
    stepped = with_optimizer_last(schedule)
    validate(stepped)
    for rank, (row, with_steps) in enumerate(zip(schedule.rows, stepped.rows, strict=True)):
        before, steps = with_steps[: len(row)], with_steps[len(row) :]
        assert before == row
        assert sorted(steps) == [Action(Op.OPTIMIZER, stage) for stage in schedule.stages_of_rank(rank)]


@every_schedule
@every_recompute
@every_size
def test_the_optimizer_steps_right_after_the_last_gradient_of_its_stage(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int
) -> None:
    schedule = with_optimizer(make(name, num_stages, num_micro_batches, recompute))
    for rank, row in enumerate(schedule.rows):
        actions = list(row)
        for stage in schedule.stages_of_rank(rank):
            place = actions.index(Action(Op.OPTIMIZER, stage))
            assert actions[place - 1].op in (Op.BACKWARD, Op.WEIGHT_GRADIENT)
            assert actions[place - 1].stage == stage
            assert all(after.stage != stage for after in actions[place + 1 :])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@every_size
def test_the_bubble_equals_its_closed_form(name: str, num_stages: int, num_micro_batches: int) -> None:
    trace = simulate(make(name, num_stages, num_micro_batches), UNIT)
    assert bubble_fraction(trace) == pytest.approx(bubble_bound(name, num_stages, num_micro_batches), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_micro_batches", "bound"),
    [
        ("gpipe", 1, 1, 0.0),
        ("gpipe", 4, 4, 3 / 7),
        ("1f1b", 4, 8, 3 / 11),
        ("1f1b", 8, 1, 7 / 8),
        ("naive", 4, 100, 3 / 4),
        ("naive", 1, 5, 0.0),
    ],
)
def test_the_bounds_give_the_published_numbers(
    name: str, num_stages: int, num_micro_batches: int, bound: float
) -> None:
    assert bubble_bound(name, num_stages, num_micro_batches) == pytest.approx(bound)


@every_recompute
@given(some_size, some_size, some_seconds, some_seconds, some_seconds)
def test_gpipe_with_recompute_has_the_bubble_of_its_closed_form_at_any_cost(
    recompute: Recompute, num_stages: int, num_micro_batches: int, forward: float, backward: float, again: float
) -> None:
    trace = simulate(make("gpipe", num_stages, num_micro_batches, recompute), costs(forward, backward, again))
    num_recomputed = {"never": 0, "except_last": num_micro_batches - 1, "always": num_micro_batches}[recompute.value]
    mean = PassCosts(forward, backward / 2, backward / 2, again * num_recomputed / num_micro_batches)
    expected = bubble_bound("gpipe", num_stages, num_micro_batches, costs=mean)
    assert bubble_fraction(trace) == pytest.approx(expected, abs=1e-9)
    # Written out: (K-1)(f+b) / ((M+K-1)(f+b) + R r) for R recomputed micro-batches.
    fill_and_drain = (num_stages - 1) * (forward + backward)
    work = num_micro_batches * (forward + backward) + num_recomputed * again
    assert expected == pytest.approx(fill_and_drain / (work + fill_and_drain))


@given(some_size, some_size, some_seconds, some_seconds)
def test_naive_keeps_one_stage_busy_at_any_cost(
    num_stages: int, num_micro_batches: int, forward: float, backward: float
) -> None:
    trace = simulate(make("naive", num_stages, num_micro_batches), costs(forward, backward))
    assert trace.makespan_s == pytest.approx(num_stages * num_micro_batches * (forward + backward))
    assert bubble_fraction(trace) == pytest.approx((num_stages - 1) / num_stages, abs=1e-9)


@every_size
def test_gpipe_holds_all_micro_batches_1f1b_as_many_as_stages_follow_naive_one(
    num_stages: int, num_micro_batches: int
) -> None:
    assert peak_in_flight(make("gpipe", num_stages, num_micro_batches)) == [num_micro_batches] * num_stages
    assert peak_in_flight(make("1f1b", num_stages, num_micro_batches)) == [
        min(num_micro_batches, num_stages - stage) for stage in range(num_stages)
    ]
    assert peak_in_flight(make("naive", num_stages, num_micro_batches)) == [1] * num_stages


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gpipe", ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]),
        ("1f1b", ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("naive", ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ("zb_h1", ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
        ("zb_h2", ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]),
        (
            "interleaved",
            ["0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2", "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2"],
        ),
        (
            "looped_bfs",
            ["0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0", "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0"],
        ),
    ],
)
def test_two_stages_and_three_micro_batches_run_in_this_order(name: str, rows: list[str]) -> None:
    assert make(name, 2, 3).rows == tuple(tuple(actions(row)) for row in rows)


def test_except_last_recomputes_all_but_the_last_micro_batch() -> None:
    assert make("gpipe", 1, 3, Recompute.EXCEPT_LAST).rows == (tuple(actions("0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0")),)


@pytest.mark.parametrize(
    ("action", "waits_for"),
    [
        ("0F1", ""),
        ("1F1", "0F1"),
        ("2R1", "2F1"),
        ("2B1", "2R1"),
        ("2B2", "2F2"),
        ("1B1", "1R1 2B1"),
        ("1B2", "1F2 2B2"),
        ("0O", "0B0 0B1 0B2"),
    ],
)
def test_an_action_waits_for_these_and_no_others(action: str, waits_for: str) -> None:
    schedule = with_optimizer(make("gpipe", 3, 3, Recompute.EXCEPT_LAST))
    assert list(schedule.dependencies(Action.parse(action))) == actions(waits_for)


@pytest.mark.parametrize(
    ("action", "waits_for"),
    [
        ("1I0", "1F0 2I0"),  # both parts
        ("0I0", "0R0 1I0"),  # recomputed
        ("1B1", "1F1 2I1"),  # whole, behind a split one
        ("0I1", "0F1 1B1"),  # split, behind a whole one
        ("2I0", "2F0"),
        ("1W0", "1I0"),
        ("0O", "0W0 0W1"),
        ("1O", "1W0 1B1"),
    ],
)
def test_a_split_backward_waits_for_these(action: str, waits_for: str) -> None:
    rows = ["0F0 0F1 0R0 0I0 0I1 0W0 0W1 0O", "1F0 1F1 1I0 1B1 1W0 1O", "2F0 2I0 2F1 2I1 2W0 2W1 2O"]
    schedule = Schedule("mixed", [actions(row) for row in rows])
    validate(schedule)
    assert list(schedule.dependencies(Action.parse(action))) == actions(waits_for)


@every_schedule
@every_recompute
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (2, 3), (4, 5), (3, 8)])
def test_the_dependencies_of_all_actions_at_once_are_those_of_each(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int
) -> None:
    schedule = with_optimizer(make(name, num_stages, num_micro_batches, recompute))
    every = list(schedule)
    for place, action in enumerate(every):
        at_once = [every[p] for p in schedule.producers()[:, place] if p < len(every)]
        one_by_one = list(schedule.dependencies(action))
        if action.op == Op.OPTIMIZER:  # all are of its own rank, so the last stands for them
            one_by_one = [max(one_by_one, key=every.index)]
        assert at_once == one_by_one


def test_transfers_come_in_the_order_in_which_their_consumers_stand() -> None:
    first, second = actions("0F0 0F1"), actions("1F0 1F1")
    back, home = actions("1B1 1B0"), actions("0B1 0B0")
    assert list(make("gpipe", 2, 2).transfers()) == [
        *(Transfer(producer, consumer, 1, 0) for producer, consumer in zip(back, home, strict=True)),
        *(Transfer(producer, consumer, 0, 1) for producer, consumer in zip(first, second, strict=True)),
    ]


@every_schedule
@every_recompute
@every_size
def test_every_boundary_between_ranks_is_crossed_forward_and_back_once_for_each_micro_batch(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int
) -> None:
    schedule = with_optimizer(make(name, num_stages, num_micro_batches, recompute))
    transfers = list(schedule.transfers())
    backwards = (Op.BACKWARD, Op.INPUT_GRADIENT)
    forward = {(t.producer.stage, t.producer.micro_batch) for t in transfers if t.producer.op == Op.FORWARD}
    backward = {(t.consumer.stage, t.consumer.micro_batch) for t in transfers if t.producer.op in backwards}
    owner = schedule.stage_ranks
    between_ranks = [stage for stage in range(len(owner) - 1) if owner[stage] != owner[stage + 1]]
    crossings = {(stage, m) for stage in between_ranks for m in range(num_micro_batches)}
    assert forward == backward == crossings
    assert len(transfers) == 2 * len(crossings)
    for transfer in transfers:
        assert transfer.producer.micro_batch == transfer.consumer.micro_batch


def test_stages_may_share_a_rank_and_then_need_no_transfer() -> None:
    row = "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0"
    v_shaped = Schedule("v", (tuple(a for a in actions(row) if a.stage in (0, 3)), tuple(actions("1F0 2F0 2B0 1B0"))))
    validate(v_shaped)
    assert v_shaped.stage_ranks == (0, 1, 1, 0)
    assert {(str(t.producer), str(t.consumer)) for t in v_shaped.transfers()} == {
        ("0F0", "1F0"),
        ("2F0", "3F0"),
        ("3B0", "2B0"),
        ("1B0", "0B0"),
    }


@given(st.sampled_from([Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE]), st.integers(0, 999), st.integers(0, 999))
def test_an_action_reads_back_from_its_text(op: Op, stage: int, micro_batch: int) -> None:
    assert Action.parse(str(Action(op, stage, micro_batch))) == Action(op, stage, micro_batch)
    assert Action.parse(str(Action(Op.OPTIMIZER, stage))) == Action(Op.OPTIMIZER, stage)


def test_an_action_prints_stage_op_and_micro_batch() -> None:
    assert str(Action(Op.FORWARD, 2, 10)) == "2F10"
    assert str(Action(Op.OPTIMIZER, 3)) == "3O"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2O0", "O", "-1F0", "2F-1", "2F0 2F1", "2f0"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    expected = f"action {text!r}: expected stage, op and micro-batch such as 2F0, or 2O"
    assert str(caught.value) == expected


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        build("1f2b", 2, 2)
    assert str(caught.value) == f"schedule='1f2b': expected one of {', '.join(SCHEDULES)}, zb_auto, or a .csv file"


@every_schedule
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(0, 4), (4, 0), (-1, 1)])
def test_fewer_than_one_stage_or_micro_batch_is_refused(name: str, num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, num_stages, num_micro_batches)
    assert str(caught.value) == (
        f"schedule {name}: {num_stages} stages, {num_micro_batches} micro-batches: expected at least 1 of each"
    )


@pytest.mark.parametrize("num_stages", STAGES)
def test_1f1b_with_recompute_adds_only_the_recomputes_while_m_is_at_least_k(num_stages: int) -> None:
    for num_micro_batches in (num_stages, num_stages + 1, 3 * num_stages):
        trace = simulate(make("1f1b", num_stages, num_micro_batches, Recompute.ALWAYS), UNIT)
        assert trace.makespan_s == 3 * (num_micro_batches + num_stages - 1) + num_micro_batches
