"""What every tracker draws: a point's samples over its training steps, and a sweep's numbers over M.

How runs are called and which lines belong into which chart is decided once, here; how a line gets into a file is each
tracker's own affair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.config import is_known
from pipebench.grid import K, M, groups, values
from pipebench.metrics import bubble_fraction
from pipebench.record import (
    Repeat,
    RunResult,
    UpdateRecord,
    evaluations,
    first_step,
    losses,
    step_times,
    traces,
)
from pipebench.rows import AXES, COMPARABLE, Row

PLAIN = {"replicas": 1, "chunks": 1, "recompute": "never", "partition": "time", "engine": "pipebench"}
"""What goes without saying in a run's name."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of one training step, counted from 1; untimed steps of the warm-up have a loss alone."""

    training_step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line over M: `chart` is what shares its axes, `name` says which K, what else varies, and how it was got."""

    chart: str
    name: str
    values: dict[int, float]


@dataclass(frozen=True, slots=True)
class _Curve:
    chart: str
    column: str
    label: str = ""
    unit: float = 1


_CURVES = (
    _Curve("bubble", "bubble_fraction", "measured"),
    _Curve("bubble", "bubble_replayed", "replayed"),
    _Curve("bubble", "bubble_bound", "bound"),
    _Curve("samples_per_s", "samples_per_s"),
    _Curve("tokens_per_s", "tokens_per_s"),
    _Curve("speedup", "speedup"),
    _Curve("peak_memory_mib", "peak_memory_bytes", unit=MIB),
)


def run_name(row: Row) -> str:
    """Return such as `K=2 M=8 gpipe transformer optimizer.lr=0.1`: what differs, what is usual left out."""
    swept = [name for name in row if name not in AXES and is_known(name)]
    told = [f"{name}={row[name]}" for name, usual in PLAIN.items() if row[name] != usual]
    told += [f"{name}={row[name]}" for name in swept]
    return " ".join([f"K={row[K]} M={row[M]}", row["schedule"], row["model"], *told])


def samples_of(result: RunResult) -> list[Samples]:
    """Return every training step of every group of workers, the first group under the plain names."""
    found = []
    for number, repeat in enumerate(result.repeats, start=1):
        suffix = "" if number == 1 else f"_repeat_{number}"
        for training_step, step in enumerate(_steps(result, repeat), start=first_step(repeat) + 1):
            found.append(Samples(training_step, {name + suffix: value for name, value in step.items()}))
    return found


def _steps(result: RunResult, repeat: Repeat) -> list[dict[str, float]]:
    """Return what is known of each training step, the untimed ones of the warm-up first."""
    times = step_times(repeat.ranks)
    steps = [{"loss": loss} for loss in losses(repeat)] or [{} for _ in times]
    for step, update in zip(steps, repeat.ranks[0].updates, strict=False):  # none where the engine tells of none
        step |= _of_update(update) if update else {}
    for step, step_s in zip(steps[len(steps) - len(times) :], times, strict=True):
        step["step_s"] = step_s
    bubbles = [bubble_fraction(trace) for trace in traces(result, repeat)]
    for step, bubble in zip(steps[len(steps) - len(bubbles) :], bubbles, strict=True):
        step["bubble_fraction"] = bubble
    for evaluation in evaluations(repeat):
        done = evaluation.step - first_step(repeat)
        found = {"loss": evaluation.loss, **evaluation.metrics}
        steps[done - 1] |= {f"evaluation_{name}": value for name, value in found.items()}
    return steps


def _of_update(update: UpdateRecord) -> dict[str, float]:
    """Return what is known of an update; a norm that overflowed is no number to draw."""
    known = {
        "learning_rate": update.learning_rate,
        "gradient_norm": update.gradient_norm,
        "loss_scale": update.loss_scale,
        "skipped": None if update.loss_scale is None else float(update.skipped),
    }
    return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Return the lines of a sweep: one for each K, combination of whatever else varies, and curve of a chart.

    Points without a result are left out, as are lines without a value.
    """
    found = []
    for combination, members in groups([row for row in rows if row["status"] in COMPARABLE]).items():
        for stages in values(members, K):
            line = sorted((row for row in members if row[K] == stages), key=lambda row: int(row[M]))
            who = ", ".join(filter(None, [f"K={stages}", combination]))
            found += [series for curve in _CURVES if (series := _series(curve, who, line)).values]
    return found


def _series(curve: _Curve, who: str, line: Sequence[Row]) -> Series:
    label = "simulated" if curve.label == "measured" and line[0]["simulated"] else curve.label
    known = {row[M]: row[curve.column] / curve.unit for row in line if row[curve.column] is not None}
    return Series(curve.chart, f"{who} {label}".rstrip(), known)
