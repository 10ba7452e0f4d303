"""`python -m pipebench.push DIR`: rebuild the W&B runs of a sweep from its files.

For a sweep that ran without W&B or offline, or whose runs are lost. Ids are those of sweep and point, so pushing again
replaces runs and makes no second ones.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from pipebench.config import RunConfig, WandbConfig
from pipebench.errors import ResultError
from pipebench.files import own
from pipebench.record import RunResult
from pipebench.report.sweep import UNREADABLE, Sweep, read_sweep
from pipebench.report.write import write_report
from pipebench.rows import Row, StageRow
from pipebench.temporary import private_temporary_folder
from pipebench.tracking import make_trackers

_UNKNOWN = ("pending", UNREADABLE)
"""Statuses of points of which nothing is known."""


def main(argv: Sequence[str] | None = None) -> int:
    """Push, and return the exit code: 1 when W&B did not take all as asked, 2 when the folder is no readable sweep."""
    arguments = _parse(argv)
    folder: Path = arguments.folder
    try:
        sweep = read_sweep(folder)
        own(folder, folder / "wandb")
        points = _points(sweep)
        with private_temporary_folder():
            return _push(sweep, points, _pictures(sweep), arguments)
    except ResultError as error:
        print(f"ResultError: {error}", file=sys.stderr)
        return 2


def _push(
    sweep: Sweep,
    points: Sequence[tuple[RunResult, Row, list[StageRow]]],
    pictures: Sequence[Path],
    arguments: argparse.Namespace,
) -> int:
    told: list[str] = []
    trackers = make_trackers(_with_wandb(sweep, arguments), arguments.folder, sweep.name, told.append)
    try:
        for result, row, stages in points:
            trackers.log_point(result, row, stages)
        trackers.log_sweep(sweep.rows, pictures)
    finally:
        trackers.finish()
    for line in told:
        print(line, file=sys.stderr)
    if not told:
        print(f"{len(points)} runs of points and 1 of the sweep are in place")
    for label, line in trackers.where():
        print(f"{label:<11}", line)
    return 1 if told else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipebench.push",
        description="Rebuild the W&B runs of a sweep from its files. What is not given is as the sweep's own setting.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a sweep, such as results/<time>-quick")
    parser.add_argument("--mode", choices=("offline", "online"), help="offline writes DIR/wandb, online needs a key")
    parser.add_argument("--project", help="W&B project")
    parser.add_argument("--entity", help="W&B user or team")
    return parser.parse_args(argv)


def _points(sweep: Sweep) -> list[tuple[RunResult, Row, list[StageRow]]]:
    """Return what a tracker is told of each point that has a result, one-device references first."""
    known = {**sweep.references, **sweep.results}
    references = [row for row in sweep.reference_rows if row["key"] in sweep.references]
    found = [(known[row["key"]], row) for row in (*references, *sweep.rows) if row["status"] not in _UNKNOWN]
    if not found:
        raise ResultError(f"{sweep.folder}: no point has a result yet: expected at least one")
    return [(result, row, sweep.stages.get(result.key, [])) for result, row in found]


def _pictures(sweep: Sweep) -> list[Path]:
    """Draw the report's pictures, so that they are those of the files."""
    return [path for path in write_report(sweep, ["png"]) if path.suffix == ".png"]


def _with_wandb(sweep: Sweep, arguments: argparse.Namespace) -> RunConfig:
    """Return the sweep's configuration with W&B alone and what the command line says; who pushes wants runs."""
    config = next(iter(sweep.points.values()))
    recorded = config.wandb
    mode = arguments.mode or ("online" if recorded.mode == "online" else "offline")
    wandb = WandbConfig(mode, arguments.project or recorded.project, arguments.entity or recorded.entity)
    return dataclasses.replace(config, trackers=["wandb"], wandb=wandb)


if __name__ == "__main__":
    sys.exit(main())
