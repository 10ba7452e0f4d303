"""TensorBoard: event files in `<sweep>/tensorboard/`, a run for each point and, over M, one for each line of a chart.

TensorBoard lays runs over each other that share a tag, so each K, measured and bound, is a run and `bubble` is a tag.
The files are written with TensorBoard's own record writer and messages, without torch; not with its EventFileWriter,
whose file names tell the host and which writes from a thread.
"""

import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipebench.grid import axes_of
from pipebench.record import RunResult
from pipebench.rows import Row, StageRow
from pipebench.tracking.curves import Series, run_name, samples_of, series_of

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FIGURES = "figures"
SUMMARY = "summary"

SWEEP = "sweep"
"""What stands for a point's key in the name of a file that belongs to all."""

Step = tuple[int, "Summary"]
"""What belongs to one step: a training step, or a number of micro-batches."""


class TensorBoardRuns:
    """The event files of one sweep. Each is written in one go; written again, it replaces the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        """Write a run with every sample over the training step, and the row: axes as hyperparameters, then numbers."""
        steps = [(step.training_step, _scalars(step.values)) for step in samples_of(result)]
        steps += [(0, _hyperparameters(row)), (0, _scalars(_numbers(row)))]
        folder = self._run_folder(run_name(row))
        taken = folder.exists() and not _files_of(folder, result.key)
        _write(self._run_folder(f"{run_name(row)} {result.key}") if taken else folder, result.key, steps)

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        runs: dict[str, list[Series]] = {}
        for series in series_of(rows):
            runs.setdefault(series.name, []).append(series)
        for name, lines in runs.items():
            steps = [(micro, _scalars({line.chart: value})) for line in lines for micro, value in line.values.items()]
            _write(self._run_folder(name), SWEEP, steps)
        if pictures:
            _write(self._run_folder(FIGURES), SWEEP, [(0, _image(path)) for path in pictures])

    def finish(self) -> None:
        """Every file is closed already."""

    def where(self) -> list[str]:
        return [f"tensorboard --logdir {shlex.quote(str(self._folder))}"]

    def _run_folder(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")


def _numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row under `summary/`; its axes are hyperparameters, and null stays away."""
    axes = axes_of([row])
    known = {name: value for name, value in row.items() if name not in axes and isinstance(value, int | float)}
    return {f"{SUMMARY}/{name}": value for name, value in known.items()}


def _hyperparameters(row: Row) -> "Summary":
    """Return what TensorBoard's table of runs shows beside the numbers."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    shown = {name: row[name] for name in ("status", *axes_of([row])) if row[name] is not None}
    return hparams_pb(shown, trial_id=row["key"])


def _scalars(values: dict[str, float]) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def _image(path: Path) -> "Summary":
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    with Image.open(path) as picture:
        width, height = picture.size
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=path.read_bytes())
    return Summary(value=[Summary.Value(tag=path.stem, image=image)])


def _files_of(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"*.{name}"))


def _write(folder: Path, name: str, steps: Iterable[Step]) -> None:
    """Write one event file, which makes `folder` a run, in the place of what a killed or earlier sweep left of it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    now = time.time()
    events = [Event(wall_time=now, file_version="brain.Event:2")]  # what marks the format
    events += [Event(wall_time=now, step=step, summary=summary) for step, summary in steps]
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in _files_of(folder, name):
        earlier.unlink()
    with (folder / f"events.out.tfevents.{now:.0f}.pipebench.{name}").open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
