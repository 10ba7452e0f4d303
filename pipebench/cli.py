"""The command line: compose and check the whole grid, run it, and leave table, files and W&B runs.

Exit code 0 when every point is fine, 1 when one failed or was wrong, 2 for a configuration that cannot run (then
nothing has been written), 130 after Ctrl-C.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.compose import Grid, compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.display import make_display
from pipebench.dry_run import preview
from pipebench.errors import ConfigError, ScheduleError, one_line
from pipebench.harness.sweep import Observer, Plan, make_folder, plan_sweep, run_sweep, warnings_before
from pipebench.machine import this_machine
from pipebench.record import RunResult
from pipebench.rows import COMPARABLE, MEASURED, row_of, stage_rows
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import is_file, takes_chunks
from pipebench.tracking import Trackers, check_installed, make_trackers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _interrupt(signal_number: int, frame: object) -> None:
    """End as on Ctrl-C: workers gone, temporary files removed, a report of what there is."""
    raise KeyboardInterrupt


def _main(arguments: list[str]) -> int:
    try:
        grid = compose_grid(arguments)
        if grid is None:
            return 0
        machine = this_machine()
        points = [resolve(point, machine) for point in defined_points(grid)]
        check_installed(grid.points[0])
        plan = plan_sweep(points, grid.swept, grid.experiment or "sweep")
        if grid.points[0].dry_run:
            preview(plan, grid.points[0].profile)
            return 0
        folder = _make_folder(grid)
    except ConfigError as error:
        print(f"ConfigError: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ScheduleError as error:
        print(f"ScheduleError: {one_line(str(error))}", *filter(None, [error.grid]), sep="\n", file=sys.stderr)
        return 2
    return _run(plan, folder, grid.points[0])


def defined_points(grid: Grid) -> Sequence[RunConfig]:
    """Return the points, without those whose schedule has no such number of stages a rank where that is swept."""
    if not {"schedule", "chunks"} <= set(grid.swept):
        return grid.points
    some_auto = any(point.chunks == "auto" for point in grid.points)

    def is_defined(point: RunConfig) -> bool:
        if type(point.chunks) is not int:
            return True
        if point.schedule in SCHEDULES:
            return takes_chunks(point.schedule, point.chunks)
        return not is_file(point.schedule) and not some_auto  # a search that chooses has no need of fewer choices

    undefined = [point for point in grid.points if not is_defined(point)]
    if undefined:
        what = ", ".join(dict.fromkeys(f"{point.schedule} with chunks={point.chunks}" for point in undefined))
        print(f"left out, since not defined: {what}")
    return [point for point in grid.points if point not in undefined]


def _make_folder(grid: Grid) -> Path:
    results_dir = grid.points[0].results_dir
    try:
        return make_folder(Path(results_dir), grid.experiment or "sweep")
    except OSError as error:
        raise ConfigError(f"results_dir={results_dir}: expected a folder that can be written: {error}") from error


def _run(plan: Plan, folder: Path, first: RunConfig) -> int:
    display = make_display(plan)
    trackers = make_trackers(first, folder, plan.name, display.note)
    finished: dict[str, RunResult] = {}
    interrupted = False

    def point_done(result: RunResult) -> None:
        finished[result.key] = result
        _track(trackers, result, finished.get(plan.reference_of.get(result.key, "")), plan.swept)
        display.point_done(result)

    twice = ", one of the points twice for the noise floor" if plan.again else ""
    print(f"{len(plan.points)} points and {len(plan.references)} references into {folder}{twice}", flush=True)
    for warning in warnings_before(plan):
        display.note(f"warning: {warning}")
    observer = Observer(display.point_started, display.progress, point_done, display.again_started, display.again_done)
    try:
        try:
            with display.shown():
                run_sweep(plan, folder, observer)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: what was measured so far follows", file=sys.stderr)
        _conclude(folder, trackers)
    finally:
        trackers.finish()
    for label, line in trackers.where():
        print(f"{label:<11}", line)
    if interrupted:
        return 130
    return 0 if all(finished[key].status in COMPARABLE for key in plan.points) else 1


def _track(trackers: Trackers, result: RunResult, reference: RunResult | None, swept: Sequence[str]) -> None:
    stages = stage_rows(result) if result.status in MEASURED else []
    trackers.log_point(result, row_of(result, reference, swept), stages)


def _conclude(folder: Path, trackers: Trackers) -> None:
    """Write the report, say where it is, and hand it on; imported late, since pandas and seaborn take a second."""
    from pipebench.report.sweep import read_sweep
    from pipebench.report.terminal import print_glance, print_table
    from pipebench.report.write import write_report

    sweep = read_sweep(folder)
    written = write_report(sweep)
    print()
    print_table(sweep.rows)
    print()
    print_glance(sweep.rows)
    print()
    print("report     ", folder / "report.html", "for a browser; report.md, results.csv and pictures beside it")
    print("points     ", folder / "runs", "has a result.json and a trace.json (for ui.perfetto.dev) each")
    print("again       python -m pipebench.report", shlex.quote(str(folder)), flush=True)
    trackers.log_sweep(sweep.rows, [path for path in written if path.suffix == ".png"])
