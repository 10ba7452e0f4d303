"""Which tables a report has: a sweep's rows as tables of finished cells, whatever format they end in."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipebench.config import NOT_PART_OF_THE_POINT, RunConfig, value_at
from pipebench.grid import K, M, groups, values, varying
from pipebench.ledger import PARTS, part_name
from pipebench.report.cells import (
    NOTHING,
    bubble,
    digits,
    fraction,
    kind,
    marks,
    measured_or_simulated,
    mebibytes,
    milliseconds,
    scientific,
    setting,
    tenths,
    with_interval,
)
from pipebench.report.schedules import INTERLEAVING, ZERO_BUBBLE, compared
from pipebench.report.sweep import Sweep
from pipebench.report.table import Cell, Table, cells
from pipebench.rows import COMPARABLE, Row, StageRow


def point_name(row: Row, rows: Sequence[Row]) -> str:
    """Return such as `K=2, M=8, schedule=1f1b`: enough to tell the row from the others. What is not set is not told."""
    others = "".join(f", {name}={row[name]}" for name in varying(rows) if row[name] is not None)
    return f"K={row[K]}, M={row[M]}{others}"


def results_table(rows: Sequence[Row]) -> Table:
    """Return a line per point with everything that matters; one without a result shows its status."""
    names = varying(rows)
    bubble_name = f"bubble {measured_or_simulated(rows)}"
    numbers: dict[str, Callable[[Row], Cell]] = {
        "step ms [95 %]": lambda row: Cell(with_interval(row), row["step_s"]),
        "samples/s": lambda row: Cell(digits(row["samples_per_s"]), row["samples_per_s"]),
        "tokens/s": lambda row: Cell(digits(row["tokens_per_s"]), row["tokens_per_s"]),
        "speed-up": lambda row: Cell(digits(row["speedup"]), row["speedup"]),
        bubble_name: lambda row: Cell(fraction(row["bubble_fraction"]), row["bubble_fraction"]),
        "replayed": lambda row: Cell(fraction(row["bubble_replayed"]), row["bubble_replayed"]),
        "bound": lambda row: Cell(fraction(row["bubble_bound"]), row["bubble_bound"]),
        "peak MiB": lambda row: Cell(mebibytes(row["peak_memory_bytes"]), row["peak_memory_bytes"]),
        "gradient error": lambda row: Cell(scientific(row["grad_rel_error"]), row["grad_rel_error"]),
    }
    lines = [
        (
            *(Cell(setting(row[name]), _number(row[name])) for name in (K, M, *names)),
            Cell(row["status"] + marks(row), key=row["key"], status=_bad_status(row)),
            *(cell(row) for cell in numbers.values()),
        )
        for row in rows
    ]
    header = ("K", "M", *names, "status", *numbers)
    return _without_empty_columns(
        Table("points", "All points", header, tuple(lines), len(names) + 3, tuple(row["key"] for row in rows))
    )


def _bad_status(row: Row) -> str:
    return "" if row["status"] in COMPARABLE else str(row["status"])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _without_empty_columns(table: Table) -> Table:
    """Leave out what no line has."""
    kept = [
        column
        for column in range(len(table.header))
        if any(line[column].text not in ("", NOTHING) for line in table.lines)
    ]
    return dataclasses.replace(
        table,
        header=tuple(table.header[column] for column in kept),
        lines=tuple(tuple(line[column] for column in kept) for line in table.lines),
        num_text_columns=sum(column < table.num_text_columns for column in kept),
    )


_PIVOTS: dict[str, tuple[str, str, Callable[[Row], str]]] = {
    "samples": ("Throughput (samples/s)", "samples_per_s", lambda row: digits(row["samples_per_s"])),
    "tokens": ("Throughput (tokens/s)", "tokens_per_s", lambda row: digits(row["tokens_per_s"])),
    "speedup": ("Speed-up over one device", "speedup", lambda row: digits(row["speedup"])),
    "bubble": (
        "Bubble fraction (measured / replayed / bound)",
        "bubble_fraction",
        lambda row: bubble(row, " / "),
    ),
    "memory": (
        "Peak memory of the largest stage (MiB)",
        "peak_memory_bytes",
        lambda row: mebibytes(row["peak_memory_bytes"]),
    ),
}
"""By name: the title of each table K by M, the column that it needs and is shaded by, and what stands in a cell."""


def pivots(rows: Sequence[Row], suffix: str = "") -> list[Table]:
    """Return the tables K by M of rows that differ in nothing else; `suffix` makes their names unique.

    What no row has is left out, but for the first table: where all have failed, it shows that.
    """
    known = [name for name, (_, column, _) in _PIVOTS.items() if any(row[column] is not None for row in rows)]
    header = ("", *(f"M={m}" for m in values(rows, M)))
    tables = []
    for name in known or list(_PIVOTS)[:1]:
        title, column, text = _PIVOTS[name]
        tables.append(Table(name + suffix, title, header, _pivot(rows, column, text)))
    return tables


def _pivot(rows: Sequence[Row], column: str, text: Callable[[Row], str]) -> tuple[tuple[Cell, ...], ...]:
    at = {(row[K], row[M]): row for row in rows}
    return tuple(
        (Cell(f"K={stages}"), *(_of_point(at.get((stages, m)), column, text) for m in values(rows, M)))
        for stages in values(rows, K)
    )


def _of_point(row: Row | None, column: str, text: Callable[[Row], str]) -> Cell:
    """Return the cell with its marks; a point without a result shows its status instead of a number."""
    if row is None:
        return Cell(NOTHING)
    if row["status"] not in COMPARABLE:
        return Cell(row["status"], key=row["key"], status=row["status"])
    return Cell(text(row) + marks(row) + kind(row), row[column], row["key"])


def grids(rows: Sequence[Row]) -> dict[str, list[Table]]:
    """Return the tables K by M for each combination of all else that varies."""
    if compared(rows) and all(len(members) == 1 for members in groups(rows).values()):
        return {}  # a table of one cell for each schedule would only repeat the comparison
    found = groups(rows)
    tables = {
        title: pivots(members, f"-{number}" if len(found) > 1 else "")
        for number, (title, members) in enumerate(found.items(), start=1)
    }
    return {title: [_shaded(table, tables.values()) for table in members] for title, members in tables.items()}


def _shaded(table: Table, groups: Iterable[Sequence[Table]]) -> Table:
    """Return the table with one scale for its quantity over all groups, so that colours compare across tables."""
    alike = [other for members in groups for other in members if other.title == table.title]
    values = [cell.value for other in alike for line in other.lines for cell in line if cell.value is not None]
    finite = [value for value in values if math.isfinite(value)]
    return dataclasses.replace(table, shade=(min(finite), max(finite)) if finite else None)


def comparisons(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each set of `compared` rows: schedules in order of step time, memory beside it.

    A zero-bubble schedule is to be judged against the best interleaving, which also shrinks the bubble and needs no
    split backward; so every row of the one kind names the best of the other.
    """
    return [
        _comparison(f"schedules-{number}", title, ordered)
        for number, (title, ordered) in enumerate(compared(rows).items(), start=1)
    ]


