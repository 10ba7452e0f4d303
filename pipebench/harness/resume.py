"""Where a sweep goes on: which folder of the same grid, and which of its points need not be measured again.

The files decide, not a log: a point is finished when its own result says so, whatever moment the last run was killed
at. What cannot be relied on any more is set aside beside the new result, never deleted. A lock on a file in the
folder, which the kernel takes back when its holder dies, keeps two processes out of one sweep.
"""

import contextlib
import fcntl
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from pipebench import machine
from pipebench.config import RunConfig, key_of, value_at
from pipebench.errors import ConfigError, ResultError
from pipebench.harness.sweep import (
    AGAIN_FILE,
    RESULT_FILE,
    SWEEP_FILE,
    TRACE_FILE,
    Plan,
    Standing,
    make_folder,
    point_folder,
    rounds_done,
)
from pipebench.record import RunResult, one_line_errors, read_json, read_result
from pipebench.rows import COMPARABLE, FAILED, MEASURED, row_of, stage_rows

LOCK_FILE = ".lock"

_BEGUN = re.compile(r"\d{8}-\d{6}-")
"""When a sweep began, as `make_folder` writes it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A folder that is this process's alone until `lock` is closed, how far its sweep is, and what to say of that."""

    folder: Path
    lock: TextIO
    standing: Standing
    notes: list[str]


def take_folder(plan: Plan, config: RunConfig) -> Work:
    """Return the folder to work in: a new one, or as `resume` and `retry` say one that holds a part of this sweep.

    Raise ConfigError, one line, where there is none.
    """
    if config.resume == "never":
        return _new(plan, Path(config.results_dir))
    if config.resume != "auto":
        return _named(plan, Path(config.resume), config.retry)
    found = _newest(plan, Path(config.results_dir))
    if found is None and config.retry is not None:
        raise ConfigError(
            f"retry={config.retry}: expected an earlier sweep of this grid in results_dir={config.results_dir}"
        )
    if found is None:
        return _new(plan, Path(config.results_dir))
    folder, lock = found
    try:
        if config.retry is None and _is_finished(read_json(folder / SWEEP_FILE)):
            lock.close()
            return _new(plan, Path(config.results_dir))
        return _resumed(plan, folder, lock, config.retry, "; resume=never starts anew")
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


def _new(plan: Plan, results_dir: Path) -> Work:
    try:
        folder = make_folder(results_dir, plan.name)
        lock = _lock(folder)
    except OSError as error:
        raise ConfigError(f"results_dir={results_dir}: expected a folder that can be written: {error}") from error
    assert lock is not None, "somebody else's lock on a folder that was just made"
    return Work(folder, lock, Standing(), [])


def _named(plan: Plan, folder: Path, retry: str | None) -> Work:
    """Take the folder that the user named, finished or not."""
    try:
        if not is_same_grid(read_json(folder / SWEEP_FILE), plan):
            raise ConfigError(f"resume={folder}: expected a sweep of this very grid: it has other points or swept keys")
        lock = _lock(folder)
    except ResultError as error:
        raise ConfigError(f"resume={folder}: expected the folder of a sweep: {error}") from error
    except OSError as error:
        raise ConfigError(f"resume={folder}: expected a folder that can be written: {error}") from error
    if lock is None:
        raise ConfigError(f"resume={folder}: expected a sweep that no other process runs at the moment")
    try:
        return _resumed(plan, folder, lock, retry, "")
    except BaseException:
        lock.close()
        raise


def _newest(plan: Plan, results_dir: Path) -> tuple[Path, TextIO] | None:
    """Return the newest sweep of this grid that no other process runs, locked; what cannot be read or written is none.

    Names begin with the time; of those in one second the longer has the higher number. A folder that somebody has
    given another name is kept, not worked on.
    """
    paths = [path.parent for path in results_dir.glob(f"*/{SWEEP_FILE}") if _BEGUN.match(path.parent.name)]
    for folder in sorted(paths, key=lambda path: (path.name[:15], len(path.name), path.name), reverse=True):
        with contextlib.suppress(ResultError, OSError):
            if is_same_grid(read_json(folder / SWEEP_FILE), plan):
                lock = _lock(folder)
                if lock is not None:
                    return folder, lock
    return None


def _lock(folder: Path) -> TextIO | None:
    """Return the open lock file of a folder, None when another process holds it. Raise OSError for a read-only one."""
    file = (folder / LOCK_FILE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks: better without than not at all
        return file
    return file


def _is_finished(state: Mapping[str, Any]) -> bool:
    """Sweeps older than the word are left alone."""
    return bool(state.get("finished", True))


def _resumed(plan: Plan, folder: Path, lock: TextIO, retry: str | None, otherwise: str) -> Work:
    """Read what the folder holds, set aside what is to be measured again, and say so."""
    try:
        _remove_half_written(folder)
        standing, notes = _read_standing(plan, folder, retry)
    except (OSError, ResultError) as error:
        raise ConfigError(f"resume={folder}: expected a sweep that can be read and written: {error}") from error
    done = sum(rounds_done(standing.results.get(key)) >= config.repeats for key, config in plan.points.items())
    headline = f"resuming: {done} of {len(plan.points)} done in {folder}{otherwise}"
    return Work(folder, lock, standing, [headline, *notes])


def _remove_half_written(folder: Path) -> None:
    """Remove what a killed process was about to put in place."""
    for pattern in (".*.*", "runs/*/.*.*", "tables/.*.*"):
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink()


def _read_standing(plan: Plan, folder: Path, retry: str | None) -> tuple[Standing, list[str]]:
    """Return what may stay as it is, and a line for each point that has a result and is measured again."""
    state = read_json(folder / SWEEP_FILE)
    with one_line_errors(folder / SWEEP_FILE):
        told = {each["key"] for each in (*state["points"], *state["references"]) if each.get("told")}
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
    elif plan.again is not None and (path := point_folder(folder, plan.again) / AGAIN_FILE).exists():
        _set_aside(path, "old")  # the second look goes with the first
    return standing, notes


def _read_usable(
    folder: Path, name: str, key: str, config: RunConfig, environment: Mapping[str, Any], retry: str | None
) -> tuple[RunResult | None, str]:
    """Return the point's result with today's configuration, or None and why it is measured again, set aside then."""
    path = point_folder(folder, key) / name
    if not path.exists():
        return None, ""
    try:
        with one_line_errors(path.relative_to(folder)):
            result = _checked(read_result(path), key)
            why = why_again(result, environment, retry)
    except ResultError as error:
        return None, f"{_shortened(error, folder)}; kept as {_set_aside(path, 'damaged')}"
    if not why:
        return replace(result, config=config), ""
    if result.status == "interrupted":  # nothing to keep
        path.unlink()
        return None, why
    return None, f"{why}; kept as {_set_aside(path, 'old')}"


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


def _set_aside(path: Path, what: str) -> str:
    """Rename the file to the first free `result.json.<what>-N`, its trace gone with it; return the new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{what}-{number}")).exists():
        number += 1
    path.rename(aside)
    if path.name == RESULT_FILE:
        path.with_name(TRACE_FILE).unlink(missing_ok=True)
    return aside.name


def _shortened(error: ResultError, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "", 1)


def _name(config: RunConfig, plan: Plan) -> str:
    names = dict.fromkeys(("stages", "micro", *plan.swept))
    return " ".join(f"{name}={value_at(config, name)}" for name in names)
