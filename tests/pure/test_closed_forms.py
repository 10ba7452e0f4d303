"""The closed forms of the literature against simulation, and our own bounds against both.

`data/schedule_closed_forms.csv` lists what papers and projects state, each row with its source. Every row is checked
here or named in `NOT_CHECKED`. Costs are those of a micro-batch on a rank; a rank with v stages has v-th parts.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipebench.metrics import bubble_fraction
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.bounds import (
    MAKESPANS,
    V_MIN_IDLE,
    PassCosts,
    bubble_bound,
    makespan_bound,
)
from pipebench.schedule.builders import SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.memory import StageActivations, peak_activation_bytes, peak_in_flight
from pipebench.schedule.simulate import simulate
from pipebench.trace import Trace

ROWS = Path(__file__).resolve().parent.parent / "data" / "schedule_closed_forms.csv"

NOT_CHECKED = {
    "DualPipe": "runs the stages from both ends, so a stage lives on two ranks; a schedule here has one owner a stage",
    "DualPipeV on d devices": "runs a forward and a backward as one block that sends at its end; no action here does",
}
"""Rows that cannot be checked, with the reason."""

CHECKED: dict[str, Callable[[], None]] = {}

UNIT = PassCosts()
UNEVEN = [PassCosts(1.0, 1.5, 1.0), PassCosts(2.0, 3.0, 1.0), PassCosts(1.0, 1.2, 0.8), PassCosts(0.5, 0.5, 0.1)]
SIZES = [(num_ranks, m) for num_ranks in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 8, 12, 16, 20)]
LATENCY_S = 2.0**-20
"""Small against any cost, so that it stretches the critical path and does not choose another; exact in binary."""


@dataclass(frozen=True)
class Played:
    schedule: Schedule
    trace: Trace

    @property
    def makespan_s(self) -> float:
        return self.trace.makespan_s


def played(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    costs: PassCosts = UNIT,
    chunks: int | None = None,
    recompute: Recompute = Recompute.NEVER,
    transfer_s: float = 0.0,
) -> Played:
    schedule = with_recompute(build(name, num_ranks, num_micro_batches, chunks), recompute)
    part = num_ranks / schedule.num_stages
    seconds = {
        Op.FORWARD: costs.forward_s * part,
        Op.BACKWARD: costs.backward_s * part,
        Op.INPUT_GRADIENT: costs.input_s * part,
        Op.WEIGHT_GRADIENT: costs.weight_s * part,
        Op.RECOMPUTE: costs.recompute_s * part,
    }
    table = {(stage, op): each for stage in range(schedule.num_stages) for op, each in seconds.items()}
    return Played(schedule, simulate(schedule, table, transfer_s))


def hops(name: str, num_ranks: int, num_micro_batches: int, chunks: int | None = None, by_span: bool = False) -> int:
    """Return how often the critical path changes ranks: by how many latencies a small latency stretches the step."""
    seconds = []
    for transfer_s in (0.0, LATENCY_S):
        trace = played(name, num_ranks, num_micro_batches, chunks=chunks, transfer_s=transfer_s).trace
        seconds.append(trace.longest_stage_span_s if by_span else trace.makespan_s)
    return round((seconds[1] - seconds[0]) / LATENCY_S)


def held(schedule: Schedule, of_weight: float) -> list[float]:
    """Return each rank's peak in stages' micro-batches, `of_weight` of one kept between `I` and `W`."""
    return peak_activation_bytes(schedule, [StageActivations(1.0, 1.0, of_weight)] * schedule.num_stages)


def checks(row: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Say which row of the file a check is for."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKED[row] = check
        return check

    return register


@checks("GPipe")
def gpipe() -> None:
    for p, m in SIZES:
        for c in [UNIT, *UNEVEN]:
            one = played("gpipe", p, m, c)
            assert one.makespan_s == pytest.approx((m + p - 1) * (c.forward_s + c.backward_s))
            assert bubble_fraction(one.trace) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert peak_in_flight(one.schedule) == [m] * p
        assert hops("gpipe", p, m) == 2 * (p - 1)


@checks("GPipe + recompute, R fused in B")
def gpipe_with_fused_recompute() -> None:
    for p, m in SIZES:
        fused = PassCosts(1.0, 1.0 + 1.5, 0.5)
        one = played("gpipe", p, m, fused)
        assert one.makespan_s == pytest.approx((m + p - 1) * (1.0 + 1.5 + 1.5))
        assert bubble_fraction(one.trace) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        kept = [StageActivations(full_bytes=100.0, input_bytes=1.0)] * p
        recomputed = with_recompute(build("gpipe", p, m), Recompute.ALWAYS)
        assert peak_activation_bytes(recomputed, kept) == [m - 1 + 100.0] * p  # the full one holds its input too
        assert hops("gpipe", p, m) == 2 * (p - 1)


@checks("GPipe + recompute, R may start before the gradient arrives")
def gpipe_with_early_recompute() -> None:
    for p, m in SIZES:
        for f, r, b in [(1.0, 1.0, 2.0), (1.0, 1.0, 3.0), (2.0, 1.0, 1.0), (1.0, 3.0, 1.0)]:
            one = played("gpipe", p, m, PassCosts(f, b / 2, b / 2, r), recompute=Recompute.ALWAYS)
            makespan = (m + p - 1) * f + m * (r + b) + (p - 1) * b
            assert one.makespan_s == pytest.approx(makespan)
            assert bubble_fraction(one.trace) == pytest.approx(1 - m * (f + r + b) / makespan, abs=1e-12)


@checks("GPipe + early recompute, last microbatch not recomputed")
def gpipe_with_early_recompute_except_last() -> None:
    for p, m in SIZES:
        for f, r, b in [(1.0, 1.0, 2.0), (1.0, 1.0, 3.0), (2.0, 1.0, 1.0), (1.0, 3.0, 1.0)]:
            one = played("gpipe", p, m, PassCosts(f, b / 2, b / 2, r), recompute=Recompute.EXCEPT_LAST)
            assert one.makespan_s == pytest.approx((m + p - 1) * f + (m - 1) * r + (m + p - 1) * b)


@checks("1F1B (PipeDream-Flush)")
def one_forward_one_backward() -> None:
    for p, m in SIZES:
        for c in [UNIT, *UNEVEN]:
            one = played("1f1b", p, m, c)
            assert one.makespan_s == pytest.approx((m + p - 1) * (c.forward_s + c.backward_s))
            assert bubble_fraction(one.trace) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            assert peak_in_flight(one.schedule) == [min(m, p - i) for i in range(p)]
        if m >= 2 and p >= 2:
            assert hops("1f1b", p, m) == 2 * (p - 1) + 2 * ((m - 2) - (m - 2) // p)
            if m % p == 0:
                assert hops("1f1b", p, m) == 2 * (p - 1) * m / p + 2 * (p - 2)


@checks("1F1B + recompute, R early")
def one_forward_one_backward_with_early_recompute() -> None:
    for p, m in SIZES:
        for f, r, b in [(1.0, 1.0, 2.0), (1.0, 0.5, 3.0), (2.0, 2.0, 2.0)]:
            one = played("1f1b", p, m, PassCosts(f, b / 2, b / 2, r), recompute=Recompute.ALWAYS)
            assert one.makespan_s == pytest.approx((m + p - 1) * (f + b) + m * r)


@checks("1F1B + recompute fused")
def one_forward_one_backward_with_fused_recompute() -> None:
    for p, m in SIZES:
        one = played("1f1b", p, m, PassCosts(1.0, 1.0 + 1.5, 0.5))
        assert one.makespan_s == pytest.approx((m + p - 1) * (1.0 + 1.5 + 1.5))
        assert bubble_fraction(one.trace) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@checks("Interleaved 1F1B, v chunks")
def interleaved() -> None:
    for p in (2, 3, 4, 5, 8):
        for m in (p, 2 * p, 3 * p):
            for v in (1, 2, 3, 4):
                one = played("interleaved", p, m, UNEVEN[0], v)
                work = UNEVEN[0].forward_s + UNEVEN[0].backward_s
                assert one.makespan_s == pytest.approx(m * work + (p - 1) * work / v)
                assert bubble_fraction(one.trace) == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
                if v > 1 and m > p:
                    expected = [(p - i - 1) * 2 + (v - 1) * p + 1 for i in range(p)]
                    assert peak_in_flight(one.schedule) == expected
                    assert expected[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
                    assert hops("interleaved", p, m, v) == 2 * (p * v - 1)


@checks("ZB-H1")
def zb_h1() -> None:
    for p, m in [(p, m) for p, m in SIZES if m >= p]:
        for c in [UNIT, *UNEVEN]:
            one = played("zb_h1", p, m, c)
            idle = (p - 1) * (c.forward_s + c.input_s - c.weight_s)
            makespan = m * c.busy_s + idle
            assert one.makespan_s == pytest.approx(makespan)
            assert bubble_fraction(one.trace) == pytest.approx(idle / makespan, abs=1e-12)
            assert held(one.schedule, 0.0) == [p - i for i in range(p)]
            assert held(one.schedule, 1.0) == [p] * p
        assert hops("zb_h1", p, m) == 4 * (p - 1) - (2 if m == p > 1 else 0)


@checks("ZB (any), m < p or m <= p, W < B")
def zb_with_few_micro_batches() -> None:
    for p, m in [(p, m) for p, m in SIZES if m < p]:
        for c in [UNIT, *UNEVEN]:
            one = played("zb_h1", p, m, c)
            assert one.makespan_s == pytest.approx((m + p - 1) * (c.forward_s + c.input_s) + c.weight_s)


@checks("ZB-H2")
def zb_h2() -> None:
    for p, m in [(p, m) for p, m in SIZES if m >= 2 * p - 1]:
        for c in [UNIT, *UNEVEN]:
            one = played("zb_h2", p, m, c)
            outside = max(0.0, c.forward_s + c.input_s - 2 * c.weight_s)
            assert one.trace.longest_stage_span_s == pytest.approx(m * c.busy_s + (p - 1) * outside)
            kept = 32 / 34
            expected = [(2 * p - 2 * i - 1) + 2 * i * kept for i in range(p)]
            assert held(one.schedule, kept) == pytest.approx(expected)
        assert played("zb_h2", p, m).makespan_s == 3 * m + p - 1
        assert hops("zb_h2", p, m, by_span=True) == 2 * (p - 1)
        assert hops("zb_h2", p, m) == p - 1


@checks("ZB-V, two half-size chunks per device")
def zb_v() -> None:
    for p, m in V_SIZES:
        one = played("zb_v", p, m)
        assert 2 * one.makespan_s == 6 * m + p - 1
        assert 2 * one.trace.longest_stage_span_s == 6 * m
        assert max(held(one.schedule, 1.0)) == 2 * p


@checks("V-Half")
def v_half() -> None:
    for p, m in [(p, m) for p, m in V_SIZES if p >= 3]:
        one = played("v_half", p, m)
        assert 2 * one.makespan_s == 6 * m + 3 * p - (4 if p % 2 else 7)
        assert max(held(one.schedule, 1.0)) == (p + 1 if p % 2 else p + 2)


@checks("V-Min")
def v_min() -> None:
    idle = {3: 5, 4: 11, 5: 15, 6: 17, 8: 27}
    share = {3: 0.667, 4: 0.5, 5: 0.6, 6: 0.5, 8: 0.5}
    for p, m in [(p, m) for p, m in V_SIZES if p in idle]:
        one = played("v_min", p, m)
        assert 2 * one.makespan_s == 6 * m + idle[p]
        assert max(held(one.schedule, 1.0)) / (2 * p) == pytest.approx(share[p], abs=5e-4)


@checks("no pipelining (naive model parallel)")
def naive() -> None:
    for p, m in SIZES:
        for c in [UNIT, *UNEVEN]:
            one = played("naive", p, m, c)
            assert one.makespan_s == pytest.approx(p * m * (c.forward_s + c.backward_s))
            assert bubble_fraction(one.trace) == pytest.approx((p - 1) / p, abs=1e-12)


V_SIZES = [(p, m) for p in (2, 3, 4, 5, 6, 8) for m in (2 * p, 2 * p + 1, 3 * p)]


def rows() -> list[str]:
    with ROWS.open(newline="") as file:
        return [row["schedule"] for row in csv.DictReader(file)]


def test_no_row_of_the_file_is_forgotten_and_none_is_both() -> None:
    assert sorted([*CHECKED, *NOT_CHECKED]) == sorted(rows())


@pytest.mark.parametrize("row", rows())
def test_simulation_gives_what_the_literature_states(row: str) -> None:
    if row in NOT_CHECKED:
        pytest.skip(NOT_CHECKED[row])
    CHECKED[row]()


some_ranks, some_micro_batches = st.integers(1, 7), st.integers(1, 18)
some_seconds = st.sampled_from([0.1, 0.5, 1.0, 1.3, 2.0, 3.0, 5.0])
some_costs = st.builds(PassCosts, some_seconds, some_seconds, some_seconds)
every_name = pytest.mark.parametrize("name", list(SCHEDULES))


def chunks_of(name: str) -> list[int]:
    recipe = SCHEDULES[name]
    return [chunks for chunks in (1, 2, 3) if recipe.least_chunks <= chunks <= (recipe.most_chunks or chunks)]


def test_every_schedule_has_a_closed_form() -> None:
    assert set(SCHEDULES) <= set(MAKESPANS)
    assert MAKESPANS.keys() - SCHEDULES.keys() == {"zb_auto"}


@every_name
@given(some_ranks, some_micro_batches, some_costs, st.data())
def test_a_bound_is_what_simulation_gives_at_any_cost_or_none(
    name: str, num_ranks: int, num_micro_batches: int, costs: PassCosts, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(chunks_of(name)))
    trace = played(name, num_ranks, num_micro_batches, costs, chunks).trace
    bound = bubble_bound(name, num_ranks, num_micro_batches, chunks, costs)
    if name == "interleaved" and chunks > 1 and num_micro_batches > num_ranks and num_micro_batches % num_ranks:
        assert bound is not None
        assert bound <= bubble_fraction(trace) + 1e-9
    elif bound is not None:
        assert bubble_fraction(trace) == pytest.approx(bound, abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive", "looped_bfs", "interleaved"])
@given(some_ranks, st.integers(1, 4), some_seconds, some_seconds, some_seconds, st.data())
def test_a_bound_with_recompute_is_what_simulation_gives(
    name: str, num_ranks: int, rounds: int, forward: float, gradient: float, recompute: float, data: st.DataObject
) -> None:
    chunks, m = data.draw(st.sampled_from(chunks_of(name))), rounds * num_ranks
    if name == "interleaved":
        assume(recompute <= 2 * gradient)
    costs = PassCosts(forward, gradient, gradient, recompute)
    trace = played(name, num_ranks, m, costs, chunks, Recompute.ALWAYS).trace
    bound = bubble_bound(name, num_ranks, m, chunks, costs)
    assert bound is not None
    assert bubble_fraction(trace) == pytest.approx(bound, abs=1e-9)


@every_name
@given(some_ranks, some_micro_batches, some_costs, st.data())
def test_no_schedule_beats_the_fill(
    name: str, num_ranks: int, num_micro_batches: int, costs: PassCosts, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(chunks_of(name)))
    least = makespan_bound("zb_auto", num_ranks, num_micro_batches, chunks, costs)
    assert least is not None
    assert played(name, num_ranks, num_micro_batches, costs, chunks).makespan_s >= least - 1e-9


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro_batches", "chunks", "bound"),
    [
        ("gpipe", 4, 4, 1, 3 / 7),
        ("1f1b", 4, 8, 1, 3 / 11),
        ("1f1b", 8, 1, 1, 7 / 8),
        ("naive", 4, 100, 1, 3 / 4),
        ("interleaved", 4, 8, 2, 3 / 19),
        ("looped_bfs", 4, 8, 3, 3 / 27),
        ("zb_h1", 4, 8, 1, 3 / 27),
        ("zb_h2", 4, 8, 1, 3 / 27),
        ("zb_v", 4, 8, 2, 3 / 51),
        ("v_half", 4, 8, 2, 5 / 53),
        ("v_min", 4, 8, 2, 11 / 59),
        ("v_min", 7, 14, 2, None),
        ("v_half", 4, 7, 2, None),
        ("zb_auto", 4, 8, 2, 3 / 51),
        ("mine.csv", 4, 8, 1, None),
        ("v_min", 1, 3, 2, 0.0),
    ],
)
def test_the_bounds_give_these_numbers(
    name: str, num_ranks: int, num_micro_batches: int, chunks: int, bound: float | None
) -> None:
    found = bubble_bound(name, num_ranks, num_micro_batches, chunks)
    assert found is None if bound is None else found == pytest.approx(bound)


def test_a_form_for_equal_costs_says_nothing_about_others() -> None:
    for name in ("zb_v", "v_half", "v_min"):
        assert bubble_bound(name, 4, 8, 2, PassCosts(1.0, 1.5, 1.0)) is None
        assert bubble_bound(name, 4, 8, 2, PassCosts(0.3, 0.3, 0.3)) == pytest.approx(bubble_bound(name, 4, 8, 2))


def test_the_tabulated_v_min_idles_less_than_the_papers_limit() -> None:
    assert all(idle < 4 * (num_ranks - 1) for num_ranks, idle in V_MIN_IDLE.items())
