"""The record of a point: what was measured, raw, and how it is written to and read from files.

A point's result.json is the record; tables, pictures and W&B are views of it. Statistics are computed on
reading (`pipebench.rows`), so a better statistic needs no new run. JSON only: reading a result executes nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pipebench.config import DATA, MODELS, USUALLY, OptimizerConfig, RunConfig, WandbConfig
from pipebench.errors import ConfigError, ResultError, ScheduleError
from pipebench.files import put, read_text
from pipebench.schedule.action import Action, Schedule
from pipebench.schedule.memory import Peak
from pipebench.trace import Trace

FORMAT = 2
HASH_KEY = "sha256"
"""Over all other keys of a result.json."""


class LayerRun(Enum):
    """How a layer is run: whether, and of what of it, the forward runs again inside the backward."""

    KEEP = "keep"
    SELECTIVE = "selective"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one layer holds and allocates for one micro-batch when it is run one way, in bytes.

    `kept_bytes` are kept from forward to backward besides the layer's input and output; `keeps_input`, `keeps_output`
    tell whether those are kept too; `put_off_bytes` are kept between the two parts of a split backward. `peaks` say by
    op (F, B, I, W) the most that is allocated at once above what there was before: input, everything kept, and for B
    and I the gradient of the output. `first_peaks` are those of a step's first micro-batch, which allocates the
    gradients of the parameters too, and `gradient_bytes` what of these an op leaves then.
    """

    kept_bytes: int
    keeps_input: bool
    keeps_output: bool
    put_off_bytes: int
    peaks: dict[str, Peak]
    first_peaks: dict[str, Peak]
    gradient_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What each layer costs for one micro-batch of `num_samples`: seconds, and bytes by purpose.

    `backward_s` is that of a backward in one piece, `input_s` and `weight_s` those of its two parts.
    `saved_bytes` are kept from forward to backward, the layer's input not counted; `saves_input` tells whether
    the layer keeps that too; `put_off_bytes` are kept between the two parts. The last layer includes the loss.
    `skips` are tensors that pass layers by: source layer, target layer, bytes; `ties` the layers that share a parameter
    of `tied_bytes`, which `parameter_bytes` has in each of them.
    `takes_tuple`: what some layer takes is a tuple of tensors; `adds_to_loss`: some layer does; `uneven_loss`: samples
    of the first mini-batch count differently in the loss.
    Seconds are there only when a partition or a search needs them; `selective_s` is what a backward takes longer under
    selective recompute. `footprints` say by the value of a `LayerRun` what was allocated; older results have none.
    """

    num_samples: int
    names: list[str]
    forward_s: list[float]
    backward_s: list[float]
    input_s: list[float]
    weight_s: list[float]
    parameter_bytes: list[int]
    saved_bytes: list[int]
    put_off_bytes: list[int]
    input_bytes: list[int]
    saves_input: list[bool]
    skips: list[list[int]] = field(default_factory=list)
    ties: list[list[int]] = field(default_factory=list)
    tied_bytes: list[int] = field(default_factory=list)
    takes_tuple: bool = False
    adds_to_loss: bool = False
    uneven_loss: bool = False
    selective_s: list[float] = field(default_factory=list)
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank at the moment of its peak; `allocator_*` are CUDA's own counters, 0 on the CPU.

    `transfers_bytes` are buffers that an engine keeps beside tensors, such as sent tensors that nobody has fetched yet,
    at their most; how many lie there depends on who is faster. Older results have them among the activations.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    allocator_peak_bytes: int
    allocator_reserved_bytes: int
    transfers_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        live = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes
        return self.allocator_peak_bytes or live + self.transfers_bytes


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The update that ended a training step; `gradient_norm`, before clipping, and `loss_scale` where they were needed.

    A skipped one left the weights alone, since gradients had overflowed.
    """

    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and metrics after so many training steps."""

    step: int
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank delivers. Times of step i are in seconds since step i began, the same moment on all ranks.

    `spans[i]` holds (start, end, delay) for each action of the rank's row, or nothing where an engine cannot
    tell. `transfer_s` holds for each of the rank's stages the one-way time of its input from another rank, 0 where
    that comes from this one; `latency_s` that of an almost empty tensor. `losses` covers every training step, warm-up
    included, on the rank of the last stage. `sent_bytes` are those of a step's tensors for other ranks, None where the
    engine cannot tell. `updates` are those of every training step, None where it only accumulated, on rank 0 of an
    engine that tells. `first_step` is the number of training steps done before, those of a loaded run. `evaluations`
    stand on rank 0.
    """

    rank: int
    warmup_step_s: list[float]
    step_s: list[float]
    steady: bool
    losses: list[float]
    grad_rel_error: float | None
    transfer_s: list[float]
    latency_s: list[float]
    spans: list[list[tuple[float, float, float]]]
    memory: StageMemory
    peak_rss_bytes: int
    phases_s: dict[str, float]
    sent_bytes: int | None = None
    updates: list[UpdateRecord | None] = field(default_factory=list)
    first_step: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One fresh group of workers. `wall_s` is the point's whole time in the parent, `profiling_s` of it the layers'."""

    ranks: list[RankRecord]
    wall_s: float
    profiling_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a failed point: what one rank did, and what went wrong there.

    `rank`, `stage` and `action` (empty) are unknown where no rank can be blamed. `exception` names the error, the
    signal or the limit; `output` holds the last lines that rank printed; `others` what the other ranks said or did
    after it, one line each.
    """

    rank: int | None
    stage: int | None
    action: str
    exception: str
    output: list[str]
    others: list[str]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything known of one point; `flags` say what disturbed it, each `what: how much` (see `conditions`).

    `rows` are what the ranks did, as far as the engine tells, else the schedule's; none where it follows no schedule.
    `layer_runs` say of each layer whether its forward ran again inside its backward, as values of `LayerRun`; older
    results have none.
    """

    key: str
    config: RunConfig
    status: str
    message: str
    oversubscribed: bool
    environment: dict[str, Any]
    layers_per_stage: list[int]
    rows: list[list[str]]
    profile: LayerProfile | None
    repeats: list[Repeat] = field(default_factory=list)
    failure: Failure | None = None
    flags: list[str] = field(default_factory=list)
    layer_runs: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[LayerRun]:
        return [LayerRun(run) for run in self.layer_runs]

    @property
    def schedule(self) -> Schedule:
        rows = tuple(tuple(Action.parse(text) for text in row) for row in self.rows)
        skips = far_skips(self.profile, self.layers_per_stage) if self.profile is not None else ()
        return Schedule(self.config.schedule, rows, skips)


def far_skips(layers: LayerProfile, layers_per_stage: Sequence[int]) -> set[tuple[int, int]]:
    """Return the pairs of stages, no neighbours, between which the model's skips pass when it is cut so."""
    stage_of = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    pairs = {(stage_of[source], stage_of[target]) for source, target, _ in layers.skips}
    return {(source, target) for source, target in pairs if target - source > 1}


