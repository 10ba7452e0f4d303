"""Everything that a report says, put together once for every format."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.config import RunConfig
from pipebench.costs import profile_of
from pipebench.ledger import PARTS, Ledger
from pipebench.ledger import in_words as lost_in_words
from pipebench.record import Evaluation, Failure, RunResult, evaluations, first_step, losses, one_line_errors
from pipebench.report.advice import WHAT_IS_TRAINED, Seen, best_change, best_seen
from pipebench.report.advice import in_words as advice_in_words
from pipebench.report.cells import bubble, digits
from pipebench.report.engines import BUILT_IN, EngineSet, engine_sets
from pipebench.report.glance import Answer, at_a_glance
from pipebench.report.noise import floor_of
from pipebench.report.noise import in_words as noise_in_words
from pipebench.report.sweep import Sweep
from pipebench.report.table import Table
from pipebench.report.tables import (
    comparisons,
    grids,
    ledger_table,
    point_name,
    references_table,
    results_table,
    setting_table,
    stages_table,
    swept,
)
from pipebench.report.timeline import Timeline, timeline_of
from pipebench.rows import COMPARABLE, MEASURED, Row, rank_times
from pipebench.schedule.builders import SCHEDULES


@dataclass(frozen=True, slots=True)
class Point:
    """One point: its row, what to call it, where its time went in words, a table of its stages, and its timeline.

    `lost` and `losses` (of every training step, warm-up included) are empty and `stages` None where nothing was
    measured, `timeline` also where an engine records no spans. Points with the same `trains` should have the same
    losses; `first_step` steps had been trained before the first of them. `failure` is the cause where one is known.
    """

    row: Row
    name: str
    lost: str
    stages: Table | None
    timeline: Timeline | None
    losses: list[float]
    first_step: int
    evaluations: list[Evaluation]
    trains: str
    failure: Failure | None

    @property
    def key(self) -> str:
        return str(self.row["key"])

    @property
    def summary(self) -> str:
        """Return its numbers in a line."""
        return f"{self.row['status']}: bubble {bubble(self.row, ' / ')}, imbalance {digits(self.row['imbalance'])}"


@dataclass(frozen=True, slots=True)
class Content:
    """`grids` holds tables K by M under what their points share; `comparisons` and `engines` what stands side by side.

    `noise` says which differences between points mean nothing.
    """

    name: str
    counts: str
    swept: str
    points: tuple[Point, ...]
    results: Table
    comparisons: list[Table]
    engines: list[EngineSet]
    grids: dict[str, list[Table]]
    ledger: Table | None
    noise: str
    answers: list[Answer]
    references: Table | None
    setting: Table

    @property
    def rows(self) -> list[Row]:
        return [point.row for point in self.points]

    @property
    def failures(self) -> list[Point]:
        """The points that are no results: failed, wrong, or not run yet."""
        return [point for point in self.points if point.row["status"] not in COMPARABLE]

    @property
    def disturbed(self) -> list[Point]:
        """The points that something else on the machine disturbed."""
        return [point for point in self.points if point.row["flags"]]

    @property
    def notes(self) -> list[Point]:
        """The points that did run and have something to say: what a search predicted, for one."""
        return [point for point in self.points if point.row["status"] in COMPARABLE and point.row["message"]]

    @property
    def tables(self) -> list[Table]:
        """Every table, each under a name of its own."""
        stages = [point.stages for point in self.points if point.stages]
        grids = [table for tables in self.grids.values() for table in tables]
        engines = [each.table for each in self.engines]
        found = [self.results, *engines, *self.comparisons, *grids, self.ledger, self.references]
        return [table for table in (*found, self.setting, *stages) if table]


def content_of(sweep: Sweep) -> Content:
    rows, floor = sweep.rows, floor_of(sweep)
    return Content(
        name=sweep.name,
        counts=_counts(rows),
        swept=swept(sweep),
        points=tuple(_point(sweep, row, floor) for row in rows),
        results=results_table(rows),
        comparisons=comparisons(rows),
        engines=engine_sets(sweep),
        grids=grids(rows),
        ledger=ledger_table(rows),
        noise=noise_in_words(sweep, rows),
        answers=at_a_glance(rows, floor),
        references=references_table(sweep),
        setting=setting_table(sweep),
    )


def _counts(rows: Sequence[Row]) -> str:
    statuses = [row["status"] for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return f"{len(rows)} point{'s' if len(rows) != 1 else ''}: {counts}."


def _point(sweep: Sweep, row: Row, floor: float) -> Point:
    result, name = sweep.results.get(row["key"]), point_name(row, sweep.rows)
    stages = sweep.stages.get(row["key"])
    told = row["status"] in COMPARABLE and row["ledger_compute_s"] is not None
    return Point(
        row,
        name,
        _lost_and_to_gain(result, row, best_seen(row, sweep.rows, floor)) if result and told else "",
        stages_table(row["key"], f"Stages of {name}", stages) if stages else None,
        _timeline(result) if result and result.status in MEASURED else None,
        losses(result.repeats[0]) if result and result.repeats else [],
        first_step(result.repeats[0]) if result and result.repeats else 0,
        evaluations(result.repeats[0]) if result and result.repeats else [],
        str([getattr(sweep.points[row["key"]], name) for name in WHAT_IS_TRAINED]),
        result.failure if result else None,
    )


def _timeline(result: RunResult) -> Timeline | None:
    with one_line_errors(result.key):
        return timeline_of(result)


def _lost_and_to_gain(result: RunResult, row: Row, seen: Seen | None) -> str:
    with one_line_errors(result.key):
        profile = profile_of(result)
        words = lost_in_words(Ledger(**{part: row[f"ledger_{part}"] for part in PARTS}), rank_times(result))
        if profile is not None and _is_predicted(result.config):
            advice = best_change(result.config, result.layers_per_stage, profile)
            return f"{words}; {advice_in_words(advice, seen)}."
        # Nothing to predict, but others may have been seen.
        return f"{words}; {advice_in_words(None, seen)}." if seen else f"{words}."


def _is_predicted(config: RunConfig) -> bool:
    """Tell whether a change may be foretold: rows of a file or a search are as they are, and so are other engines."""
    return config.schedule in SCHEDULES and config.engine in (BUILT_IN, "simulate")
