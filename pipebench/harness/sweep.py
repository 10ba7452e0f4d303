"""Run the points of a grid one after another, record each, and never let one point's failure cost another.

Order: references (one device) and points of round 1, then round 2 of all, ... so that a slow drift of the
machine falls on every point alike. Each round ends with one of the points measured a second time: an A/A pair, which
says how far two measurements of the same thing lie apart here.
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pipebench import machine
from pipebench.conditions import flags_between, merged, read_conditions
from pipebench.config import RunConfig, key_of, ranks_per_device
from pipebench.costs import Profile, load_profile, parameter_bytes
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.errors import PointError, ResultError, ScheduleError
from pipebench.files import own
from pipebench.harness.failures import GroupError
from pipebench.harness.forecast import memory_by_process, why_too_large, why_weights_too_large
from pipebench.harness.jobs import (
    MEASURE_LINK,
    MEASURE_RANK,
    PROFILE_LAYERS,
    WEIGH_MODEL,
    LinkJob,
    ProfileJob,
    RankJob,
    WeighJob,
)
from pipebench.harness.launch import OnProgress, Progress, run_group
from pipebench.harness.limits import Limits
from pipebench.harness.prepare import Prepared, prepare, schedule_of
from pipebench.harness.simulated import simulate_point
from pipebench.peers.abilities import follows_rows, num_processes, threads_each, why_not, why_not_model
from pipebench.record import FORMAT, LayerProfile, Repeat, RunResult, write_json, write_result
from pipebench.render import chrome_trace
from pipebench.rows import COMPARABLE, FAILED, largest_gradient_error, median_step
from pipebench.saved import check_loadable
from pipebench.schedule.action import Op, Row, Schedule
from pipebench.schedule.builders import Recompute, with_optimizer, with_skips
from pipebench.schedule.catalogue import ZB_AUTO
from pipebench.schedule.simulate import Link

SWEEP_FILE = "sweep.json"
RESULT_FILE = "result.json"
TRACE_FILE = "trace.json"
AGAIN_FILE = "again.json"
"""The second measurement of the same point, in the same format."""

GRADIENT_LIMITS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative gradient error that counts as rounding, by precision."""


@dataclass(frozen=True, slots=True)
class Observer:
    """Whom the sweep tells what happens: a display, trackers. None of them can change a result.

    A point is announced with the number of its round, the one that is measured again apart from the others.
    """

    point_started: Callable[[RunConfig, int], None]
    progress: Callable[[Progress], None]
    point_done: Callable[[RunResult], None]
    again_started: Callable[[RunConfig, int], None]
    again_done: Callable[[RunResult], None]


@dataclass(frozen=True, slots=True)
class Known:
    """What was found out once and serves several groups.

    Layers, links and models by what they depend on, what was decided of a point by its key: a file that is edited while
    the sweep runs must not give a later round other rows.
    """

    profiles: dict[str, LayerProfile] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    model_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Standing:
    """How far a sweep is; it grows as the sweep runs, and a resumed one starts from what its folder holds.

    `results` by key; `told`, the points that observers have heard of; `again`, the second measurement of the point
    that has one.
    """

    results: dict[str, RunResult] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    again: RunResult | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will run: distinct points in the order asked for, and the reference each is compared with.

    `again` is the key of the point that is measured twice, None for none.
    """

    points: dict[str, RunConfig]
    references: dict[str, RunConfig]
    reference_of: dict[str, str]
    again: str | None
    swept: tuple[str, ...]
    name: str

    @property
    def all(self) -> dict[str, RunConfig]:
        """References come first, be they points too: whoever hears of a point then can know its speed-up."""
        serving = {key: config for key, config in self.points.items() if key in self.reference_of.values()}
        return {**self.references, **serving, **self.points}


def plan_sweep(points: Sequence[RunConfig], swept: Sequence[str], name: str) -> Plan:
    """Number resolved points by their key; equal ones run once. Raise ConfigError for an unusable profile or save."""
    distinct = {key_of(point): point for point in points}
    for point in distinct.values():
        if point.engine == "simulate":
            load_profile(point)
        if point.load is not None:
            check_loadable(point)
    references = {key: _reference(point) for key, point in distinct.items()}
    reference_of = {key: key_of(reference) for key, reference in references.items()}
    missing = {key_of(r): r for r in references.values() if key_of(r) not in distinct}
    return Plan(distinct, missing, reference_of, _measured_twice(distinct), tuple(swept), name)


def _measured_twice(points: Mapping[str, RunConfig]) -> str | None:
    """Return the key of the first point with most stages of those on devices of their own, else of the first that runs.

    More ranks scatter more, and a floor should not be too low. A single point is measured once, as is a sweep in which
    nothing runs.
    """
    running = {key: config for key, config in points.items() if config.engine != "simulate"}
    if len(running) < 2 or not all(config.noise_floor for config in running.values()):
        return None
    alone = {key: config for key, config in running.items() if not _is_oversubscribed(config)}
    return max(alone, key=lambda key: alone[key].stages, default=next(iter(running)))


def make_folder(results_dir: Path, name: str) -> Path:
    """Create `<time>-<name>`, unique even when two sweeps start in the same second."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    results_dir.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = results_dir / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a thousand sweeps in one second")


