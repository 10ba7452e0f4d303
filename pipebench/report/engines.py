"""Engines side by side: what each makes of the same training, its step time over the built-in engine's.

Rows that train the same on as many ranks stand in one table, however their engine cuts and orders the work. Each is
compared with the built-in engine's point of the same schedule and cut, by rounds in which both were measured; an
engine without a pipeline with its GPipe. A point without a result stays in the table with its reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipebench.grid import K, M, axes_of
from pipebench.metrics import Ratio, paired_ratio
from pipebench.peers.abilities import NO_PIPELINE, ONE_DEVICE
from pipebench.record import RunResult, one_line_errors, step_groups
from pipebench.report.cells import NOTHING, bubble, marks, mebibytes, milliseconds, scientific, with_interval
from pipebench.report.comparison import LEAST_FLOOR, verdict_on
from pipebench.report.noise import floor_of
from pipebench.report.schedules import schedule_name
from pipebench.report.sweep import Sweep
from pipebench.report.table import Cell, Table
from pipebench.rows import COMPARABLE, Row

BUILT_IN = "pipebench"

_HOW = ("engine", "schedule", "chunks", "partition", "memory_limit")
"""Axes that say how the same is trained on as many ranks: what points of one table may differ in."""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """Points that train the same on as many ranks: their table, and in words the best of each engine."""

    table: Table
    words: str


@dataclass(frozen=True, slots=True)
class _Judge:
    """Compares points of a sweep by what each of its rounds measured."""

    results: dict[str, RunResult]
    floor: float

    def ratio(self, row: Row, baseline: Row) -> Ratio:
        """Return the step time of `row` over the baseline's, from the rounds that both have."""
        with one_line_errors(row["key"]):
            groups, others = (step_groups(self.results[each["key"]]) for each in (row, baseline))
            num_rounds = min(len(groups), len(others))
            return paired_ratio(groups[:num_rounds], others[:num_rounds])

    def difference(self, ratio: Ratio) -> str:
        """Return slower or faster where the difference is sure and above the noise floor, same or undecided else."""
        return verdict_on(ratio, self.floor).value


def engine_sets(sweep: Sweep) -> list[EngineSet]:
    """Return a table for each set of points that differ in how they train alone; none where one engine ran."""
    judge = _Judge(sweep.results, max(LEAST_FLOOR, floor_of(sweep)))
    return [
        EngineSet(_table(f"engines-{number}", title, rows, judge), f"{title}: {_best_of_each(rows, judge)}.")
        for number, (title, rows) in enumerate(_sets(sweep.rows).items(), start=1)
    ]


