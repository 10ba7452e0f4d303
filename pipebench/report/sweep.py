"""Read a sweep's folder: sweep.json says what was asked for, runs/<key>/result.json what came of it.

A folder may come from anyone, so nothing in it is trusted: a key must look like one before it becomes part of a
path, and nothing is read through a link. A sweep.json that cannot be read is a
ResultError, one line, never a traceback; a point's result that cannot be read, or makes no sense, is a row with the
status `unreadable`, and the other points' rows stay.
"""

import re
from dataclasses import astuple, dataclass
from os.path import lexists
from pathlib import Path
from typing import Any

from pipebench.config import RunConfig, is_known
from pipebench.errors import ResultError
from pipebench.files import own
from pipebench.harness.sweep import AGAIN_FILE, RESULT_FILE, SWEEP_FILE, point_folder
from pipebench.record import RunResult, config_from, one_line_errors, read_json, read_result
from pipebench.rows import FAILED, MEASURED, Row, StageRow, row_of, stage_rows

_KEY = re.compile(r"[0-9a-f]{12}")
_STATUSES = (*MEASURED, *FAILED)
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was asked for and what came of it. `points` has every point in grid order, as configured.

    `references` are the one-device runs that are not points themselves; `reference_of` leads from a point's key
    to its reference's, which may be a point. `pending` points have no result yet. `again` is the second measurement
    of the point whose key it has, None where none was made. `rows` has a line for every point in grid order,
    `reference_rows` one for every one-device run that something is compared with, and `stages` by key the per-stage
    table of whatever was measured.
    """

    folder: Path
    name: str
    swept: tuple[str, ...]
    points: dict[str, RunConfig]
    results: dict[str, RunResult]
    references: dict[str, RunResult]
    reference_of: dict[str, str]
    pending: dict[str, RunConfig]
    again: RunResult | None
    rows: list[Row]
    reference_rows: list[Row]
    stages: dict[str, list[StageRow]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What sweep.json says was asked for; `twice` is the key of the point that is measured twice, or None."""

    name: str
    swept: tuple[str, ...]
    points: dict[str, RunConfig]
    references: dict[str, RunConfig]
    reference_of: dict[str, str]
    twice: str | None


def read_sweep(folder: Path) -> Sweep:
    """Read the folder of a sweep, finished or not, and compute its rows.

    Raise ResultError when sweep.json cannot be read; what is wrong with a point alone becomes its status.
    """
    asked = _read_asked(own(folder, folder / SWEEP_FILE))
    points, swept = asked.points, asked.swept
    known = _read_all(folder, {**asked.references, **points}, RESULT_FILE)
    compared_with = [key for key in dict.fromkeys(asked.reference_of.values()) if key in known]
    references = {key: _read_row(known[key], None, swept) for key in compared_with}
    known |= {key: result for key, (result, _, _) in references.items()}
    read = {}
    for key, config in points.items():
        result = known.get(key) or _without_result(key, config, "pending")
        read[key] = _read_row(result, known.get(asked.reference_of.get(key, "")), swept)
    known |= {key: result for key, (result, _, _) in read.items() if key in known}
    again = _read_all(folder, {asked.twice: points[asked.twice]} if asked.twice else {}, AGAIN_FILE)
    return Sweep(
        folder=folder,
        name=asked.name,
        swept=swept,
        points=points,
        results={key: known[key] for key in points if key in known},
        references={key: known[key] for key in asked.references if key in known},
        reference_of=asked.reference_of,
        pending={key: config for key, config in points.items() if key not in known},
        again=next((_read_row(result, None, swept)[0] for result in again.values()), None),
        rows=[row for _, row, _ in read.values()],
        reference_rows=[row for _, row, _ in references.values()],
        stages={key: stages for key, (_, _, stages) in (references | read).items() if stages},
    )


def _read_asked(path: Path) -> _Asked:
    state = read_json(path)
    with one_line_errors(path):
        asked = _Asked(
            name=str(state["name"]),
            swept=tuple(_swept_key(name) for name in state["swept"]),
            points={_key(point["key"]): config_from(point["config"]) for point in state["points"]},
            references={_key(each["key"]): config_from(each["config"]) for each in state["references"]},
            reference_of={_key(point): _key(reference) for point, reference in state["reference_of"].items()},
            twice=state.get("noise_floor"),  # not there in records that know none
        )
        if asked.twice is not None and _key(asked.twice) not in asked.points:
            raise ValueError(f"noise_floor {asked.twice!r}: expected one of the points")
        for config in (*asked.points.values(), *asked.references.values()):
            _check_counts(config)
    return asked


def _read_all(folder: Path, points: dict[str, RunConfig], name: str) -> dict[str, RunResult]:
    """Return by key what there is in the points' files of this name."""
    paths = {key: point_folder(folder, key) / name for key in points}
    return {key: _read_point(folder, path, key, points[key]) for key, path in paths.items() if lexists(path)}


def _read_point(folder: Path, path: Path, key: str, config: RunConfig) -> RunResult:
    try:
        with one_line_errors(path):
            result = read_result(own(folder, path))
            _check_counts(result.config)
            if result.key != key:
                raise ValueError(f"is the result of {result.key!r}, not of {key}")
            if result.status not in _STATUSES:
                raise ValueError(f"status {result.status!r}: expected one of {', '.join(_STATUSES)}")
            if not isinstance(result.environment, dict):
                raise TypeError("environment: expected names with values")
    except ResultError as error:
        return _without_result(key, config, UNREADABLE, str(error).removeprefix(f"{folder}/"))
    return result


def _read_row(
    result: RunResult, reference: RunResult | None, swept: tuple[str, ...]
) -> tuple[RunResult, Row, list[StageRow]]:
    """Return the result with its row and per-stage table; one from which they cannot be computed is unreadable too."""
    try:
        with one_line_errors(f"{RESULT_FILE} of {result.key}"):
            stages = stage_rows(result) if result.status in MEASURED else []
            if not all(value is None or isinstance(value, int | float) for stage in stages for value in astuple(stage)):
                raise TypeError("expected numbers for every stage")
            return result, row_of(result, reference, swept), stages
    except ResultError as error:
        unreadable = _without_result(result.key, result.config, UNREADABLE, str(error))
        return unreadable, row_of(unreadable, None, swept), []


def _without_result(key: str, config: RunConfig, status: str, message: str = "") -> RunResult:
    return RunResult(
        key=key,
        config=config,
        status=status,
        message=message,
        oversubscribed=False,
        environment={},
        layers_per_stage=[],
        rows=[],
        profile=None,
    )


def _check_counts(config: RunConfig) -> None:
    if type(config.stages) is not int or type(config.micro) is not int or min(config.stages, config.micro) < 1:
        raise ValueError(f"stages={config.stages!r} micro={config.micro!r}: expected whole numbers of at least 1")


def _key(text: Any) -> str:
    """Return `text` if it is a key: it becomes part of a path."""
    if not isinstance(text, str) or _KEY.fullmatch(text) is None:
        raise ValueError(f"key {text!r}: expected 12 hex digits")
    return text


def _swept_key(name: Any) -> str:
    if not isinstance(name, str) or not is_known(name):
        raise ValueError(f"swept key {name!r}: expected a key of the configuration")
    return str(name)