def _comparison(name: str, title: str, rows: Sequence[Row]) -> Table:
    gpipe = next((row for row in rows if row["schedule"] == "gpipe"), None)
    rival = next((row for row in rows if row["schedule"] in INTERLEAVING), None)
    header = (
        "schedule",
        "stages a rank",
        "step ms [95 %]",
        "of gpipe's",
        "samples/s",
        "speed-up",
        "bubble: measured / replayed / bound",
        "peak MiB",
        "best interleaving ms",
        "of that",
    )
    lines = tuple(_compared_line(row, gpipe, rival) for row in rows)
    keys = tuple(row["key"] for row in rows)
    return _without_empty_columns(Table(name, f"Schedules by step time, {title}", header, lines, keys=keys))


def _compared_line(row: Row, gpipe: Row | None, rival: Row | None) -> tuple[Cell, ...]:
    judged = rival is not None and row["schedule"] in ZERO_BUBBLE
    rival_text = f"{milliseconds(rival['step_s'])} ({rival['schedule']}, {rival['chunks']})" if rival else NOTHING
    return (
        Cell(row["schedule"] + marks(row) + kind(row), key=row["key"]),
        Cell(str(row["chunks"]), _number(row["chunks"])),
        Cell(with_interval(row), row["step_s"]),
        _ratio(row, gpipe),
        Cell(digits(row["samples_per_s"]), row["samples_per_s"]),
        Cell(digits(row["speedup"]), row["speedup"]),
        Cell(bubble(row, " / "), row["bubble_fraction"]),
        Cell(mebibytes(row["peak_memory_bytes"]), row["peak_memory_bytes"]),
        Cell(rival_text if judged else NOTHING),
        _ratio(row, rival if judged else None),
    )


def _ratio(row: Row, other: Row | None) -> Cell:
    if other is None:
        return Cell(NOTHING)
    ratio = row["step_s"] / other["step_s"]
    return Cell(f"{ratio:.3f}", ratio)


def ledger_table(rows: Sequence[Row]) -> Table | None:
    """Return where the time of each measured point went, None where no engine recorded spans."""
    told = [row for row in rows if row["status"] in COMPARABLE and row["ledger_compute_s"] is not None]
    if not told:
        return None
    names = varying(rows)
    header = ("K", "M", *names, "marks", "step", *map(part_name, PARTS))
    lines = tuple(
        (
            Cell(str(row[K]), row[K], key=row["key"]),
            *(Cell(setting(row[name]), _number(row[name])) for name in (M, *names)),
            Cell((marks(row) + kind(row)).strip()),
            Cell(milliseconds(row["step_s"]), row["step_s"]),
            *(Cell(tenths(row[f"ledger_{part}"]), row[f"ledger_{part}"]) for part in PARTS),
        )
        for row in told
    )
    keys = tuple(row["key"] for row in told)
    return _without_empty_columns(Table("ledger", "Where the time went (ms)", header, lines, len(names) + 3, keys))


