"""The command line: compose and check the whole grid, run it, and leave table, files and W&B runs.

Exit code 0 when every point is fine, 1 when one failed, was wrong or could not be written or read, 2 for a
configuration that cannot run (then nothing has been written), 130 after Ctrl-C: the first ends cleanly, with a report;
a second leaves at once.
"""

import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipebench.compose import Grid, compose_grid
from pipebench.config import RunConfig, resolve
from pipebench.display import Display, make_display
from pipebench.dry_run import preview
from pipebench.errors import ConfigError, ResultError, ScheduleError, one_line
from pipebench.harness.admit import admitted, is_to_vet
from pipebench.harness.resume import LOCK_FILE, Work, is_unfinished, take_folder
from pipebench.harness.sweep import (
    SWEEP_FILE,
    Observer,
    Plan,
    conclude_sweep,
    plan_sweep,
    rounds_done,
    run_sweep,
    warnings_before,
)
from pipebench.interrupts import SIGNALS, held_back, interrupt
from pipebench.machine import this_machine
from pipebench.record import RunResult
from pipebench.rows import COMPARABLE, MEASURED, row_of, stage_rows
from pipebench.schedule.builders import SCHEDULES
from pipebench.schedule.catalogue import is_file, takes_chunks
from pipebench.target import look_beside
from pipebench.temporary import private_temporary_folder, remove_own
from pipebench.tracking import Trackers, check_installed, make_trackers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end the sweep cleanly and the next one leave at once."""
    usual = {number: signal.getsignal(number) for number in SIGNALS}

    def end(signal_number: int, frame: object) -> None:
        """Raise, so that workers go, temporary files are removed, and a report of what there is follows."""
        for number in usual:
            signal.signal(number, _leave_at_once)
        interrupt()

    for number in usual:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _leave_at_once(signal_number: int, frame: object) -> None:
    """Leave without a word to anybody: results are whole at any moment."""
    for worker in multiprocessing.active_children():
        worker.kill()
    remove_own()
    os._exit(130)


def _main(arguments: list[str]) -> int:
    try:
        grid = compose_grid(arguments)
        if grid is None:
            return 0
        machine = this_machine()
        points = [resolve(point, machine) for point in _admitted(grid)]
        check_installed(grid.points[0])
        plan = plan_sweep(points, grid.swept, grid.experiment or "sweep")
        # Not earlier: there is nothing to clean up yet, and OmegaConf makes an interrupt an error of its own.
        with _interruptible(), private_temporary_folder():
            if grid.points[0].dry_run:
                preview(plan, grid.points[0].profile)
                return 0
            return _take_and_run(plan, grid.points[0])
    except ConfigError as error:
        print(f"ConfigError: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ScheduleError as error:
        print(f"ScheduleError: {one_line(str(error))}", *filter(None, [error.grid]), sep="\n", file=sys.stderr)
        return 2
    except ResultError as error:
        print(f"ResultError: {error}", file=sys.stderr)
        return 1


def _admitted(grid: Grid) -> Sequence[RunConfig]:
    """Return the grid's points; those of users' own models only where these can be run, which a worker finds out."""
    points = defined_points(grid)
    if not any(map(is_to_vet, points)):
        return points
    look_beside(grid.folder)
    with _interruptible(), private_temporary_folder():
        return admitted(points)


def _take_and_run(plan: Plan, first: RunConfig) -> int:
    with held_back() as let_through:
        work = take_folder(plan, first)
        with work.lock, _gone_if_empty(work.folder):
            let_through()
            return _run(plan, work, first)


@contextlib.contextmanager
def _gone_if_empty(folder: Path) -> Iterator[None]:
    """Leave no folder behind that holds nothing but its lock."""
    try:
        yield
    finally:
        if {path.name for path in folder.iterdir()} <= {LOCK_FILE}:
            shutil.rmtree(folder, ignore_errors=True)


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


def _run(plan: Plan, work: Work, first: RunConfig) -> int:
    """Run what is not done yet, conclude, and return the exit code."""
    display = make_display(plan, work.standing)
    trackers = make_trackers(first, work.folder, plan.name, display.note)
    _announce(plan, work)
    for warning in warnings_before(plan):
        display.note(f"warning: {warning}")
    try:
        code = _run_and_conclude(plan, work, display, trackers)
    except KeyboardInterrupt:  # in the report
        code = 130
    finally:
        trackers.finish()
    for label, line in trackers.where():
        print(f"{label:<11}", line)
    if code == 130 and is_unfinished(work.folder):
        print(f"interrupted: {_how_to_go_on(plan)}", file=sys.stderr)
    return code


def _run_and_conclude(plan: Plan, work: Work, display: Display, trackers: Trackers) -> int:
    try:
        with display.shown():
            results = run_sweep(plan, work.folder, _observer(plan, work, display, trackers), work.standing)
        code = 0 if _all_fine(plan, results) else 1
        _say_if_stopped(plan, results)
    except KeyboardInterrupt:
        code = 130
        if not (work.folder / SWEEP_FILE).exists():
            print("interrupted before the first point", file=sys.stderr)
            return code
        print("interrupted: what was measured so far follows", file=sys.stderr)
    except ResultError as error:
        print(f"ResultError: {error}; once it can be, {_how_to_go_on(plan)}", file=sys.stderr)
        return 1
    try:
        all_readable = _conclude(work.folder, trackers)
        conclude_sweep(plan, work.folder, work.standing)
    except ResultError as error:
        print(f"ResultError: {error}", file=sys.stderr)
        return code or 1
    return code or (0 if all_readable else 1)


def _how_to_go_on(plan: Plan) -> str:
    """Say which command finishes this sweep; one that was told to start anew would do that again."""
    first = next(iter(plan.points.values()))
    anew = ["resume=auto"] if first.resume == "never" else []
    again = ["retry=null"] if first.retry is not None else []
    changed = f", with {' and '.join([*anew, *again])}," if anew or again else ""
    return f"the same command{changed} goes on from here"


def _all_fine(plan: Plan, results: Mapping[str, RunResult]) -> bool:
    """Tell whether every point has a result or a reason not to run, and one at least a result."""
    statuses = [results[key].status if key in results else "" for key in plan.points]
    return all(status in (*COMPARABLE, "skipped") for status in statuses) and set(statuses) != {"skipped"}


def _announce(plan: Plan, work: Work) -> None:
    if work.goes_on:
        print(*map(one_line, work.notes), sep="\n", flush=True)
        return
    twice = ", one of the points twice for the noise floor" if plan.again else ""
    counts = f"{_counted(len(plan.points), 'point')} and {_counted(len(plan.references), 'reference')}"
    print(f"{counts} into {work.folder}{twice}", *map(one_line, work.notes), sep="\n", flush=True)


def _observer(plan: Plan, work: Work, display: Display, trackers: Trackers) -> Observer:
    """Let trackers hear of a point before its line appears; its reference has its result by then."""

    def point_done(result: RunResult) -> None:
        reference = work.standing.results.get(plan.reference_of.get(result.key, ""))
        _track(trackers, result, reference, plan.swept)
        display.point_done(result)

    return Observer(display.point_started, display.progress, point_done, display.again_started, display.again_done)


def _say_if_stopped(plan: Plan, finished: Mapping[str, RunResult]) -> None:
    """Only a failure that is to stop the sweep leaves points behind."""
    num_left = sum(rounds_done(finished.get(key)) < config.repeats for key, config in plan.points.items())
    if num_left:
        left = f"{num_left} of {len(plan.points)} points were not run"
        print(f"stopped after a failure (on_failure=stop): {left}; {_how_to_go_on(plan)}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _track(trackers: Trackers, result: RunResult, reference: RunResult | None, swept: Sequence[str]) -> None:
    stages = stage_rows(result) if result.status in MEASURED else []
    trackers.log_point(result, row_of(result, reference, swept), stages)


def _conclude(folder: Path, trackers: Trackers) -> bool:
    """Write the report, say where it is, and hand it on; return whether every point's file could be read.

    Imported late, since pandas and seaborn take a second.
    """
    from pipebench.report.engines import engine_sets
    from pipebench.report.sweep import UNREADABLE, read_sweep
    from pipebench.report.terminal import print_engines, print_glance, print_table
    from pipebench.report.write import write_report

    sweep = read_sweep(folder)
    written = write_report(sweep)
    print()
    print_table(sweep.rows)
    print()
    engines = engine_sets(sweep)
    print_engines(engines)
    print_glance(sweep, engines)
    print()
    print("report     ", folder / "report.html", "for a browser; report.md, results.csv and pictures beside it")
    print("points     ", folder / "runs", "has a result.json and a trace.json (for ui.perfetto.dev) each")
    print("again       python -m pipebench.report", shlex.quote(str(folder)), flush=True)
    trackers.log_sweep(sweep.rows, [path for path in written if path.suffix == ".png"])
    return all(row["status"] != UNREADABLE for row in sweep.rows)