def run_sweep(plan: Plan, folder: Path, observer: Observer, before: Standing | None = None) -> dict[str, RunResult]:
    """Run what of `plan` was not run `before`, write each result as soon as it is known, and return all by key.

    A point that fails ends the sweep where its on_failure says so; one that had failed before does not, nor does a
    reference, without which only speed-ups are missing. Raise ResultError where a result cannot be written; what is
    there stays as it is.
    """
    standing = before or Standing()
    running = _Running(plan, folder, observer, standing, _known_from(standing), machine.describe())
    _write_state(folder, plan, standing, finished=False)
    for round_number in range(max(config.repeats for config in plan.all.values())):
        for key, config in plan.all.items():
            runs = rounds_done(standing.results.get(key)) <= round_number < config.repeats
            if runs:
                _run_point(running, key, round_number)
            if key not in standing.told and rounds_done(standing.results[key]) >= config.repeats:
                observer.point_done(standing.results[key])
                standing.told.add(key)
                _write_state(folder, plan, standing, finished=False)
            if runs and key in plan.points and ends_the_sweep(standing.results[key]):
                return standing.results
        if plan.again is not None and rounds_done(standing.again) <= round_number < plan.points[plan.again].repeats:
            _run_again(running, plan.again, round_number)
    return standing.results


def conclude_sweep(plan: Plan, folder: Path, standing: Standing) -> None:
    """Note in sweep.json that nothing is left to do, if that is so; for when the report is there too."""
    done = all(rounds_done(standing.results.get(key)) >= config.repeats for key, config in plan.all.items())
    if plan.again is not None and done and standing.results[plan.again].status in COMPARABLE:
        done = rounds_done(standing.again) >= plan.points[plan.again].repeats
    _write_state(folder, plan, standing, finished=done)


@dataclass(frozen=True, slots=True)
class _Running:
    """What each measurement of a running sweep needs and adds to."""

    plan: Plan
    folder: Path
    observer: Observer
    standing: Standing
    known: Known
    environment: dict[str, Any]


def _run_point(running: _Running, key: str, round_number: int) -> None:
    """Run one round of a point; one that is interrupted in its first says so, to be run again on resuming."""
    standing, config = running.standing, running.plan.all[key]
    running.observer.point_started(config, round_number)
    result = standing.results.get(key) or _unmeasured(key, config, running.environment)
    try:
        save_in = _saved_folder(running.folder, key) if config.save else ""
        standing.results[key] = _run_flagged(result, running.known, running.observer, save_in)
    except KeyboardInterrupt:
        if key not in standing.results:
            message = "the sweep was stopped while this point ran"
            standing.results[key] = dataclasses.replace(result, status="interrupted", message=message)
            _write_standing(running, key)
        raise
    _write_standing(running, key)


def _write_standing(running: _Running, key: str) -> None:
    _write_point(running.folder, running.standing.results[key])
    _write_state(running.folder, running.plan, running.standing, finished=False)


def _run_again(running: _Running, key: str, round_number: int) -> None:
    """Run one round of the second measurement; the observer hears of it after the last."""
    standing, config = running.standing, running.plan.points[key]
    if standing.results[key].status not in COMPARABLE:
        return
    running.observer.again_started(config, round_number)
    again = standing.again or _unmeasured(key, config, running.environment)
    standing.again = _run_flagged(again, running.known, running.observer)
    write_result(_own_point_folder(running.folder, key) / AGAIN_FILE, standing.again)
    if rounds_done(standing.again) >= config.repeats:
        running.observer.again_done(standing.again)


def rounds_done(result: RunResult | None) -> int:
    """Return how many rounds a point needs no more: all of them after it failed in one."""
    if result is None:
        return 0
    return result.config.repeats if result.status in FAILED else len(result.repeats)


