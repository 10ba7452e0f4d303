"""Read a sweep's folder: sweep.json says what was asked for, runs/<key>/result.json what came of it.

A folder may come from anyone, so nothing in it is trusted: a key must look like one before it becomes part of a
path, and whatever cannot be read or computed is a ResultError, one line, never a traceback.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pipebench.config import RunConfig, known_keys
from pipebench.errors import ConfigError, ResultError, ScheduleError
from pipebench.harness.sweep import AGAIN_FILE, RESULT_FILE, SWEEP_FILE, point_folder
from pipebench.record import RunResult, config_from, read_json, read_result
from pipebench.rows import MEASURED, Row, StageRow, row_of, stage_rows

_KEY = re.compile(r"[0-9a-f]{12}")
_STATUSES = (*MEASURED, "error")


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was asked for and what came of it. `points` has every point in grid order, as configured.

    `references` are the one-device runs that are not points themselves; `reference_of` leads from a point's key
    to its reference's, which may be a point. `pending` points have no result yet. `again` is the second measurement
    of the point whose key it has, None where none was made.
    """

    name: str
    swept: tuple[str, ...]
    points: dict[str, RunConfig]
    results: dict[str, RunResult]
    references: dict[str, RunResult]
    reference_of: dict[str, str]
    pending: dict[str, RunConfig]
    again: RunResult | None

    def reference(self, key: str) -> RunResult | None:
        """Return the one-device run that the point is compared with, when it has been run."""
        reference = self.reference_of.get(key, "")
        return self.results.get(reference) or self.references.get(reference)


def read_sweep(folder: Path) -> Sweep:
    """Read the folder of a sweep, finished or not."""
    path = folder / SWEEP_FILE
    state = read_json(path)
    with one_line_errors(path):
        points = {_key(point["key"]): config_from(point["config"]) for point in state["points"]}
        references = [_key(reference["key"]) for reference in state["references"]]
        swept = tuple(_swept_key(name) for name in state["swept"])
        name = str(state["name"])
        reference_of = {_key(point): _key(reference) for point, reference in state["reference_of"].items()}
        twice = state.get("noise_floor")  # null, or not there: sweeps were made before there was one
        if twice is not None and _key(twice) not in points:
            raise ValueError(f"noise_floor {twice!r}: expected one of the points")
        for config in points.values():
            _check_counts(config)
    results = _read_all(folder, points, RESULT_FILE)
    return Sweep(
        name=name,
        swept=swept,
        points=points,
        results=results,
        references=_read_all(folder, references, RESULT_FILE),
        reference_of=reference_of,
        pending={key: config for key, config in points.items() if key not in results},
        again=None if twice is None else _read_all(folder, [twice], AGAIN_FILE).get(twice),
    )


def rows_of(sweep: Sweep) -> list[Row]:
    """Return one row per point in grid order; a pending one has its axes and nothing measured."""
    return [_row(sweep, key) for key in sweep.points]


def reference_rows(sweep: Sweep) -> list[Row]:
    """Return a row for each one-device run that something is compared with, those in the grid included."""
    keys = dict.fromkeys(sweep.reference_of[key] for key in sweep.points if key in sweep.reference_of)
    known = {**sweep.references, **sweep.results}
    found = [known[key] for key in keys if key in known]
    table = []
    for result in found:
        with one_line_errors(result.key):
            table.append(row_of(result, None, sweep.swept))
    return table


def stages_of(result: RunResult) -> list[StageRow]:
    """Return the per-stage table of a point, empty when it was not measured."""
    if result.status not in MEASURED:
        return []
    with one_line_errors(result.key):
        table = stage_rows(result)
        if not all(value is None or isinstance(value, int | float) for stage in table for value in astuple(stage)):
            raise TypeError("expected numbers for every stage")
    return table


def _row(sweep: Sweep, key: str) -> Row:
    result = sweep.results.get(key) or _pending(key, sweep.points[key])
    with one_line_errors(key):
        return row_of(result, sweep.reference(key), sweep.swept)


def _pending(key: str, config: RunConfig) -> RunResult:
    return RunResult(
        key=key,
        config=config,
        status="pending",
        message="",
        oversubscribed=False,
        environment={},
        layers_per_stage=[],
        rows=[],
        profile=None,
    )


def _read_all(folder: Path, keys: Iterable[str], name: str) -> dict[str, RunResult]:
    """Return by key what there is in the points' files of this name."""
    paths = {key: point_folder(folder, key) / name for key in keys}
    return {key: _read_point(path, key) for key, path in paths.items() if path.exists()}


def _read_point(path: Path, key: str) -> RunResult:
    with one_line_errors(path):
        result = read_result(path)
        _check_counts(result.config)
        if result.key != key:
            raise ResultError(f"{path}: is the result of {result.key!r}, not of {key}")
        if result.status not in _STATUSES:
            raise ResultError(f"{path}: status {result.status!r}: expected one of {', '.join(_STATUSES)}")
        if not isinstance(result.environment, dict):
            raise ResultError(f"{path}: environment: expected names with values")
    return result


def _check_counts(config: RunConfig) -> None:
    if type(config.stages) is not int or type(config.micro) is not int or min(config.stages, config.micro) < 1:
        raise ValueError(f"stages={config.stages!r} micro={config.micro!r}: expected whole numbers of at least 1")


def _key(text: Any) -> str:
    """Return `text` if it is a key: it becomes part of a path."""
    if not isinstance(text, str) or _KEY.fullmatch(text) is None:
        raise ValueError(f"key {text!r}: expected 12 hex digits")
    return text


def _swept_key(name: Any) -> str:
    if name not in known_keys():
        raise ValueError(f"swept key {name!r}: expected a key of the configuration")
    return str(name)


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
