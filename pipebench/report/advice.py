"""What to change: the one change to a point from which the simulator expects most, or that another point made.

The point's own result is the profile, so a change is judged by the costs that were measured, spread over the layers.
Each candidate changes one key, and is compared with the same simulation of the point as it is. A new cut of the model
is told by its layer counts.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipebench.activations import stage_activations
from pipebench.config import RunConfig
from pipebench.costs import Profile, for_samples, stage_costs, transfer_times
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.errors import LimitError
from pipebench.grid import K, axes_of
from pipebench.harness.prepare import Prepared, partition, prepare
from pipebench.report.cells import mebibytes
from pipebench.rows import Row
from pipebench.schedule.builders import SCHEDULES, with_optimizer
from pipebench.schedule.memory import peak_activation_bytes
from pipebench.schedule.simulate import simulate

WHAT_IS_TRAINED = ("model", "data", "batch", "optimizer", "precision", "seed", "load")
"""Keys on which the losses depend; all others say how the same is trained."""

WORTH_FRACTION = 0.02
"""A change that gains less is not worth a word: predictions are no better."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change such as `schedule=zb_h2`, the share of the step it would save, and the activations it would hold."""

    change: str
    gain_fraction: float
    activations_bytes: float
    activations_now_bytes: float


def best_change(config: RunConfig, layers_per_stage: list[int], profile: Profile) -> Advice | None:
    """Return the change that would gain most, None where none is worth it.

    `profile` is the point's own (`costs.profile_of`). A schedule that needs more stages than there are layers, or a
    search, is no candidate, nor is what does not keep a budget.
    """
    here = dataclasses.replace(config, partition=list(layers_per_stage))
    now_s, now_bytes = _predicted(here, profile)
    best = None
    for change, changed in _changes(config, here, profile):
        try:
            step_s, num_bytes = _predicted(changed, profile)
        except LimitError:
            continue
        gain = 1 - step_s / now_s
        if gain > max(WORTH_FRACTION, best.gain_fraction if best else 0.0):
            best = Advice(change, gain, num_bytes, now_bytes)
    return best


@dataclass(frozen=True, slots=True)
class Seen:
    """A change that another point of the sweep made, and the share of the step that it saved there."""

    change: str
    gain_fraction: float


def best_seen(row: Row, rows: Sequence[Row], floor: float) -> Seen | None:
    """Return the point of the sweep that was fastest of those that train the same on as many ranks, one change away.

    None where none is faster by more than the noise `floor`. A schedule, its stages per rank and how
    the model is cut into them are one change.
    """
    others = [other for other in rows if other["status"] == row["status"] and other[K] == row[K]]
    near = [(change, other) for other in others if (change := _one_change(row, other))]
    change, fastest = min(near, key=lambda each: float(each[1]["step_s"]), default=("", row))
    ratio = row["step_s"] / fastest["step_s"]
    return Seen(change, 1 - 1 / ratio) if ratio > max(floor, 1 / (1 - WORTH_FRACTION)) else None


def _one_change(row: Row, other: Row) -> str:
    """Return what has to be changed in `row` to make it `other`, nothing where it is no one change."""
    differing = [name for name in axes_of([row]) if row[name] != other[name]]
    if not differing or any(name.partition(".")[0] in WHAT_IS_TRAINED for name in differing):
        return ""
    if len(differing) > 1 and set(differing) - {"partition"} != {"schedule", "chunks"}:
        return ""
    return " ".join(f"{name}={other[name]}" for name in differing)


def in_words(advice: Advice | None, seen: Seen | None) -> str:
    """Return what was seen where it gained more than what is predicted, else the prediction."""
    if seen is not None and (advice is None or seen.gain_fraction >= advice.gain_fraction):
        return f"measured in this sweep: {seen.change} takes {seen.gain_fraction:.0%} less time"
    if advice is None:
        return f"no single change is expected to gain {WORTH_FRACTION:.0%}"
    then, now = mebibytes(advice.activations_bytes), mebibytes(advice.activations_now_bytes)
    saved = f"{advice.gain_fraction:.0%} less time"
    return f"most is expected of {advice.change}: {saved}, {then} MiB of activations instead of {now}"


def _changes(config: RunConfig, here: RunConfig, profile: Profile) -> Iterator[tuple[str, RunConfig]]:
    if config.recompute != "never":
        yield "recompute=never", dataclasses.replace(here, recompute="never", recompute_budget=None)
    if 2 * config.micro <= config.batch:
        yield f"micro={2 * config.micro}", dataclasses.replace(here, micro=2 * config.micro)
    yield from _recut(here, profile)
    for name, recipe in SCHEDULES.items():
        chunks = recipe.usual_chunks
        if name == config.schedule or config.stages * chunks > config.model.num_layers:
            continue
        straight = chunks == 1 and len(here.partition) == config.stages
        cut = here.partition if straight else "time"
        yield f"schedule={name}", dataclasses.replace(here, schedule=name, chunks=chunks, partition=cut)


def _recut(here: RunConfig, profile: Profile) -> Iterator[tuple[str, RunConfig]]:
    """Cut the model anew by the measured costs; where that only moves one layer, say which way."""
    counts = here.partition
    better = partition(dataclasses.replace(here, partition="time"), profile, len(counts))
    moved = [after - before for before, after in zip(counts, better, strict=True)]
    change = f"partition=[{','.join(map(str, better))}]"
    if sorted(moved) == [-1, *[0] * (len(moved) - 2), 1]:
        change = f"moving a layer from stage {moved.index(-1)} to stage {moved.index(1)} ({change})"
    if any(moved):
        yield change, dataclasses.replace(here, partition=better)


def _predicted(config: RunConfig, profile: Profile) -> tuple[float, float]:
    """Return the step's seconds and the largest rank's activations in bytes."""
    profile = for_samples(profile, micro_batch_sizes(config.batch, config.micro)[0])
    prepared: Prepared = prepare(config, profile)
    counts, schedule = prepared.layers_per_stage, with_optimizer(prepared.schedule)
    trace = simulate(schedule, stage_costs(profile, counts, prepared.runs), transfer_times(profile, counts))
    return trace.makespan_s, max(
        peak_activation_bytes(schedule, stage_activations(profile.layers, counts, prepared.runs))
    )