_RESOLVED = ("device", "threads")
"""What a reference shares with its points beyond the axes, so that two of them may differ in it alone."""


def references_table(sweep: Sweep) -> Table | None:
    """Return the one-device runs that speed-ups are measured against, None while there are none."""
    known = {**sweep.references, **sweep.results}
    rows = [
        {**row, **{name: getattr(known[row["key"]].config, name) for name in _RESOLVED}} for row in sweep.reference_rows
    ]
    if not rows:
        return None
    names = [*varying(rows), *(name for name in _RESOLVED if len({row[name] for row in rows}) > 1)]
    header = (*names, "status", "step ms", "samples/s", "tokens/s", "peak MiB")
    lines = tuple(
        cells(
            (
                *(setting(row[name]) for name in names),
                f"{row['status']}: {row['message']}" if row["message"] else row["status"],
                milliseconds(row["step_s"]),
                digits(row["samples_per_s"]),
                digits(row["tokens_per_s"]),
                mebibytes(row["peak_memory_bytes"]),
            )
        )
        for row in rows
    )
    return _without_empty_columns(Table("one-device", "One device", header, lines, len(names) + 1))


_NOT_SHOWN = tuple(name for name in NOT_PART_OF_THE_POINT if name != "repeats")


def setting_table(sweep: Sweep) -> Table:
    """Return what all points have in common, and the machine they ran on."""
    configs = list(sweep.points.values())
    fixed = [field.name for field in dataclasses.fields(RunConfig) if field.name not in (*sweep.swept, *_NOT_SHOWN)]
    lines = [(name, _distinct(_described(getattr(config, name)) for config in configs)) for name in fixed]
    environments = [result.environment for result in (*sweep.references.values(), *sweep.results.values())]
    names = dict.fromkeys(name for environment in environments for name in environment)
    lines += [(name, _distinct(environment.get(name) for environment in environments)) for name in names]
    shown = tuple(cells(_with_unit(name, value)) for name, value in lines if value not in ("", "None"))
    return Table("setting", "What ran, and where", ("setting", "value"), shown, 2)


def _with_unit(name: str, value: str) -> tuple[str, str]:
    if name == "memory_bytes" and value.isdecimal():
        return "memory", f"{int(value) / 2**30:.1f} GiB"
    return name, value


def _described(value: Any) -> str:
    """Return a group of the configuration in one cell: its name, and what else it sets."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    content = dataclasses.asdict(value)
    name = content.pop("name")
    content.pop("kind", None)
    settings = ", ".join(f"{key}={value}" for key, value in content.items())
    return f"{name} ({settings})" if settings else str(name)


def _distinct(found: Iterable[Any]) -> str:
    """Return the distinct values in the order met."""
    return " / ".join(dict.fromkeys(str(value) for value in found))


def swept(sweep: Sweep) -> str:
    """Return which keys were swept over which values."""
    configs = list(sweep.points.values())
    told = [f"{key} = {_distinct(value_at(each, key) for each in configs)}" for key in sweep.swept]
    return "; ".join(told) or "nothing"


_STAGE_COLUMNS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "forward": ("forward_s", milliseconds),
    "backward": ("backward_s", milliseconds),
    "input gradient": ("input_s", milliseconds),
    "weight gradient": ("weight_s", milliseconds),
    "recompute": ("recompute_s", milliseconds),
    "optimizer": ("optimizer_s", milliseconds),
    "busy": ("busy_s", milliseconds),
    "transfer in": ("transfer_in_s", milliseconds),
    "parameters": ("parameters_bytes", mebibytes),
    "gradients": ("gradients_bytes", mebibytes),
    "optimizer state": ("optimizer_bytes", mebibytes),
    "activations": ("activations_bytes", mebibytes),
    "activations predicted": ("activations_predicted_bytes", mebibytes),
    "peak": ("peak_memory_bytes", mebibytes),
    "peak resident": ("peak_rss_bytes", mebibytes),
}
"""What each column of the per-stage table shows, and how."""


def stages_table(key: str, title: str, stages: Sequence[StageRow]) -> Table:
    """Return where the time and the memory of each stage of one point went; what no stage has is left out."""
    header = ("stage", "rank", "layers", *_STAGE_COLUMNS)
    lines = tuple(
        (
            *(Cell(str(value), value) for value in (stage.stage, stage.rank, stage.layers)),
            *(Cell(show(getattr(stage, name)), getattr(stage, name)) for name, show in _STAGE_COLUMNS.values()),
        )
        for stage in stages
    )
    return _without_empty_columns(Table(f"stages-{key}", title, header, lines, 1))
