"""The project's own speed targets, and how each is measured: all sides of a comparison in one interleaved run."""

import dataclasses
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipebench.compose import compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.costs import load_profile, stage_costs
from pipebench.display import make_display
from pipebench.harness.jobs import MEASURE_SPAN_COST
from pipebench.harness.launch import Progress
from pipebench.harness.prepare import prepare
from pipebench.harness.sweep import Known, Observer, plan_sweep, profile_of_point, run_ranks, run_sweep
from pipebench.machine import this_machine
from pipebench.metrics import bubble_fraction, paired_ratio
from pipebench.peers.abilities import why_not
from pipebench.record import RunResult, step_groups, write_json
from pipebench.rows import COMPARABLE, harness_s, row_of, stage_rows
from pipebench.schedule.action import Op
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import ZB_AUTO, build
from pipebench.schedule.simulate import simulate
from pipebench.tracking import make_trackers

WHOLE_BLOCKS = {1: "partition=[9,9]", 2: "partition=[5,4,4,5]"}
"""The default transformer on two ranks cut by whole blocks, what other engines are usually given, by stages a rank."""

SMALL_MLP = ("model=mlp", "model.width=64", "model.layers=16", "batch=128", "micro=32", "partition=uniform", "steps=20")


@dataclass(frozen=True, slots=True)
class Finding:
    """One target with what was measured; `interval` is 95 % where the figure is a ratio of medians.

    `detail` is what may be another one next time: which schedule was best, or why there is no number.
    """

    target: str
    limit: float
    measured: float
    interval: tuple[float, float] | None
    detail: str = ""

    @property
    def met(self) -> bool:
        """Tell whether it was; a ratio that is to be below 1 must also be told apart from 1."""
        told_apart = self.interval is None or self.limit >= 1 or self.interval[1] < 1
        return self.measured <= self.limit and told_apart


def _simulator(folder: Path, repeats: int) -> list[Finding]:
    """Build and play 1F1B on 1024 ranks with 4096 micro-batches, 8.4 million actions, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, gibibytes = pool.apply(_play_at_size)
    where = "simulator, 1F1B K=1024 M=4096, building included"
    return [Finding(f"{where}: seconds", 10.0, seconds, None), Finding(f"{where}: peak GiB", 2.0, gibibytes, None)]


def _play_at_size() -> tuple[float, float]:
    num_ranks, num_micro_batches = 1024, 4096
    began = time.perf_counter()
    schedule = build("1f1b", num_ranks, num_micro_batches)
    costs = {(stage, op): cost for stage in range(num_ranks) for op, cost in ((Op.FORWARD, 1.0), (Op.BACKWARD, 2.0))}
    trace = simulate(schedule, costs)
    seconds = time.perf_counter() - began
    assert trace.makespan_s == 3 * (num_micro_batches + num_ranks - 1)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _schedules(folder: Path, repeats: int) -> list[Finding]:
    """Every schedule on the default transformer at K=2, M=8, interleaved with GPipe."""
    names = [*SCHEDULES, ZB_AUTO]
    points = [point_of("stages=2", "micro=8", f"schedule={name}", f"repeats={repeats}") for name in names]
    results = _measure(folder / "schedules", points, ("schedule",))
    gpipe = results[names.index("gpipe")]
    findings = [
        dataclasses.replace(_ratio("K=2 M=8, best schedule: step time / gpipe", 0.95, result, gpipe), detail=name)
        for name, result in zip(names, results, strict=True)
        if result is not gpipe
    ]
    return [min(findings, key=lambda finding: finding.measured)]


def _sleeping_schedules(folder: Path, repeats: int) -> list[Finding]:
    """Stages of 10 ms each for F, I and W: what was measured beside what the simulator says of the same rows."""
    names = [*SCHEDULES, ZB_AUTO]
    chunks = {name: recipe.usual_chunks for name, recipe in SCHEDULES.items()} | {ZB_AUTO: 2}
    times = ["model=synthetic", "stages=4", "micro=16", "batch=16", "model.forward_s=0.010", "model.backward_s=0.020"]
    points = [point_of(*times, f"schedule={name}", f"model.layers={4 * chunks[name]}") for name in names]
    results = _measure(folder / "sleeping", points, ("schedule",))
    findings = []
    for name, result in zip(names, results, strict=True):
        simulated = simulate(result.schedule, stage_costs(load_profile(result.config), result.layers_per_stage))
        off = abs(row_of(result, None)["bubble_fraction"] - bubble_fraction(simulated))
        findings.append(Finding(f"sleeping stages K=4 M=16, {name}: bubble off the simulated by", 0.03, off, None))
    return findings


def _against_torch(folder: Path, repeats: int) -> list[Finding]:
    """The default transformer at K=2, whole blocks: each schedule of torch's against ours, and the best of both."""
    findings, points = [], []
    for micro, schedules in ((8, ("gpipe", "1f1b", "interleaved", "zb_h2", "zb_v")), (32, ("gpipe", "1f1b"))):
        common = ["stages=2", f"micro={micro}", f"repeats={repeats}"]
        for name in schedules:
            cut = WHOLE_BLOCKS[SCHEDULES[name].usual_chunks]
            both = [point_of(cut, f"schedule={name}", f"engine={engine}", *common) for engine in ("torch", "pipebench")]
            points += [point for point in both if not why_not(point, this_machine())]
        points.append(point_of("partition=time", *common))
    results = _measure(folder / "against_torch", points, ("micro", "engine", "schedule", "partition"))
    for micro in (8, 32):
        of_micro = [result for result in results if result.config.micro == micro]
        findings += _same_schedules(f"K=2 M={micro}", 0.95, of_micro)
        [by_time] = [result for result in of_micro if result.config.partition == "time"]
        [torch, blocks] = [result for result in of_micro if _is_gpipe_of_blocks(result)]
        findings.append(_ratio(f"K=2 M={micro}: partition=time / torch ScheduleGPipe", 0.93, by_time, torch))
        for cut, result in (("whole blocks", blocks), ("partition=time", by_time)):
            findings.append(_replayed(f"K=2 M={micro}", cut, result))
        if micro == 8:
            findings.append(_best_against_torch(f"K=2 M={micro}", 0.88, of_micro))
    return findings