def groups_done(plan: Plan, standing: Standing) -> int:
    """Return how many fresh groups of workers, those of the second measurement included, need not run any more."""
    done = sum(min(rounds_done(standing.results.get(key)), config.repeats) for key, config in plan.all.items())
    return done + (min(rounds_done(standing.again), plan.points[plan.again].repeats) if plan.again else 0)


def _known_from(standing: Standing) -> Known:
    """Return what earlier groups found out: the rounds of a point that are missing need the rows of those it has."""
    real = {key: r for key, r in standing.results.items() if r.config.engine != "simulate" and r.repeats}
    profiles = {_profile_name(result.config): result.profile for result in real.values() if result.profile}
    prepared = {key: _prepared_from(result) for key, result in real.items()}
    return Known(profiles=profiles, prepared=prepared)


def _prepared_from(result: RunResult) -> Prepared:
    """Return the cut and the rows asked for; only this project's engine surely ran those it was asked for."""
    config = result.config
    if config.engine != "pipebench":
        return Prepared(
            result.layers_per_stage, with_skips(schedule_of(config), result.schedule.skips), runs=tuple(result.runs)
        )
    rows = tuple(tuple(action for action in row if action.op is not Op.OPTIMIZER) for row in result.schedule.rows)
    message = result.message if result.status in COMPARABLE else ""
    return Prepared(
        result.layers_per_stage, Schedule(config.schedule, rows, result.schedule.skips), message, tuple(result.runs)
    )


def ends_the_sweep(result: RunResult) -> bool:
    """Tell whether a point came out so that the user wants no further one to run."""
    return result.config.on_failure == "stop" and result.status not in (*COMPARABLE, "skipped")


def point_folder(folder: Path, key: str) -> Path:
    return folder / "runs" / key


def _saved_folder(folder: Path, key: str) -> str:
    """Make and return where a point's training is saved."""
    place = own(folder, point_folder(folder, key) / "saved")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultError(f"{place}: cannot be written: {error.strerror or error}") from error
    return str(place.absolute())


def _own_point_folder(folder: Path, key: str) -> Path:
    """Return where a point's files are written; a file there is replaced, a link to a folder would be followed."""
    return own(folder, point_folder(folder, key))


def _reference(point: RunConfig) -> RunConfig:
    """Return the same model, batch, precision and threads on one device, the whole mini-batch at once."""
    return dataclasses.replace(
        point,
        stages=1,
        micro=1,
        schedule="gpipe",
        chunks=1,
        memory_limit="auto",
        recompute="never",
        recompute_budget=None,
        partition="uniform",
        transport="auto",
        evaluate_every=0,
        evaluate_batch=None,
        save=False,
        load=None,
        engine="simulate" if point.engine == "simulate" else "pipebench",
        profile=point.profile if point.engine == "simulate" else None,
    )


def _unmeasured(key: str, config: RunConfig, environment: dict[str, Any]) -> RunResult:
    return RunResult(
        key=key,
        config=config,
        status="ok",
        message="",
        oversubscribed=_is_oversubscribed(config),
        environment=environment,
        layers_per_stage=[],
        rows=[],
        profile=None,
    )


def _is_oversubscribed(config: RunConfig) -> bool:
    """Tell whether ranks share what would be a device each."""
    return ranks_per_device(config, machine.this_machine()) > 1


def _run_flagged(result: RunResult, known: Known, observer: Observer, save_in: str = "") -> RunResult:
    """Run the point once more, save what it trained in a folder if one is named, and note what disturbed it."""
    config = result.config
    if config.engine == "simulate":
        return _run_once(result, known, observer)
    before = read_conditions(config.device)
    measured = _run_once(result, known, observer, save_in)
    found = flags_between(before, read_conditions(config.device), _cores_wanted(config), os.cpu_count() or 1)
    return dataclasses.replace(measured, flags=merged(result.flags, found))


def warnings_before(plan: Plan) -> list[str]:
    """Return what speaks against the numbers to come, as the machine is now."""
    running = [config for config in plan.all.values() if config.engine != "simulate"]
    if not running:
        return []
    now, num_cores = read_conditions(running[0].device), os.cpu_count() or 1
    crowded = sum(map(_is_oversubscribed, running))
    shared = f"oversubscribed: {crowded} of {len(running)} points have more stages x threads than there are cores"
    return [*([shared] if crowded else []), *flags_between(now, now, max(map(_cores_wanted, running)), num_cores)]


def _cores_wanted(config: RunConfig) -> int:
    """Sleeping stages want none, and one keeps a GPU's queue filled."""
    if config.model.kind == "synthetic":
        return 0
    return config.stages * (1 if config.device == "cuda" else int(config.threads))


