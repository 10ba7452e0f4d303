"""`make perf`: the project's own speed targets, all sides of a comparison in one interleaved run.

It prints what was measured beside each target and writes the same to a file; it never fails a build, since
a shared machine's times are evidence, not a verdict.
"""

import argparse
import dataclasses
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from pipebench.compose import compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.costs import load_profile, stage_costs
from pipebench.display import make_display
from pipebench.harness.sweep import Observer, make_folder, plan_sweep, run_sweep
from pipebench.machine import this_machine
from pipebench.metrics import bubble_fraction, paired_ratio
from pipebench.record import RunResult, step_groups, write_json
from pipebench.rows import harness_s, row_of, stage_rows
from pipebench.schedule.action import Op
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import ZB_AUTO, build
from pipebench.schedule.simulate import simulate
from pipebench.tracking import make_trackers

BLOCKS = "partition=[9,9]"
"""The default transformer cut by whole blocks: what torch.distributed.pipelining is usually given."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One target with what was measured; `interval` is 95 % where the figure is a ratio of medians."""

    target: str
    limit: float
    measured: float
    interval: tuple[float, float] | None

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipebench.perf", description="Measure the speed targets.")
    parser.add_argument("--repeats", type=int, default=5, help="fresh process groups per point (default 5)")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where to keep the raw files")
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    folder = make_folder(options.results_dir, "perf")
    findings = [finding for name in options.parts or PARTS for finding in PARTS[name](folder, options.repeats)]
    text = _table(findings)
    print(text)
    (folder / "perf.md").write_text(text + "\n")
    write_json(folder / "perf.json", {"findings": [dataclasses.asdict(finding) for finding in findings]})
    print(f"\nraw files  {folder}")
    return 0


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
    points = [_point("stages=2", "micro=8", f"schedule={name}", f"repeats={repeats}") for name in names]
    results = _measure(folder / "schedules", points, ("schedule",))
    gpipe = results[names.index("gpipe")]
    findings = [
        _ratio(f"K=2 M=8, {name}: step time / gpipe", 0.95, result, gpipe)
        for name, result in zip(names, results, strict=True)
        if result is not gpipe
    ]
    return [min(findings, key=lambda finding: finding.measured)]


def _sleeping_schedules(folder: Path, repeats: int) -> list[Finding]:
    """Stages of 10 ms each for F, I and W: what was measured beside what the simulator says of the same rows."""
    names = [*SCHEDULES, ZB_AUTO]
    chunks = {name: recipe.usual_chunks for name, recipe in SCHEDULES.items()} | {ZB_AUTO: 2}
    times = ["model=synthetic", "stages=4", "micro=16", "batch=16", "model.forward_s=0.010", "model.backward_s=0.020"]
    points = [_point(*times, f"schedule={name}", f"model.layers={4 * chunks[name]}") for name in names]
    results = _measure(folder / "sleeping", points, ("schedule",))
    findings = []
    for name, result in zip(names, results, strict=True):
        simulated = simulate(result.schedule, stage_costs(load_profile(result.config), result.layers_per_stage))
        off = abs(row_of(result, None)["bubble_fraction"] - bubble_fraction(simulated))
        findings.append(Finding(f"sleeping stages K=4 M=16, {name}: bubble off the simulated by", 0.03, off, None))
    return findings


def _against_torch(folder: Path, repeats: int) -> list[Finding]:
    points = []
    for micro in (8, 32):
        common = ["stages=2", f"micro={micro}", f"repeats={repeats}"]
        points += [
            _point(BLOCKS, "engine=torch", *common),
            _point(BLOCKS, "engine=pipebench", *common),
            _point("partition=time", "engine=pipebench", *common),
        ]
    results = _measure(folder / "against_torch", points, ("micro", "engine", "partition"))
    findings = []
    for torch, blocks, by_time in zip(results[::3], results[1::3], results[2::3], strict=True):
        where = f"K=2 M={torch.config.micro}"
        findings += [
            _ratio(f"{where}: step time / torch ScheduleGPipe, whole blocks", 0.97, blocks, torch),
            _ratio(f"{where}: partition=time / torch ScheduleGPipe", 0.93, by_time, torch),
        ]
        for name, result in (("whole blocks", blocks), ("partition=time", by_time)):
            row = row_of(result, None)
            off = abs(row["replayed_step_s"] / row["step_s"] - 1)
            findings.append(Finding(f"{where}: replayed / measured step, {name}, off by", 0.03, off, None))
    return findings


def _synthetic(folder: Path, repeats: int) -> list[Finding]:
    point = _point("model=synthetic", "stages=8", "micro=32")
    [result] = _measure(folder / "synthetic", [point], ())
    row = row_of(result, None)
    return [
        Finding(
            "synthetic K=8 M=32, 4/8 ms: bubble_fraction - bound",
            0.02,
            row["bubble_fraction"] - row["bubble_bound"],
            None,
        )
    ]


def _harness(folder: Path, repeats: int) -> list[Finding]:
    """Time everything around the measuring of K=8 points, W&B offline included; the first starts W&B's service too."""
    points = [_point("stages=8", f"micro={micro}", "steps=3", "warmup=3") for micro in (4, 8, 16, 32)]
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
    "synthetic": _synthetic,
    "harness": _harness,
}
"""What can be measured, by name: a folder for raw files and the number of repeats to findings."""


def _point(*overrides: str) -> RunConfig:
    grid = compose_grid(overrides)
    assert grid is not None
    return resolve(grid.points[0], this_machine())


def _measure(
    folder: Path, points: Sequence[RunConfig], swept: Sequence[str], on_start: Callable[[], None] = lambda: None
) -> list[RunResult]:
    """Run the points as any sweep would, W&B included, and return their results in order."""
    plan = plan_sweep(points, swept, folder.name)
    plan = dataclasses.replace(plan, references={}, reference_of={}, again=None)  # only what the targets ask for
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
    ratio, low, high = paired_ratio(step_groups(result), step_groups(baseline))
    return Finding(target, limit, ratio, (low, high))


def _table(findings: Sequence[Finding]) -> str:
    rows = [
        (
            finding.target,
            f"{finding.measured:.3f}",
            f"{finding.interval[0]:.3f} to {finding.interval[1]:.3f}" if finding.interval else "",
            f"at most {finding.limit}",
            "met" if finding.met else "missed",
        )
        for finding in findings
    ]
    return tabulate(rows, headers=("target", "measured", "95 % interval", "wanted", ""), tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
