"""Where a sweep goes on: which folder of the same grid, and which of its points need not be measured again.

The files decide, not a log: a point is finished when its own result says so, whatever moment the last run was killed
at. What cannot be relied on any more, links among it, is set aside beside the new result, never deleted. A lock on a
file in the folder, which the kernel takes back when its holder dies, keeps two processes out of one sweep.
"""

import contextlib
import fcntl
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os.path import lexists
from pathlib import Path
from typing import Any, TextIO

from pipebench import machine
from pipebench.config import RunConfig, key_of, value_at
from pipebench.errors import ConfigError, ResultError
from pipebench.files import open_lock, own, remove_half_written, set_aside
from pipebench.harness.sweep import (
    AGAIN_FILE,
    RESULT_FILE,
    SWEEP_FILE,
    TRACE_FILE,
    Plan,
    Standing,
    ends_the_sweep,
    make_folder,
    point_folder,
    rounds_done,
)
from pipebench.record import RunResult, one_line_errors, read_json, read_result
from pipebench.rows import COMPARABLE, FAILED, MEASURED, row_of, stage_rows

LOCK_FILE = ".lock"

_FOLDERS = ("runs", "tables", "wandb", "tensorboard")
"""What a sweep and its views make in the folder."""

_BEGUN = re.compile(r"\d{8}-\d{6}-")
"""When a sweep began, as `make_folder` writes it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A folder that is this process's alone until `lock` is closed, how far its sweep is, and what to say of that.

    The first of the notes of a sweep that `goes_on` says how far it is.
    """

    folder: Path
    lock: TextIO
    standing: Standing
    notes: list[str]
    goes_on: bool


def take_folder(plan: Plan, config: RunConfig) -> Work:
    """Return the folder to work in: a new one, or as `resume` and `retry` say one that holds a part of this sweep.

    Raise ConfigError, one line, where there is none.
    """
    results_dir = Path(config.results_dir)
    if config.resume == "never":
        return _new(plan, results_dir, [])
    if config.resume != "auto":
        return _named(plan, Path(config.resume), config.retry)
    found, passed_over = _newest(plan, results_dir, config.retry)
    if found is None and config.retry is not None:
        expected = f"retry={config.retry}: expected an earlier sweep of this grid in results_dir={config.results_dir}"
        raise ConfigError("; ".join([expected, *passed_over]))
    if found is None:
        return _new(plan, results_dir, passed_over)
    folder, lock = found
    try:
        state = _read_state(folder)
        if config.retry is None and _is_finished(state):
            lock.close()
            return _new(plan, results_dir, passed_over)
        standing, notes = _take_stock(plan, folder, state, config.retry)
        headline = f"{_headline(plan, folder, standing)}; resume=never starts anew"
        return Work(folder, lock, standing, [headline, *passed_over, *notes], goes_on=True)
    except BaseException:
        lock.close()
        raise


def is_same_grid(state: Mapping[str, Any], plan: Plan) -> bool:
    """Tell whether a sweep.json is of the same points, references and swept keys, in this order."""
    with contextlib.suppress(LookupError, TypeError):
        return (
            [point["key"] for point in state["points"]] == list(plan.points)
            and [reference["key"] for reference in state["references"]] == list(plan.references)
            and state["swept"] == list(plan.swept)
            and (state["name"], state["noise_floor"]) == (plan.name, plan.again)
        )
    return False


def why_again(result: RunResult, environment: Mapping[str, Any], retry: str | None) -> str:
    """Return why a point with this result has to be measured again, or nothing where it has not.

    Raise KeyError or TypeError for an environment of somebody else's.
    """
    old = result.environment
    if old.get("code") != environment["code"]:
        return f"measured by other code (git {old.get('git') or 'unknown'}, now {environment['git'] or 'unknown'})"
    if old["torch"] != environment["torch"]:
        return f"measured with torch {old['torch']}, now {environment['torch']}"
    if machine.machine_class(old) != machine.machine_class(environment):
        return f"measured on {machine.machine_class(old)}"
    retried = {
        None: result.status == "interrupted",
        "failed": result.status not in COMPARABLE,
        "oom": result.status in ("oom", "interrupted"),
        "all": True,
    }
    if not retried[retry]:
        return ""
    return result.status if result.status == "interrupted" else f"{result.status}, retry={retry}"


def _new(plan: Plan, results_dir: Path, notes: list[str]) -> Work:
    try:
        folder = make_folder(results_dir, plan.name)
        lock = _lock(folder)
    except OSError as error:
        raise ConfigError(f"results_dir={results_dir}: expected a folder that can be written: {error}") from error
    assert lock is not None, "somebody else's lock on a folder that was just made"
    return Work(folder, lock, Standing(), notes, goes_on=False)