def traces(result: RunResult, repeat: Repeat) -> list[Trace]:
    """Return the measured trace of each timed step, or nothing where the engine recorded none."""
    rows = result.schedule.rows
    steps = zip(*(record.spans for record in repeat.ranks), strict=True)
    found = []
    for step in steps:
        if [len(spans) for spans in step] != [len(row) for row in rows]:
            raise ValueError(
                f"{[len(spans) for spans in step]} spans: expected {[len(row) for row in rows]}, one an action"
            )
        start_s, end_s, delay_s = np.array([span for spans in step for span in spans], dtype=np.float64).T
        found.append(Trace(rows, start_s, end_s, delay_s))
    return found


def step_times(ranks: Sequence[RankRecord]) -> list[float]:
    """Return the seconds of each timed step of a group of ranks: until the last one was done."""
    return [max(times) for times in zip(*(record.step_s for record in ranks), strict=True)]


def step_groups(result: RunResult) -> list[list[float]]:
    """Return the timed steps' seconds of each fresh group of workers: the samples of a point."""
    return [step_times(repeat.ranks) for repeat in result.repeats]


def transfer_times(result: RunResult) -> list[float]:
    """Return for each stage the one-way seconds of its input from another rank."""
    schedule = result.schedule
    times = [0.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        own = zip(*(repeat.ranks[rank].transfer_s for repeat in result.repeats), strict=True)
        for stage, seconds in zip(schedule.stages_of_rank(rank), own, strict=True):
            times[stage] = median(seconds)
    return times


def losses(repeat: Repeat) -> list[float]:
    """Return the loss of every training step, from whichever rank holds the last stage."""
    return next((record.losses for record in repeat.ranks if record.losses), [])


def first_step(repeat: Repeat) -> int:
    """Return how many steps had been trained before the first of these."""
    return repeat.ranks[0].first_step if repeat.ranks else 0


def evaluations(repeat: Repeat) -> list[Evaluation]:
    return next((record.evaluations for record in repeat.ranks if record.evaluations), [])


def write_json(path: Path, content: object) -> None:
    """Write atomically; raise ResultError, one line, where the disk is full or the folder cannot be written."""
    text = json.dumps(content, indent=None, separators=(",", ":"), allow_nan=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, text.encode())
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_result(path: Path, result: RunResult) -> None:
    """Write a result.json with a hash of its content, so that a number edited later is noticed on reading."""
    content = {"format": FORMAT, **dataclasses.asdict(result)}
    write_json(path, {**content, HASH_KEY: _hash_of(content)})


def _hash_of(content: dict[str, Any]) -> str:
    """Return the hash of what a file says; spaces, line ends and the order of keys say nothing."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of ours; raise ResultError, one line, for whatever else it is."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{path}: cannot be read as a result: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultError(f"{path}: expected a pipebench result of format {FORMAT}")
    return content


def read_result(path: Path) -> RunResult:
    """Read a result.json; raise ResultError when it is not one, or was edited after it was written."""
    content = read_json(path)
    written = content.pop(HASH_KEY, None)  # results were made before there was one
    if written is not None and written != _hash_of(content):
        raise ResultError(f"{path}: was edited after it was written: its content is not that of its {HASH_KEY}")
    try:
        profile, failure = content["profile"], content.get("failure")  # results were made before there was one
        return RunResult(
            key=content["key"],
            config=config_from(content["config"]),
            status=content["status"],
            message=content["message"],
            oversubscribed=content["oversubscribed"],
            environment=content["environment"],
            layers_per_stage=content["layers_per_stage"],
            rows=content["rows"],
            profile=_profile_from(profile) if profile else None,
            repeats=[_repeat_from(repeat) for repeat in content["repeats"]],
            failure=_failure_from(failure) if failure else None,
            flags=[str(flag) for flag in content.get("flags", [])],
            layer_runs=[LayerRun(run).value for run in content.get("layer_runs", [])],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"{path}: not a complete result: {error}") from error


@contextlib.contextmanager
def one_line_errors(where: object) -> Iterator[None]:
    """Say in one line what a damaged or foreign file led to."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ResultError(f"{where}: not a complete result: {reason}") from error
    except (ScheduleError, ConfigError) as error:
        raise ResultError(f"{where}: not a complete result: {error}") from error


def config_from(content: dict[str, Any]) -> RunConfig:
    """Rebuild a RunConfig from its dictionary."""
    nested = {
        "model": MODELS[content["model"]["kind"]](**content["model"]),
        "data": DATA[content["data"]["kind"]](**content["data"]),
        "optimizer": OptimizerConfig(**content["optimizer"]),
        "wandb": WandbConfig(**content["wandb"]),
    }
    later = {name: usual for name, usual in USUALLY.items() if "." not in name}
    return RunConfig(**{**later, **content, **nested})


def _failure_from(content: dict[str, Any]) -> Failure:
    failure = Failure(**content)
    for lines in (failure.output, failure.others):
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise TypeError("failure: expected lines of text as output and others")
    return failure


def _profile_from(content: dict[str, Any]) -> LayerProfile:
    footprints = {
        LayerRun(run).value: [_footprint_from(layer) for layer in layers]
        for run, layers in content.get("footprints", {}).items()
    }
    return LayerProfile(**{**content, "footprints": footprints})


def _footprint_from(content: dict[str, Any]) -> Footprint:
    peaks = {name: {op: Peak(**peak) for op, peak in content[name].items()} for name in ("peaks", "first_peaks")}
    return Footprint(**{**content, **peaks})


def _repeat_from(content: dict[str, Any]) -> Repeat:
    ranks = [
        RankRecord(
            **{
                **rank,
                "memory": StageMemory(**rank["memory"]),
                "evaluations": [Evaluation(**each) for each in rank.get("evaluations", [])],
                "spans": [[(start, end, delay) for start, end, delay in step] for step in rank["spans"]],
                "updates": [update and UpdateRecord(**update) for update in rank.get("updates", [])],
            }
        )
        for rank in content["ranks"]
    ]
    return Repeat(ranks, content["wall_s"], content["profiling_s"])
