"""Zero-bubble schedules and the search against the published bubble rates (Qi et al. 2024, arXiv:2401.10241, table 5).

The rate is (cost - M (F + I + W)) / cost with the longest span of a rank as cost; the profiled times of table 6 go in.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.errors import ScheduleError
from pipebench.schedule.action import Op, Schedule
from pipebench.schedule.builders import IN_ROWS, SCHEDULES, Recompute, with_recompute
from pipebench.schedule.catalogue import build
from pipebench.schedule.memory import StageActivations, peak_activation_bytes
from pipebench.schedule.search import Found, search
from pipebench.schedule.simulate import Costs, simulate
from pipebench.schedule.validate import validate
from pipebench.trace import Trace

DATA = Path(__file__).resolve().parent.parent / "data"
HALF_A_DIGIT = 0.00005
"""The tables print four digits."""


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


MODELS = {row["model"]: row for row in rows("zero_bubble_models.csv")}
PUBLISHED = {
    (row["model"], row["m"], row["schedule"]): float(row["bubble_rate"]) for row in rows("zero_bubble_bubble_rates.csv")
}


@dataclass(frozen=True)
class Setting:
    """One line of the tables; milliseconds as printed."""

    model: str
    num_ranks: int
    num_micro_batches: int
    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float

    def __str__(self) -> str:
        return f"{self.model}-{self.num_ranks}-{self.num_micro_batches}"

    @property
    def work(self) -> float:
        return self.num_micro_batches * (self.forward + self.input_gradient + self.weight_gradient)

    @property
    def activations(self) -> StageActivations:
        """Bytes of a layer and token in units of the hidden size: M_B : M_W = 34 + 5as/h : 32 (table 1)."""
        heads, hidden, length = (int(MODELS[self.model][key]) for key in ("heads", "hidden", "seq"))
        return StageActivations(34 * hidden + 5 * heads * length, 0, 32 * hidden)

    def costs(self, chunks: int = 1) -> Costs:
        of = {
            Op.FORWARD: self.forward,
            Op.INPUT_GRADIENT: self.input_gradient,
            Op.WEIGHT_GRADIENT: self.weight_gradient,
            Op.BACKWARD: self.input_gradient + self.weight_gradient,
        }
        return {(stage, op): of[op] / chunks for stage in range(self.num_ranks * chunks) for op in of}

    def published(self, schedule: str) -> float:
        return PUBLISHED[self.model, str(self.num_micro_batches), schedule]

    def rate(self, cost: float) -> float:
        return (cost - self.work) / cost

    def rate_of(self, name: str, chunks: int = 1) -> float:
        schedule = build(name, self.num_ranks, self.num_micro_batches, chunks)
        return self.rate(simulate(schedule, self.costs(chunks), self.transfer).longest_stage_span_s)


SETTINGS = [
    Setting(
        row["model"],
        int(row["p"]),
        int(row["m"]),
        *(float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")),
    )
    for row in rows("zero_bubble_profiled_times.csv")
]
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


def longest_stage_span(trace: Trace) -> float:
    return trace.longest_stage_span_s


@cache
def found_within(setting: Setting, multiple: int) -> Found:
    """Search under a limit of so many micro-batches for each rank."""
    one = setting.activations
    return search(
        setting.num_ranks,
        setting.num_micro_batches,
        1,
        setting.costs(),
        [one] * setting.num_ranks,
        multiple * setting.num_ranks * one.full_bytes,
        setting.transfer,
        objective=longest_stage_span,
    )


def test_the_tables_have_twelve_settings() -> None:
    assert len(SETTINGS) == 12
    assert len(PUBLISHED) == 12 * 6


@every_setting
@pytest.mark.parametrize(("name", "published"), [("1f1b", "1F1B"), ("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")])
def test_a_hand_written_schedule_has_its_published_bubble_rate(setting: Setting, name: str, published: str) -> None:
    assert setting.rate_of(name) == pytest.approx(setting.published(published), abs=HALF_A_DIGIT)


@every_setting
def test_interleaved_with_a_layer_a_chunk_comes_near_its_published_bubble_rate(setting: Setting) -> None:
    # The paper's cost is p transfers lower than the Megatron order gives; why is not known.
    layers = int(MODELS[setting.model]["layers_per_inner_stage"])
    assert setting.rate_of("interleaved", layers) == pytest.approx(setting.published("1F1B-I"), abs=0.0035)


@every_setting
@pytest.mark.parametrize(("multiple", "published"), [(1, "ZB-1p"), (2, "ZB-2p")])
def test_the_search_is_no_worse_than_the_published_heuristic_in_the_same_memory(
    setting: Setting, multiple: int, published: str
) -> None:
    found = found_within(setting, multiple)
    assert round(setting.rate(found.predicted_s), 4) <= setting.published(published)


@every_setting
def test_the_found_order_is_valid_keeps_its_limit_and_takes_as_long_as_predicted(setting: Setting) -> None:
    found = found_within(setting, 2)
    validate(found.schedule)
    assert found.schedule.name == "zb_auto"
    assert max(peak_activation_bytes(found.schedule, [setting.activations] * setting.num_ranks)) <= found.limit_bytes
    trace = simulate(found.schedule, setting.costs(), setting.transfer)
    assert trace.longest_stage_span_s == found.predicted_s


@dataclass(frozen=True)
class Task:
    """A random search, in which a rank has room for one micro-batch at least."""

    num_ranks: int
    num_micro_batches: int
    chunks: int
    costs: dict[tuple[int, Op], float]
    activations: list[StageActivations]
    limit_bytes: float
    transfer_s: list[float]
    recompute: Recompute

    def search(self) -> Found:
        return search(
            self.num_ranks,
            self.num_micro_batches,
            self.chunks,
            self.costs,
            self.activations,
            self.limit_bytes,
            self.transfer_s,
            self.recompute,
        )

    def peak_bytes(self, schedule: Schedule) -> float:
        return max(peak_activation_bytes(schedule, self.activations))

    def makespan_s(self, schedule: Schedule) -> float:
        return simulate(schedule, self.costs, self.transfer_s).makespan_s

    def hand_written(self) -> list[Schedule]:
        recipes = [r for r in SCHEDULES.values() if r.least_chunks <= self.chunks <= (r.most_chunks or self.chunks)]
        built = [build(r.name, self.num_ranks, self.num_micro_batches, self.chunks) for r in recipes]
        return [with_recompute(schedule, self.recompute) for schedule in built]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    num_ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    stages = range(num_ranks * chunks)
    seconds = st.integers(1, 20).map(float)
    costs = {(stage, op): draw(seconds) for stage in stages for op in Op if op != Op.OPTIMIZER}
    full = [draw(st.integers(2, 9)) for _ in stages]
    least = max(full) if chunks == 1 else max(full[rank] + full[-1 - rank] for rank in range(num_ranks))
    return Task(
        num_ranks,
        draw(st.integers(1, 9)),
        chunks,
        costs,
        [StageActivations(each, draw(st.integers(1, each)), draw(st.integers(0, each))) for each in full],
        least * draw(st.sampled_from([1.0, 1.5, 2.0, 3.0, 8.0])),
        [draw(st.integers(0, 3)) / 2 for _ in stages],
        draw(st.sampled_from([Recompute.NEVER, *IN_ROWS])),
    )


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_no_hand_written_schedule_within_the_limit_is_faster_than_what_the_search_finds(task: Task) -> None:
    known = {s.name: task.makespan_s(s) for s in task.hand_written() if task.peak_bytes(s) <= task.limit_bytes}
    found = task.search()
    assert found.best_known_s == min(known.values(), default=float("inf"))
    assert known[found.best_known] == found.best_known_s if known else found.best_known == ""
    assert found.predicted_s <= found.best_known_s


@settings(max_examples=50, deadline=None)
@given(tasks())
def test_what_the_search_finds_is_valid_within_the_limit_and_as_fast_as_it_says(task: Task) -> None:
    found = task.search()
    validate(found.schedule)
    assert found.schedule.num_micro_batches == task.num_micro_batches
    assert found.schedule.num_stages == task.num_ranks * task.chunks
    assert task.peak_bytes(found.schedule) <= found.limit_bytes == task.limit_bytes
    assert task.makespan_s(found.schedule) == found.predicted_s


@settings(max_examples=10, deadline=None)
@given(tasks())
def test_the_search_finds_the_same_again(task: Task) -> None:
    assert task.search() == task.search()


def test_the_search_beats_every_hand_written_schedule_where_stages_are_uneven() -> None:
    forward = [1.0, 1.4, 0.8, 1.2]
    costs = {
        (stage, op): seconds * share
        for stage, seconds in enumerate(forward)
        for op, share in ((Op.FORWARD, 1.0), (Op.INPUT_GRADIENT, 1.1), (Op.WEIGHT_GRADIENT, 0.7))
    }
    found = search(4, 12, 1, costs, [StageActivations(2, 1, 1)] * 4, 10, 0.1)
    assert found.predicted_s < found.best_known_s


@pytest.mark.parametrize(
    ("chunks", "leanest"), [(1, "16.0 MiB, what naive takes"), (2, "32.0 MiB, what one micro-batch at a time takes")]
)
def test_a_limit_below_the_leanest_order_is_refused_with_what_that_takes(chunks: int, leanest: str) -> None:
    costs = {(s, op): 1.0 for s in range(3 * chunks) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT)}
    with pytest.raises(ScheduleError) as caught:
        search(3, 6, chunks, costs, [StageActivations(2**24, 0, 2**20)] * (3 * chunks), 3 * 2**20)
    assert str(caught.value) == f"schedule zb_auto: memory limit 3.0 MiB a rank: expected at least {leanest}"


def test_a_backward_is_made_whole_where_that_is_cheaper_and_nothing_waits_for_its_first_part() -> None:
    costs = {(0, Op.FORWARD): 1.0, (0, Op.INPUT_GRADIENT): 1.0, (0, Op.WEIGHT_GRADIENT): 1.0, (0, Op.BACKWARD): 1.5}
    found = search(1, 4, 1, costs, [StageActivations(2, 0, 1)], 2)
    assert found.predicted_s == 4 * 2.5
