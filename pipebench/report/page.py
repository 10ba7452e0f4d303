"""report.md: what was run and where, what failed, tables and pictures, and how to read the numbers."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipebench.config import RunConfig, value_at
from pipebench.costs import profile_of
from pipebench.ledger import PARTS, ledger_of
from pipebench.ledger import in_words as lost_in_words
from pipebench.record import RunResult
from pipebench.report.advice import best_change
from pipebench.report.advice import in_words as advice_in_words
from pipebench.report.cells import NOTHING, bubble, digits, escape, kind, mebibytes, milliseconds, tenths
from pipebench.report.grid import K, M, groups, varying
from pipebench.report.schedules import compared, comparisons
from pipebench.report.sweep import Sweep, one_line_errors, reference_rows, stages_of
from pipebench.report.tables import legend, markdown, pivots
from pipebench.rows import COMPARABLE, Row, StageRow, rank_times
from pipebench.schedule.builders import SCHEDULES

NOT_SHOWN = ("results_dir", "wandb")

BUBBLE_TEXT = """\
All three are idle time over makespan, for K stages. **measured**: of the steps as they really ran.
**replayed**: the same schedule played with the measured cost of every action and transfer, each stage on a device of
its own; it means something even where stages outnumber cores. **bound**: the closed form of the schedule for equal
stages and free transfers, (K-1)/(M+K-1) for GPipe and 1F1B; none is known for rows read from a file. So
replayed - bound is imbalance and transfer, and measured - replayed is overhead and contention.
(Megatron-LM prints (K-1)/M instead, which is idle over ideal time.)"""

STAGE_COLUMNS: dict[str, Callable[[StageRow], str]] = {
    "rank": lambda stage: str(stage.rank),
    "layers": lambda stage: str(stage.layers),
    "forward": lambda stage: milliseconds(stage.forward_s),
    "backward": lambda stage: milliseconds(stage.backward_s),
    "input gradient": lambda stage: milliseconds(stage.input_s),
    "weight gradient": lambda stage: milliseconds(stage.weight_s),
    "recompute": lambda stage: milliseconds(stage.recompute_s),
    "optimizer": lambda stage: milliseconds(stage.optimizer_s),
    "busy": lambda stage: milliseconds(stage.busy_s),
    "transfer in": lambda stage: milliseconds(stage.transfer_in_s),
    "parameters": lambda stage: mebibytes(stage.parameters_bytes),
    "gradients": lambda stage: mebibytes(stage.gradients_bytes),
    "optimizer state": lambda stage: mebibytes(stage.optimizer_bytes),
    "activations": lambda stage: mebibytes(stage.activations_bytes),
    "activations predicted": lambda stage: mebibytes(stage.activations_predicted_bytes),
    "peak": lambda stage: mebibytes(stage.peak_memory_bytes),
    "peak resident": lambda stage: mebibytes(stage.peak_rss_bytes),
}
"""What each column of the per-stage table shows; those that no stage has are left out."""


_ALTERNATIVES = {
    "bubble.png": "bubble against micro-batches",
    "throughput.png": "throughput against micro-batches",
    "schedules.png": "step time and peak memory of each schedule, fastest first; the table below has the numbers",
}


def page(sweep: Sweep, rows: Sequence[Row], pictures: Sequence[str]) -> str:
    """Return the whole page; `pictures` are files beside it."""
    parts = [
        f"# pipebench: {escape(sweep.name)}",
        f"{_counts(rows)} Swept: {_swept(sweep)}.",
        *_failures(rows),
        "## Results",
        *(f"![{_ALTERNATIVES.get(name, name)}]({name})" for name in pictures),
        *_schedules(rows),
        *_notes(rows),
        *_tables(rows),
        *_ledger(sweep, rows),
        "**Marks.** " + "; ".join(legend(rows)) + ".",
        "## How to read the bubble",
        BUBBLE_TEXT,
        *_references(sweep),
        "## What ran, and where",
        _setting(sweep),
        *_stages(sweep, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[Row]) -> str:
    statuses = [row["status"] for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return f"{len(rows)} point{'s' if len(rows) != 1 else ''}: {counts}."


def _swept(sweep: Sweep) -> str:
    configs = list(sweep.points.values())
    return (
        "; ".join(f"{escape(key)} = {_distinct(value_at(config, key) for config in configs)}" for key in sweep.swept)
        or "nothing"
    )


def _failures(rows: Sequence[Row]) -> list[str]:
    """Say which points are no results, and why, before any number is shown."""
    bad = [row for row in rows if row["status"] not in COMPARABLE]
    lines = [f"- **{row['status']}** {_name(row, rows)}: {escape(row['message'] or 'not run yet')}" for row in bad]
    return ["## Points without a result", "\n".join(lines)] if bad else []


def _name(row: Row, rows: Sequence[Row]) -> str:
    others = "".join(f", {escape(name)}={escape(row[name])}" for name in varying(rows))
    return f"K={row[K]}, M={row[M]}{others}"


def _schedules(rows: Sequence[Row]) -> list[str]:
    parts = []
    for title, table in comparisons(rows).items():
        parts += [f"### Schedules by step time, {escape(title)}", table]
    return parts


LEDGER_TEXT = """\
What the median step's time went to, in ms; the parts add up to the step. Each is the difference of two replays of the
point's own rows, one effect switched on after the other in the order of the columns: forwards and backwards spread
evenly over the ranks; what the schedule idles with equal stages; recompute; stages of unequal cost; transfers; the
optimizer; actions of one kind that do not all take the same time; and the rest, what happens between actions and
while ranks wait for a core."""


def _ledger(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    told = [row for row in rows if row["status"] in COMPARABLE and row["ledger_compute_s"] is not None]
    if not told:
        return []
    header = ["", "step", *(part.removesuffix("_s").replace("_", " ") for part in PARTS)]
    lines = [
        [_name(row, rows) + kind(row), milliseconds(row["step_s"]), *(tenths(row[f"ledger_{part}"]) for part in PARTS)]
        for row in told
    ]
    words = [f"- {_name(row, rows)}{kind(row)}: {escape(_lost_and_to_gain(sweep.results[row['key']]))}" for row in told]
    return ["## Where the time went", LEDGER_TEXT, markdown(header, lines), ADVICE_TEXT, "\n".join(words)]


def _lost_and_to_gain(result: RunResult) -> str:
    with one_line_errors(result.key):
        ledger, profile = ledger_of(result), profile_of(result)
        assert ledger is not None
        words = lost_in_words(ledger, rank_times(result))
        if profile is None or result.config.schedule not in SCHEDULES:  # rows of a file or a search are as they are
            return f"{words}."
        return f"{words}; {advice_in_words(best_change(result.config, result.layers_per_stage, profile))}."


ADVICE_TEXT = """\
In words, and the one change from which the simulator expects most, with the point's own costs; more micro-batches are
taken to cost as much per sample as these do."""


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return what points have to say that did run: what a search predicted, for one."""
    lines = [
        f"- {_name(row, rows)}: {escape(row['message'])}"
        for row in rows
        if row["status"] in COMPARABLE and row["message"]
    ]
    return ["\n".join(lines)] if lines else []


