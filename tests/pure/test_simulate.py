"""The simulator against its own definition and published closed forms."""

from collections.abc import Callable

import numpy as np
import pytest
from cases import GRID, NAMES, UNIT, costs, make
from hypothesis import given
from hypothesis import strategies as st

from pipebench.errors import ScheduleError
from pipebench.metrics import bubble_fraction
from pipebench.schedule.action import Action, Op
from pipebench.schedule.builders import IN_ROWS, Recompute
from pipebench.schedule.memory import peak_in_flight
from pipebench.schedule.simulate import Link, play, simulate

Makespan = Callable[[int, int, float, float, float], float]

CLOSED_FORMS: list[tuple[str, Recompute, Makespan]] = [
    # shared/reference/schedule_closed_forms.csv; p stages, m micro-batches. Sources: Huang et al. 2019 (gpipe),
    # Narayanan et al. 2021 (1f1b); the makespans with recompute are derived there.
    ("gpipe", Recompute.NEVER, lambda p, m, f, b, r: (m + p - 1) * (f + b)),
    ("gpipe", Recompute.ALWAYS, lambda p, m, f, b, r: (m + p - 1) * f + m * (r + b) + (p - 1) * b),
    ("gpipe", Recompute.EXCEPT_LAST, lambda p, m, f, b, r: (m + p - 1) * f + (m - 1) * r + (m + p - 1) * b),
    ("1f1b", Recompute.NEVER, lambda p, m, f, b, r: (m + p - 1) * (f + b)),
    ("naive", Recompute.NEVER, lambda p, m, f, b, r: p * m * (f + b)),
]


@pytest.mark.parametrize(
    ("name", "recompute", "makespan"), CLOSED_FORMS, ids=[f"{name}-{r.value}" for name, r, _ in CLOSED_FORMS]
)
@pytest.mark.parametrize(("p", "m"), GRID)
@pytest.mark.parametrize(("f", "b", "r"), [(1, 2, 1), (3, 5, 3), (10, 18, 7), (2, 1, 1)])
def test_the_makespan_equals_the_published_closed_form(
    name: str, recompute: Recompute, makespan: Makespan, p: int, m: int, f: float, b: float, r: float
) -> None:
    trace = simulate(make(name, p, m, recompute), costs(f, b, r))
    assert trace.makespan_s == makespan(p, m, f, b, r)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= p])
@pytest.mark.parametrize(("f", "b", "r"), [(1, 2, 1), (3, 5, 3), (4, 4, 4)])
def test_1f1b_with_recompute_takes_its_closed_form_while_m_is_at_least_p(
    p: int, m: int, f: float, b: float, r: float
) -> None:
    trace = simulate(make("1f1b", p, m, Recompute.ALWAYS), costs(f, b, r))
    assert trace.makespan_s == (m + p - 1) * (f + b) + m * r


@pytest.mark.parametrize(("p", "m"), GRID)
def test_latency_counts_once_for_each_hop_on_the_critical_path(p: int, m: int) -> None:
    hops_of_1f1b = 2 * (p - 1) + (2 * ((m - 2) - (m - 2) // p) if m >= 2 else 0)
    hops = {"gpipe": 2 * (p - 1), "1f1b": hops_of_1f1b, "naive": 2 * (p - 1) * m}
    latency = 2.0**-10  # exact in binary, and small beside an action
    for name, expected in hops.items():
        schedule = make(name, p, m)
        free = simulate(schedule, costs(1.0, 2.0)).makespan_s
        delayed = simulate(schedule, costs(1.0, 2.0), latency).makespan_s
        assert (delayed - free) / latency == expected, name


@given(
    st.sampled_from(NAMES),
    st.sampled_from([Recompute.NEVER, *IN_ROWS]),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 2**30),
)
def test_an_action_starts_the_moment_its_rank_is_free_and_its_inputs_are_there(
    name: str, recompute: Recompute, num_stages: int, num_micro_batches: int, salt: int
) -> None:
    schedule = make(name, num_stages, num_micro_batches, recompute)

    def duration(action: Action) -> float:
        return 1 + ((salt * 31 + ord(action.op) * 7 + action.stage * 13 + action.micro_batch * 5) % 64) / 8

    transfer_s = [(salt + 7 * stage) % 5 / 4 for stage in range(schedule.num_stages)]

    def latency(producer: Action, consumer: Action) -> float:
        crosses = schedule.rank_of(producer) != schedule.rank_of(consumer)
        return transfer_s[max(producer.stage, consumer.stage)] if crosses else 0.0

    trace = play(schedule, np.array([duration(action) for action in schedule]), transfer_s)
    spans = {span.action: span for span in trace.spans}
    for rank, row in enumerate(schedule.rows):
        free_at = 0.0
        for action in row:
            arrivals = [spans[needed].end_s + latency(needed, action) for needed in schedule.dependencies(action)]
            assert spans[action].rank == rank
            assert spans[action].start_s == max([free_at, *arrivals])
            assert spans[action].duration_s == pytest.approx(duration(action))
            free_at = spans[action].end_s
    assert trace.makespan_s == max(span.end_s for span in trace.spans)
    assert len(trace.spans) == schedule.num_actions


def test_the_longest_stage_span_leaves_out_what_a_rank_waits_before_its_first_action() -> None:
    # Qi et al. 2024, section 5.3: ZB-H2 with equal costs idles in the fill alone.
    trace = simulate(make("zb_h2", 4, 8), costs(1.0, 2.0))
    assert trace.makespan_s == 3 * 8 + 3
    assert trace.longest_stage_span_s == 3 * 8


@pytest.mark.parametrize("name", NAMES)
def test_a_transfer_within_a_rank_takes_no_time(name: str) -> None:
    schedule = make(name, 1, 3)
    assert simulate(schedule, UNIT, 100.0).makespan_s == simulate(schedule, UNIT).makespan_s


def test_a_link_takes_its_latency_and_the_bytes_share_of_its_bandwidth() -> None:
    assert Link().transfer_s(1e9) == 0.0
    assert Link(latency_s=0.5).transfer_s(1e9) == 0.5
    assert Link(latency_s=0.5, bytes_per_s=100.0).transfer_s(50) == 1.0


def test_a_missing_cost_is_not_taken_for_nothing() -> None:
    forwards = {(stage, Op.FORWARD): 1.0 for stage in range(2)}
    with pytest.raises(ScheduleError, match=r"schedule zb_h1: 0I0: expected a cost for \(0, I\)"):
        simulate(make("zb_h1", 2, 2), forwards)


def test_a_thousand_ranks_and_four_thousand_micro_batches_take_their_closed_form() -> None:
    num_ranks, num_micro_batches = 1024, 4096
    schedule = make("1f1b", num_ranks, num_micro_batches)
    assert schedule.num_actions == 2 * num_ranks * num_micro_batches
    unit = {(stage, op): cost for stage in range(num_ranks) for op, cost in ((Op.FORWARD, 1.0), (Op.BACKWARD, 2.0))}
    trace = simulate(schedule, unit)
    slots = num_micro_batches + num_ranks - 1
    assert trace.makespan_s == trace.longest_stage_span_s == 3 * slots
    assert bubble_fraction(trace) == pytest.approx((num_ranks - 1) / slots, rel=1e-12)
    assert peak_in_flight(schedule) == list(range(num_ranks, 0, -1))
    # Every stage's forwards wait for the one before, in the order of the micro-batches.
    assert trace.start_s[schedule.place[Op.FORWARD][:, 0]].tolist() == list(range(num_ranks))