def _is_gpipe_of_blocks(result: RunResult) -> bool:
    return result.config.schedule == "gpipe" and result.config.partition != "time"


def _same_schedules(where: str, limit: float, results: Sequence[RunResult]) -> list[Finding]:
    """Compare what differs in its engine alone."""
    findings = []
    for torch in (result for result in results if result.config.engine == "torch"):
        same = dataclasses.replace(torch.config, engine="pipebench")
        [own] = [result for result in results if result.config == same]
        findings.append(_ratio(f"{where}, {same.schedule}: step time / torch", limit, own, torch))
    return findings


def _best_against_torch(where: str, limit: float, results: Sequence[RunResult]) -> Finding:
    own, torch = (
        min(
            (result for result in results if result.config.engine == engine and result.status in COMPARABLE),
            key=lambda result: float(row_of(result, None)["step_s"]),
            default=None,
        )
        for engine in ("pipebench", "torch")
    )
    target = f"{where}: best schedule of ours / best of torch's"
    if own is None or torch is None:
        return Finding(target, limit, math.nan, None, "one of them has no result")
    return dataclasses.replace(
        _ratio(target, limit, own, torch), detail=f"{own.config.schedule} / {torch.config.schedule}"
    )


def _replayed(where: str, cut: str, result: RunResult) -> Finding:
    row = row_of(result, None)
    known = row["replayed_step_s"] is not None
    off = abs(row["replayed_step_s"] / row["step_s"] - 1) if known else math.nan
    return Finding(f"{where}: replayed / measured step, {cut}, off by", 0.03, off, None)


def _mlp(folder: Path, repeats: int) -> list[Finding]:
    """An MLP whose actions take less than a millisecond: overhead rules."""
    points = [
        point_of(*SMALL_MLP, f"stages={stages}", f"schedule={name}", f"engine={engine}", f"repeats={repeats}")
        for stages in (2, 4)
        for name in ("gpipe", "1f1b")
        for engine in ("torch", "pipebench")
    ]
    results = _measure(folder / "mlp", points, ("stages", "schedule", "engine"))
    findings = []
    for stages in (2, 4):
        of_size = [result for result in results if result.config.stages == stages]
        findings += _same_schedules(f"small MLP K={stages} M=32", 0.5, of_size)
    return findings


def _synthetic(folder: Path, repeats: int) -> list[Finding]:
    """Sleeping stages, whose bubble has nothing but the engine's own overhead above the bound."""
    times = {"4/8 ms": (0.01, "model.forward_s=0.004", "model.backward_s=0.008"),
             "1/2 ms": (0.04, "model.forward_s=0.001", "model.backward_s=0.002")}  # fmt: skip
    points = [point_of("model=synthetic", "stages=8", "micro=32", *model) for _, *model in times.values()]
    results = _measure(folder / "synthetic", points, ("model.forward_s", "model.backward_s"))
    rows = [row_of(result, None) for result in results]
    return [
        Finding(
            f"synthetic K=8 M=32, {name}: bubble_fraction - bound",
            limit,
            math.nan if row["bubble_fraction"] is None else row["bubble_fraction"] - row["bubble_bound"],
            None,
        )
        for (name, (limit, *_)), row in zip(times.items(), rows, strict=True)
    ]


