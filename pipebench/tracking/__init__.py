"""Views of a sweep outside its folder's own files: whoever wants to hear of a finished point is a `Tracker`.

A tracker is a view: result.json is written before it is told, and its failures cost no result. Importing this
package costs nothing; what a tracker needs is imported when the first point is logged.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipebench.config import RunConfig
from pipebench.errors import ConfigError, first_line
from pipebench.record import RunResult
from pipebench.rows import Row, StageRow
from pipebench.tracking.tensorboard_runs import TensorBoardRuns
from pipebench.tracking.wandb_runs import WandbRuns

__all__ = ["Tracker", "Trackers", "check_installed", "make_trackers"]

Warn = Callable[[str], None]


class Tracker(Protocol):
    """Is told each finished point with its line of the table, then the whole sweep, and at last that no more will come.

    Whatever it raises becomes one line of warning (see `Trackers`).
    """

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None: ...

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        """`rows` are the table's, failed points included; `pictures` are the PNG files of the report."""
        ...

    def finish(self) -> None: ...

    def where(self) -> list[str]:
        """Return the commands or addresses that show what was written."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A tracker that a user may name: what to call it, the package it needs, and how one is made for a sweep."""

    label: str
    package: str
    make: Callable[[RunConfig, Path, str, Warn], Tracker]


KINDS = {
    "wandb": Kind("W&B", "wandb", lambda config, folder, name, warn: WandbRuns(config.wandb, folder, name, warn)),
    "tensorboard": Kind("TensorBoard", "tensorboard", lambda config, folder, name, warn: TensorBoardRuns(folder)),
}


class Trackers:
    """Any number of trackers as one. What goes wrong with one is told once, never raised, and stops no other."""

    def __init__(self, members: dict[str, Tracker], warn: Warn) -> None:
        self._members = members
        self._warn = warn
        self._told: set[str] = set()

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        self._tell_all(lambda tracker: tracker.log_point(result, row, stages))

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        self._tell_all(lambda tracker: tracker.log_sweep(rows, pictures))

    def finish(self) -> None:
        self._tell_all(lambda tracker: tracker.finish())

    def where(self) -> list[tuple[str, str]]:
        """Return (label, command or address) pairs of all."""
        return [(label, line) for label, tracker in self._members.items() for line in tracker.where()]

    def _tell_all(self, tell: Callable[[Tracker], None]) -> None:
        for label, tracker in self._members.items():
            try:
                tell(tracker)
            except Exception as error:
                if label not in self._told:
                    self._told.add(label)
                    self._warn(f"{label} lacks some of the sweep, its files have all: {first_line(error)}")


def make_trackers(config: RunConfig, folder: Path, name: str, warn: Warn) -> Trackers:
    """Return the trackers of one sweep; `warn` gets one line for whatever goes wrong with them."""
    return Trackers({KINDS[kind].label: KINDS[kind].make(config, folder, name, warn) for kind in used(config)}, warn)


def check_installed(config: RunConfig) -> None:
    """Raise ConfigError when a tracker's package is missing."""
    for kind in used(config):
        if importlib.util.find_spec(KINDS[kind].package) is None:
            raise ConfigError(f"trackers={kind}: expected its package: pip install 'pipebench[{kind}]'")


def used(config: RunConfig) -> list[str]:
    """Return the names of the trackers asked for; wandb.mode=disabled takes W&B's away."""
    return [kind for kind in config.trackers if kind != "wandb" or config.wandb.mode != "disabled"]