def _tables(rows: Sequence[Row]) -> list[str]:
    if compared(rows) and all(len(members) == 1 for members in groups(rows).values()):
        return []  # a table of one cell for each schedule would only repeat the comparison
    parts = []
    for title, members in groups(rows).items():
        parts += [f"### {escape(title)}"] if title else []
        for name, table in pivots(members).items():
            parts += [f"**{name}**", table]
    return parts


def _references(sweep: Sweep) -> list[str]:
    """Say what each speed-up is measured against."""
    rows = reference_rows(sweep)
    text = "A speed-up is the step time of the same model and batch on one device (K=1, M=1) over the point's."
    if not rows:
        return ["## One device", f"{text} No such run has finished yet."]
    names = varying(rows)
    header = [*names, "status", "step ms", "samples/s", "tokens/s", "peak MiB"]
    lines = [
        [
            *(escape(row[name]) for name in names),
            escape(f"{row['status']}: {row['message']}" if row["message"] else row["status"]),
            milliseconds(row["step_s"]),
            digits(row["samples_per_s"]),
            digits(row["tokens_per_s"]),
            mebibytes(row["peak_memory_bytes"]),
        ]
        for row in rows
    ]
    return ["## One device", text, markdown(header, lines, len(names) + 1)]


def _setting(sweep: Sweep) -> str:
    """Return what all points have in common, and the machine they ran on."""
    configs = list(sweep.points.values())
    fixed = [field.name for field in dataclasses.fields(RunConfig) if field.name not in (*sweep.swept, *NOT_SHOWN)]
    lines = [[name, _distinct(_described(getattr(config, name)) for config in configs)] for name in fixed]
    environments = [result.environment for result in (*sweep.references.values(), *sweep.results.values())]
    names = dict.fromkeys(name for environment in environments for name in environment)
    lines += [[escape(name), _distinct(environment.get(name) for environment in environments)] for name in names]
    return markdown(["", ""], [_with_unit(name, value) for name, value in lines], 2)


def _with_unit(name: str, value: str) -> list[str]:
    if name == "memory_bytes" and value.isdecimal():
        return ["memory", f"{int(value) / 2**30:.1f} GiB"]
    return [name, value]


def _described(value: Any) -> str:
    """Return a group of the configuration in one cell: its name, and what else it sets."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    content = dataclasses.asdict(value)
    name = content.pop("name")
    content.pop("kind", None)
    settings = ", ".join(f"{key}={setting}" for key, setting in content.items())
    return f"{name} ({settings})" if settings else str(name)


def _distinct(found: Iterable[Any]) -> str:
    """Return the distinct values in the order met, ready for a cell."""
    return " / ".join(dict.fromkeys(escape(value) for value in found))


def _stages(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Return a collapsed table for every measured point: where the time and the memory of each stage went."""
    parts = []
    for row in rows:
        stages = stages_of(sweep.results[row["key"]]) if row["key"] in sweep.results else []
        if stages:
            numbers = f"bubble {bubble(row, ' / ')}, imbalance {digits(row['imbalance'])}"
            summary = f"{_name(row, rows)} ({row['status']}): {numbers}"
            parts.append(f"<details><summary>{summary}</summary>\n\n{_stage_table(stages)}\n\n</details>")
    text = "Times of one action, and of all actions in a step (busy), in ms; memory at each rank's peak, in MiB."
    return ["## Stages of every point", text, *parts] if parts else []


def _stage_table(stages: Sequence[StageRow]) -> str:
    columns = {name: [cell(stage) for stage in stages] for name, cell in STAGE_COLUMNS.items()}
    shown = {name: cells for name, cells in columns.items() if set(cells) != {NOTHING}}
    lines = [[str(stage.stage), *cells] for stage, *cells in zip(stages, *shown.values(), strict=True)]
    return markdown(["stage", *shown], lines)