def _sets(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return by title the rows that differ in how they train alone, where several engines were to run.

    One process has one stage, whatever others have, so an engine of one process that was asked for one stands beside
    each number of ranks. Simulated points are no engine's.
    """
    rows = [row for row in rows if row["engine"] != "simulate"]
    names = [name for name in axes_of(rows) if name not in _HOW]
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row[name]) for name in names), []).append(row)
    for row in rows:
        if row["engine"] in ONE_DEVICE and row[K] == 1:
            for members in found.values():
                if row not in members and all(row[name] == members[0][name] for name in names if name != K):
                    members.append(row)
    told = [name for name in names if name in (K, M) or len({str(row[name]) for row in rows}) > 1]
    titled = {_title(members, told): members for members in found.values()}
    return {title: members for title, members in titled.items() if len({row["engine"] for row in members}) > 1}


def _title(members: Sequence[Row], told: Sequence[str]) -> str:
    letters = {K: "K", M: "M"}
    return ", ".join(f"{letters.get(name, name)}={members[0][name]}" for name in told)


def _table(name: str, title: str, rows: Sequence[Row], judge: _Judge) -> Table:
    ordered = sorted(rows, key=lambda row: (row["status"] not in COMPARABLE, row["step_s"] or 0.0))
    varying = [axis for axis in (K, "chunks", "partition", "memory_limit") if len({str(r.get(axis)) for r in rows}) > 1]
    text = ("engine", "schedule", *(_NAMES.get(axis, axis) for axis in varying), "status", "against", "it is")
    numbers = (
        "step ms [95 %]",
        "over that [95 %]",
        "bubble: measured / replayed / bound",
        "peak MiB of a rank",
        "of all ranks",
        "sent MiB",
        "gradient error",
    )
    lines = tuple(
        (
            Cell(row["engine"], key=row["key"]),
            Cell(NOTHING if row["engine"] in NO_PIPELINE else str(row["schedule"])),
            *(Cell(str(row[axis])) for axis in varying),
            Cell(_status(row)),
            *_against(row, _rival(row, rows), judge),
        )
        for row in ordered
    )
    keys = tuple(row["key"] for row in ordered)
    return Table(name, f"Engines, {title}", (*text, *numbers), lines, len(text), keys)


_NAMES = {K: "K", "chunks": "stages a rank"}


def _status(row: Row) -> str:
    if row["status"] in COMPARABLE or not row["message"]:
        return str(row["status"]) + marks(row)
    return f"{row['status']}: {row['message']}"


def _against(row: Row, rival: Row | None, judge: _Judge) -> tuple[Cell, ...]:
    ratio = judge.ratio(row, rival) if rival is not None else None
    return (
        Cell(schedule_name(rival) if rival is not None else NOTHING),
        Cell(judge.difference(ratio) if ratio else NOTHING),
        Cell(with_interval(row), row["step_s"]),
        Cell(f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", ratio.value) if ratio else Cell(NOTHING),
        Cell(NOTHING if row["bubble_fraction"] is None else bubble(row, " / "), row["bubble_fraction"]),
        Cell(mebibytes(row["peak_memory_bytes"]), row["peak_memory_bytes"]),
        Cell(mebibytes(row["peak_memory_all_bytes"]), row["peak_memory_all_bytes"]),
        Cell(mebibytes(row["sent_bytes"]), row["sent_bytes"]),
        Cell(scientific(row["grad_rel_error"]), row["grad_rel_error"]),
    )


def _rival(row: Row, members: Sequence[Row]) -> Row | None:
    """Return the built-in engine's point that a point of another is to be judged against, None where there is none."""
    if row["engine"] == BUILT_IN or row["status"] not in COMPARABLE:
        return None
    own = _fastest_first(members, BUILT_IN)
    if row["engine"] in NO_PIPELINE:
        return next((other for other in own if other["schedule"] == "gpipe"), own[0] if own else None)
    same = (other for other in own if all(row.get(name) == other.get(name) for name in _HOW if name != "engine"))
    return next(same, None)


def _fastest_first(members: Sequence[Row], engine: str) -> list[Row]:
    results = [row for row in members if row["engine"] == engine and row["status"] in COMPARABLE]
    return sorted(results, key=lambda row: float(row["step_s"]))


def _best_of_each(rows: Sequence[Row], judge: _Judge) -> str:
    """Say how the best of each other engine, over all its schedules, compares with the best of the built-in one."""
    own = _fastest_first(rows, BUILT_IN)
    others = [engine for engine in dict.fromkeys(row["engine"] for row in rows) if engine != BUILT_IN]
    if not own:
        return "the built-in engine has no result to compare with"
    began = f"the built-in engine is fastest with {schedule_name(own[0])}, {milliseconds(own[0]['step_s'])} ms a step"
    return f"{began}; over that, at its best: {'; '.join(_words_of(rows, own[0], others, judge))}"


def _words_of(rows: Sequence[Row], best: Row, engines: Sequence[str], judge: _Judge) -> Iterator[str]:
    for engine in engines:
        results = _fastest_first(rows, engine)
        if not results:
            statuses = dict.fromkeys(row["status"] for row in rows if row["engine"] == engine)
            yield f"{engine} no result ({', '.join(statuses)})"
            continue
        ratio = judge.ratio(results[0], best)
        how = "" if engine in NO_PIPELINE else f" with {schedule_name(results[0])}"
        interval = f"95 %: {ratio.low:.3f} to {ratio.high:.3f}"
        yield f"{engine}{how} {ratio.value:.3f} ({interval}), {judge.difference(ratio)}"
