"""Schedules and simulator against an independent simulation of 330 cases, `data/schedule_unit_cases.csv`."""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipebench.metrics import bubble_fraction
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.builders import Recompute, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.memory import StageActivations, peak_activation_bytes, peak_in_flight
from pipebench.schedule.simulate import Costs, simulate

CASES = Path(__file__).resolve().parent.parent / "data" / "schedule_unit_cases.csv"

NOT_HELD = {
    "dualpipe": "runs the stages from both ends, so a stage would live on two ranks",
    "dualpipev": "runs a forward and a backward as one block that sends at its end; here each action sends at its own",
}
"""Schedules that rows of single actions on one owner a stage cannot hold, and why."""

RECOMPUTE = {"-early": Recompute.ALWAYS, "-early-except-last": Recompute.EXCEPT_LAST, "-fused": Recompute.NEVER}


@dataclass(frozen=True)
class Case:
    row: dict[str, str]

    def __str__(self) -> str:
        return "-".join(self.row[key] for key in ("schedule", "p", "m", "v", "F", "B_input", "W", "R", "comm_latency"))

    def number(self, key: str) -> float:
        return float(self.row[key])

    def peaks(self, key: str) -> list[int]:
        return [int(peak) for peak in self.row[key].split()]

    @property
    def variant(self) -> str:
        _, _, variant = self.row["schedule"].partition("-recompute")
        return variant

    def schedule(self) -> Schedule:
        name = self.row["schedule"].partition("-recompute")[0].replace("-", "_")
        schedule = build(name, int(self.row["p"]), int(self.row["m"]), int(self.row["v"]))
        return with_recompute(schedule, RECOMPUTE[self.variant] if self.variant else Recompute.NEVER)

    def costs(self, num_stages: int) -> Costs:
        """Return costs of a stage; those of `interleaved` are of all stages of a rank, those of the V-shaped of one."""
        whole = self.number("B_input") + self.number("W") + (self.number("R") if self.variant == "-fused" else 0.0)
        of = {
            Op.FORWARD: self.number("F"),
            Op.INPUT_GRADIENT: self.number("B_input"),
            Op.WEIGHT_GRADIENT: self.number("W"),
            Op.BACKWARD: whole,
            Op.RECOMPUTE: self.number("R"),
        }
        share = int(self.row["v"]) if self.row["schedule"] == "interleaved" else 1
        return {(stage, op): seconds / share for stage in range(num_stages) for op, seconds in of.items()}


def cases() -> list[Case]:
    with CASES.open(newline="") as file:
        return [Case(row) for row in csv.DictReader(file)]


HELD = [case for case in cases() if case.row["schedule"] not in NOT_HELD]


def test_every_case_is_checked_but_those_that_rows_cannot_hold() -> None:
    counts = Counter(case.row["schedule"] for case in cases())
    assert len(cases()) == 330
    assert len(HELD) == 330 - sum(counts[name] for name in NOT_HELD) == 324


@pytest.mark.parametrize("case", HELD, ids=str)
def test_an_independent_simulation_gave_the_same_times(case: Case) -> None:
    schedule = case.schedule()
    trace = simulate(schedule, case.costs(schedule.num_stages), case.number("comm_latency"))
    busy = max(
        trace.duration_s[first : first + len(row)].sum()
        for first, row in zip(starts(schedule), schedule.rows, strict=True)
    )
    span = trace.longest_stage_span_s
    assert trace.makespan_s == pytest.approx(case.number("makespan"), rel=1e-9)
    assert span == pytest.approx(case.number("max_stage_span"), rel=1e-9)
    assert busy == pytest.approx(case.number("busy_per_device_max"), rel=1e-9)
    assert bubble_fraction(trace) == pytest.approx(case.number("idle_fraction_of_makespan"), abs=1e-6)
    assert 1 - busy / span == pytest.approx(case.number("bubble_rate_by_span"), abs=1e-6)


@pytest.mark.parametrize("case", HELD, ids=str)
def test_an_independent_count_gave_the_same_peaks(case: Case) -> None:
    schedule = case.schedule()
    if case.row["peak_in_flight_F_to_B"]:
        assert peak_in_flight(schedule) == case.peaks("peak_in_flight_F_to_B")
    if case.row["peak_in_flight_F_to_W"]:
        until_weight = peak_activation_bytes(schedule, [StageActivations(1, 1, 1)] * schedule.num_stages)
        assert until_weight == case.peaks("peak_in_flight_F_to_W")


def starts(schedule: Schedule) -> list[int]:
    lengths = [len(row) for row in schedule.rows]
    return [sum(lengths[:rank]) for rank in range(len(lengths))]