def _named(plan: Plan, folder: Path, retry: str | None) -> Work:
    """Take the folder that the user named, finished or not."""
    try:
        state, damage = _state_or_damage(plan, folder)
        lock = _lock(folder)
        kept = [f"set aside: {damage}{_kept(folder / SWEEP_FILE)}"] if damage and lock is not None else []
    except ResultError as error:
        raise ConfigError(f"resume={folder}: expected the folder of a sweep: {error}") from error
    except OSError as error:
        raise ConfigError(f"resume={folder}: expected a folder that can be written: {error}") from error
    if lock is None:
        raise ConfigError(f"resume={folder}: expected a sweep that no other process runs at the moment")
    try:
        standing, notes = _take_stock(plan, folder, state, retry)
        return Work(folder, lock, standing, [_headline(plan, folder, standing), *kept, *notes], goes_on=True)
    except BaseException:
        lock.close()
        raise


def _state_or_damage(plan: Plan, folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return what sweep.json says, or None and what is wrong with it where results of this grid can stand in for it.

    Raise ConfigError for another grid's, ResultError where there is nothing to go on with.
    """
    try:
        state = _read_state(folder)
    except ResultError as error:
        if not _has_results(plan, folder):
            raise
        return None, _shortened(error, folder)
    if not is_same_grid(state, plan):
        raise ConfigError(f"resume={folder}: expected a sweep of this very grid: it has other points or swept keys")
    return state, ""


def _newest(plan: Plan, results_dir: Path, retry: str | None) -> tuple[tuple[Path, TextIO] | None, list[str]]:
    """Return the newest sweep of this grid that can be gone on with, locked, and a line for each newer one that cannot.

    Names begin with the time; of those in one second the longer has the higher number. A folder that somebody has
    given another name is kept, not worked on. Nothing is said of finished ones, unless something in them is to be run.
    """
    passed_over = []
    paths = [path for path in results_dir.glob("*") if _BEGUN.match(path.name) and lexists(path / SWEEP_FILE)]
    for folder in sorted(paths, key=lambda path: (path.name[:15], len(path.name), path.name), reverse=True):
        wanted = _has_results(plan, folder)
        try:
            state = _read_state(folder)
            if not is_same_grid(state, plan):
                continue
            wanted = retry is not None or not _is_finished(state)
            lock = _lock(folder)
        except (ResultError, OSError) as error:
            if wanted:
                passed_over.append(f"passed over: {error}; resume={folder} takes it, or says what it lacks")
            continue
        if lock is not None:
            return (folder, lock), passed_over
        if wanted:
            passed_over.append(f"passed over: {folder}: another process runs it; resume={folder} takes it after that")
    return None, passed_over


def _read_state(folder: Path) -> dict[str, Any]:
    return read_json(own(folder, folder / SWEEP_FILE))


def _has_results(plan: Plan, folder: Path) -> bool:
    """Tell whether a folder without a readable sweep.json holds something of this grid."""
    return any(lexists(point_folder(folder, key) / RESULT_FILE) for key in plan.points)


def _lock(folder: Path) -> TextIO | None:
    """Return the open lock file of a folder, None when another process holds it.

    Raise OSError for a read-only folder, ResultError for a link in its place: to rename that could free a lock.
    """
    file = open_lock(own(folder, folder / LOCK_FILE))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks: better without than not at all
        return file
    return file


def is_unfinished(folder: Path) -> bool:
    """Tell whether the same command would go on in this folder: it holds a sweep, and that is not over."""
    return (folder / SWEEP_FILE).exists() and not _is_finished(_read_state(folder))


def _is_finished(state: Mapping[str, Any]) -> bool:
    """Sweeps older than the word are left alone."""
    return bool(state.get("finished", True))


def _take_stock(
    plan: Plan, folder: Path, state: Mapping[str, Any] | None, retry: str | None
) -> tuple[Standing, list[str]]:
    """Read what the folder holds, set aside what is to be measured again, and return what to say of that."""
    try:
        aside = _clear_the_way(plan, folder)
        for each in (folder, folder / "tables", *(point_folder(folder, key) for key in plan.all)):
            remove_half_written(each)
        standing, again = _read_standing(plan, folder, state, retry)
    except (OSError, ResultError) as error:
        raise ConfigError(f"resume={folder}: expected a sweep that can be read and written: {error}") from error
    return standing, [*aside, *again, *_past_failures(plan, standing)]


def _headline(plan: Plan, folder: Path, standing: Standing) -> str:
    done = sum(rounds_done(standing.results.get(key)) >= config.repeats for key, config in plan.points.items())
    return f"resuming: {done} of {len(plan.points)} done in {folder}"


def _clear_the_way(plan: Plan, folder: Path) -> list[str]:
    """Rename what stands where the sweep's own folders do, so that nothing is read or written through a link."""
    notes = []
    for path in _folders_written_into(plan, folder):
        try:
            own(folder, path)
        except ResultError as error:
            notes.append(f"set aside: {_shortened(error, folder)}; kept as {set_aside(path, 'link')}")
            continue
        if path.exists() and not path.is_dir():
            where = path.relative_to(folder)
            notes.append(f"set aside: {where}: expected a folder; kept as {set_aside(path, 'damaged')}")
    return notes


def _folders_written_into(plan: Plan, folder: Path) -> Iterator[Path]:
    """Yield the outer ones first: what lies in one that is a link is not to be looked at."""
    yield from (folder / name for name in _FOLDERS)
    yield from (point_folder(folder, key) for key in plan.all)
    yield from (folder / "tensorboard").glob("*")  # W&B never writes into a run that is there


def _past_failures(plan: Plan, standing: Standing) -> list[str]:
    """Say what becomes of failures that a sweep was to stop at, and did."""
    stopping = [r for key, r in standing.results.items() if key in plan.points and ends_the_sweep(r)]
    return [
        f"gone past (on_failure=stop): {_name(result.config, plan)}: {result.status}; retry=failed measures it again"
        for result in stopping
    ]


def _read_standing(
    plan: Plan, folder: Path, state: Mapping[str, Any] | None, retry: str | None
) -> tuple[Standing, list[str]]:
    """Return what may stay as it is, and a line for each point that has a result and is measured again."""
    told = _told(state, folder) if state is not None else set()
    environment, standing, notes = machine.describe(), Standing(), []
    for key, config in plan.all.items():
        result, why = _read_usable(folder, RESULT_FILE, key, config, environment, retry)
        if why:
            notes.append(f"measured again: {_name(config, plan)}: {why}")
        if result is not None:
            standing.results[key] = result
            if key in told and rounds_done(result) >= config.repeats:
                standing.told.add(key)
    if plan.again in standing.results:
        config = plan.points[plan.again]
        standing.again, why = _read_usable(folder, AGAIN_FILE, plan.again, config, environment, retry)
        if why:
            notes.append(f"measured again: {_name(config, plan)}, for the noise floor: {why}")
    elif plan.again is not None and lexists(path := point_folder(folder, plan.again) / AGAIN_FILE):
        set_aside(path, "old")  # the second look goes with the first
    return standing, notes


def _told(state: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the points that observers have heard of."""
    with one_line_errors(folder / SWEEP_FILE):
        return {each["key"] for each in (*state["points"], *state["references"]) if each.get("told")}


def _read_usable(
    folder: Path, name: str, key: str, config: RunConfig, environment: Mapping[str, Any], retry: str | None
) -> tuple[RunResult | None, str]:
    """Return the point's result with today's configuration, or None and why it is measured again, set aside then."""
    path = point_folder(folder, key) / name
    if not lexists(path):
        return None, ""
    try:
        with one_line_errors(path.relative_to(folder)):
            result = _checked(read_result(own(folder, path)), key)
            why = why_again(result, environment, retry)
    except ResultError as error:
        what = "link" if path.is_symlink() else "damaged"
        return None, f"{_shortened(error, folder)}; kept as {_set_result_aside(path, what)}"
    if not why:
        return replace(result, config=config), ""
    if result.status == "interrupted":  # nothing to keep
        path.unlink()
        return None, why
    return None, f"{why}; kept as {_set_result_aside(path, 'old')}"


def _checked(result: RunResult, key: str) -> RunResult:
    """Return the result; raise ValueError and the like when it is another point's or makes no sense."""
    if result.key != key or key_of(result.config) != key:
        raise ValueError(f"is the result of {result.key!r}, not of {key}")
    if result.status not in (*MEASURED, *FAILED):
        raise ValueError(f"status {result.status!r}: expected one of {', '.join((*MEASURED, *FAILED))}")
    row_of(result, None)
    if result.status in MEASURED:
        stage_rows(result)
    return result


def _set_result_aside(path: Path, what: str) -> str:
    """Rename the file, its trace gone with it; return the new name."""
    aside = set_aside(path, what)
    if path.name == RESULT_FILE:
        path.with_name(TRACE_FILE).unlink(missing_ok=True)
    return aside


def _kept(path: Path) -> str:
    """Set aside what is there, and say so."""
    return f"; kept as {set_aside(path, 'damaged')}" if lexists(path) else ""


def _shortened(error: ResultError, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "", 1)


def _name(config: RunConfig, plan: Plan) -> str:
    names = dict.fromkeys(("stages", "micro", *plan.swept))
    return " ".join(f"{name}={value_at(config, name)}" for name in names)