def _run_once(result: RunResult, known: Known, observer: Observer, save_in: str = "") -> RunResult:
    """Measure the point with one more fresh group, or simulate it; a failure becomes its status and message."""
    began = time.perf_counter()
    config = result.config
    try:
        if config.engine == "simulate":
            return simulate_point(result)
        reason = why_not(config, machine.this_machine()) or why_not_weights(config, known, observer.progress)
        if reason:
            return dataclasses.replace(result, status="skipped", message=reason)
        profile = profile_of_point(config, known, observer.progress)
        layers = profile.layers
        reason = why_not_model(config, layers)
        if reason:
            return dataclasses.replace(result, status="skipped", message=reason)
        profiling_s = time.perf_counter() - began
        if result.key not in known.prepared:
            known.prepared[result.key] = prepare(config, profile)
        prepared = known.prepared[result.key]
        memory = memory_by_process(config, layers, prepared)
        reason = why_too_large(config, memory, machine.capacity())
        if reason and not config.force:
            return dataclasses.replace(result, status="skipped", message=reason)
        delivered = run_ranks(MEASURE_RANK, config, prepared, layers, observer.progress, save_in)
    except GroupError as error:
        return dataclasses.replace(result, status=error.status, message=str(error), failure=error.failure)
    except (PointError, ScheduleError) as error:
        return dataclasses.replace(result, status="error", message=str(error))
    asked_for = with_optimizer(prepared.schedule)
    repeats = [*result.repeats, Repeat([record for record, _ in delivered], time.perf_counter() - began, profiling_s)]
    status, message = _judge(config, repeats)
    return dataclasses.replace(
        result,
        status=status,
        message=message or prepared.message,
        layers_per_stage=prepared.layers_per_stage,
        rows=[[str(action) for action in row] for row in _rows_run(config, asked_for, [row for _, row in delivered])],
        profile=layers,
        repeats=repeats,
        layer_runs=[run.value for run in prepared.runs],
    )


def run_ranks(
    work: str,
    config: RunConfig,
    prepared: Prepared,
    layers: LayerProfile,
    on_progress: OnProgress,
    save_in: str = "",
) -> list[Any]:
    """Run `work(job, report)` once for each rank of a point, in a fresh group, and return what the ranks deliver."""
    with scratch() as folder:
        jobs = _jobs(config, prepared, layers, str(folder / "store"), save_in)
        trained = with_optimizer(prepared.schedule)
        return run_group(work, jobs, config.device, on_progress, limits_of(config), folder, trained)


def _rows_run(config: RunConfig, asked_for: Schedule, told: Sequence[Row]) -> Sequence[Row]:
    """Return what the ranks say they did, what they were asked to do where they cannot tell, if they follow rows."""
    if not follows_rows(config):
        return ()
    return told if all(told) else asked_for.rows


def why_not_weights(config: RunConfig, known: Known, on_progress: OnProgress) -> str:
    """Return why a point's model is too large to be even built for a profile; "" where it is not, or is forced."""
    if config.force:
        return ""
    return why_weights_too_large(config, _model_bytes(config, known, on_progress), machine.capacity())


def _model_bytes(config: RunConfig, known: Known, on_progress: OnProgress) -> int:
    """Return the bytes of the weights, once per model; from its profile where there is one."""
    if _profile_name(config) in known.profiles:
        return _whole_bytes(known.profiles[_profile_name(config)])
    name = repr(config.model)
    if name not in known.model_bytes:
        with scratch() as folder:
            limits = limits_of(config)
            [known.model_bytes[name]] = run_group(WEIGH_MODEL, [WeighJob(config)], "cpu", on_progress, limits, folder)
    return known.model_bytes[name]


def profile_of_point(config: RunConfig, known: Known, on_progress: OnProgress) -> Profile:
    """Return what partition, search and memory model must know of a real point, measured where `known` lacks it."""
    layers = _profile(config, known, on_progress)
    return Profile(layers, [0.0] * len(layers.names), _link(config, known, on_progress))


def _profile(config: RunConfig, known: Known, on_progress: OnProgress) -> LayerProfile:
    """Profile once per model and micro-batch size (and whatever else a layer's time depends on)."""
    name = _profile_name(config)
    if name not in known.profiles:
        num_samples = micro_batch_sizes(config.batch, config.micro)[0]
        job = ProfileJob(config, num_samples, _needs_times(config), _cores_of(int(config.threads), num_ranks=1)[0])
        with scratch() as folder:
            [known.profiles[name]] = run_group(
                PROFILE_LAYERS, [job], config.device, on_progress, limits_of(config), folder
            )
    return known.profiles[name]