def two_points(*overrides: str) -> dict[str, RunConfig]:
    """Return one point where computing rules and one where overhead does, by name."""
    return {
        "default transformer K=2 M=8": point_of(WHOLE_BLOCKS[1], "stages=2", "micro=8", *overrides),
        "small MLP K=2 M=32": point_of(*SMALL_MLP, "stages=2", *overrides),
    }


def _spans(folder: Path, repeats: int) -> list[Finding]:
    """Steps with spans recorded over steps without, taking turns in one group of processes."""
    findings, samples = [], {}
    for name, config in two_points(f"steps={20 * repeats}", "warmup=20").items():
        ranks = run_alone(MEASURE_SPAN_COST, config)
        with_spans, without = ([max(times) for times in zip(*each, strict=True)] for each in zip(*ranks, strict=True))
        samples[name] = {"with_s": with_spans, "without_s": without}
        ratio, low, high = paired_ratio([[time] for time in with_spans], [[time] for time in without])
        findings.append(Finding(f"{name}: step with spans / without", 1.005, ratio, (low, high)))
    write_json(folder / "spans.json", samples)
    return findings


def run_alone(work: str, config: RunConfig) -> list[Any]:
    """Run `work(job, report)` once for each rank of a point outside of any sweep; return what the ranks deliver."""
    profile = profile_of_point(config, Known({}, {}, {}), _unseen)
    return run_ranks(work, config, prepare(config, profile), profile.layers, _unseen)


def _unseen(progress: Progress) -> None:
    """Nobody watches."""


def _harness(folder: Path, repeats: int) -> list[Finding]:
    """Time everything around the measuring of K=8 points, W&B offline included; the first starts W&B's service too."""
    common = ["stages=8", "steps=3", "warmup=3", "noise_floor=false"]
    points = [point_of(f"micro={micro}", *common) for micro in (4, 8, 16, 32)]
    began: list[float] = []
    results = _measure(folder / "harness", points, ("micro",), lambda: began.append(time.perf_counter()))
    measuring = [result.repeats[0].wall_s - harness_s(result.repeats[0]) for result in results]
    walls = [end - start for start, end in zip(began, [*began[1:], time.perf_counter()], strict=True)]
    overheads = [wall - measured for wall, measured in zip(walls, measuring, strict=True)]
    return [Finding("harness seconds per point at K=8, W&B offline", 1.5, statistics.mean(overheads), None)]


PARTS: dict[str, Callable[[Path, int], list[Finding]]] = {
    "simulator": _simulator,
    "schedules": _schedules,
    "sleeping": _sleeping_schedules,
    "torch": _against_torch,
    "mlp": _mlp,
    "synthetic": _synthetic,
    "spans": _spans,
    "harness": _harness,
}
"""What can be measured, by name: a folder for raw files and the number of repeats to findings."""


def point_of(*overrides: str) -> RunConfig:
    grid = compose_grid(overrides)
    assert grid is not None
    return resolve(grid.points[0], this_machine())


def _measure(
    folder: Path, points: Sequence[RunConfig], swept: Sequence[str], on_start: Callable[[], None] = lambda: None
) -> list[RunResult]:
    """Run the points as any sweep would, W&B included, and return their results in order."""
    plan = plan_sweep(points, swept, folder.name)
    plan = dataclasses.replace(plan, references={}, reference_of={})  # no target asks for them
    display = make_display(plan)
    trackers = make_trackers(points[0], folder, plan.name, display.note)

    def point_started(config: RunConfig, round_number: int) -> None:
        on_start()
        display.point_started(config, round_number)

    def point_done(result: RunResult) -> None:
        trackers.log_point(result, row_of(result, None, swept), stage_rows(result) if result.repeats else [])
        display.point_done(result)

    folder.mkdir()
    observer = Observer(point_started, display.progress, point_done, display.again_started, display.again_done)
    with display.shown():
        results = run_sweep(plan, folder, observer)
    trackers.finish()
    return [results[key] for key in plan.points]


def _ratio(target: str, limit: float, result: RunResult, baseline: RunResult) -> Finding:
    if bad := [each for each in (result, baseline) if each.status not in COMPARABLE]:
        return Finding(target, limit, math.nan, None, f"{bad[0].config.engine} {bad[0].status}: {bad[0].message}")
    ratio, low, high = paired_ratio(step_groups(result), step_groups(baseline))
    return Finding(target, limit, ratio, (low, high))
