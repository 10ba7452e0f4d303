"""Views of a sweep outside its folder's own files: whoever wants to hear of a finished point is a `Tracker`.

A tracker is a view: result.json is written before it is told, and its failures cost no result.
Importing this package costs nothing; wandb is imported when the first point is logged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipebench.config import WandbConfig
from pipebench.record import RunResult
from pipebench.rows import Row, StageRow
from pipebench.tracking.wandb_runs import WandbRuns, commands

__all__ = ["Tracker", "commands", "make_tracker"]


class Tracker(Protocol):
    """Is told each finished point with its line of the table, and at last that no more will come."""

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None: ...

    def finish(self) -> None: ...


class NoTracker:
    """Keeps nothing: wandb.mode=disabled."""

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        pass

    def finish(self) -> None:
        pass


def make_tracker(config: WandbConfig, folder: Path, name: str, warn: Callable[[str], None]) -> Tracker:
    """Return the tracker of one sweep; `warn` gets one line for whatever goes wrong with it."""
    if config.mode == "disabled":
        return NoTracker()
    return WandbRuns(config, folder, name, warn)