def _profile_name(config: RunConfig) -> str:
    num_samples = micro_batch_sizes(config.batch, config.micro)[0]
    return f"{key_of(_reference(config))}/{num_samples}/{_needs_times(config)}"


def _needs_times(config: RunConfig) -> bool:
    return config.partition == "time" or config.schedule == ZB_AUTO or config.recompute == Recompute.BUDGET.value


def _link(config: RunConfig, known: Known, on_progress: OnProgress) -> Link:
    """Measure what a search must know of transfers, once per way between ranks; who searches nothing needs nothing."""
    if config.schedule != ZB_AUTO or config.stages == 1:
        return Link()
    name = f"{config.device}/{config.threads}/{config.transport}"
    if name not in known.links:
        with scratch() as folder:
            cores = _cores_of(int(config.threads), num_ranks=2)
            jobs = [LinkJob(config, rank, cores[rank], str(folder / "store")) for rank in range(2)]
            known.links[name], _ = run_group(MEASURE_LINK, jobs, config.device, on_progress, limits_of(config), folder)
    return known.links[name]


def limits_of(config: RunConfig) -> Limits:
    """Return how long one fresh group of this point may take and be silent."""
    point_s, progress_s = (
        None if limit == "auto" else limit for limit in (config.point_limit_s, config.progress_limit_s)
    )
    num_steps = config.warmup + config.steps
    evaluated = num_steps // config.evaluate_every + 1 if config.evaluate_every else 0
    return Limits(
        point_s, progress_s, num_steps + evaluated * -(-(config.evaluate_batch or config.batch) // config.batch)
    )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for what the ranks of a group share; workers whose parent is killed remove it themselves."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="pipebench-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ResultError(f"{tempfile.gettempdir()}: cannot be written: {error}") from error
    with scratch as folder:
        yield Path(folder)


def _whole_bytes(layers: LayerProfile) -> int:
    return parameter_bytes(layers, range(len(layers.names)))


def _jobs(config: RunConfig, prepared: Prepared, layers: LayerProfile, store: str, save_in: str) -> list[RankJob]:
    cores = _cores_of(threads_each(config), num_processes(config))
    model_bytes = _whole_bytes(layers)
    counts = tuple(prepared.layers_per_stage)
    return [
        RankJob(config, prepared.schedule, counts, prepared.runs, model_bytes, rank, cores[rank], store, save_in)
        for rank in range(num_processes(config))
    ]


def _cores_of(threads: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Give every rank `threads` cores of its own when there are enough, else leave all to the scheduler."""
    cores = machine.usable_cores()
    if not machine.CAN_PIN or num_ranks * threads > len(cores):
        return [()] * num_ranks
    return [tuple(cores[rank * threads : (rank + 1) * threads]) for rank in range(num_ranks)]


def _judge(config: RunConfig, repeats: Sequence[Repeat]) -> tuple[str, str]:
    """Return status and message: a point whose gradients are wrong is not a result."""
    if config.gate == "off":
        return "unchecked", ""
    error, limit = largest_gradient_error(repeats), GRADIENT_LIMITS[config.precision]
    if error is None or not error <= limit:
        return "wrong", f"gradient error {error}: expected at most {limit} in {config.precision}"
    return "ok", ""


def _write_point(folder: Path, result: RunResult) -> None:
    place = _own_point_folder(folder, result.key)
    write_result(place / RESULT_FILE, result)
    trace = median_step(result)
    if trace is not None:
        write_json(place / TRACE_FILE, chrome_trace(trace))


def _write_state(folder: Path, plan: Plan, standing: Standing, *, finished: bool) -> None:
    state = {
        "format": FORMAT,
        "name": plan.name,
        "swept": list(plan.swept),
        "finished": finished,
        "points": [_state_of(key, plan.points[key], standing) for key in plan.points],
        "references": [_state_of(key, plan.references[key], standing) for key in plan.references],
        "reference_of": plan.reference_of,
        "noise_floor": plan.again,
    }
    write_json(folder / SWEEP_FILE, state)


def _state_of(key: str, config: RunConfig, standing: Standing) -> dict[str, Any]:
    result = standing.results.get(key)
    return {
        "key": key,
        "state": result.status if result else "pending",
        "repeats_done": len(result.repeats) if result else 0,
        "told": key in standing.told,
        "config": dataclasses.asdict(config),
    }
