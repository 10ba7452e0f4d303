"""Weights & Biases: one run for each point of a sweep, all in `<sweep>/wandb/`, grouped by the sweep.

A run is written in one go after the point is done, so no timed step ever waits for W&B. Offline needs neither
key nor network; online that fails falls back to offline for the rest of the sweep. Runs name no host, user,
program or environment variable. Charts over several runs are not made here: W&B draws them from the group.
"""

import contextlib
import dataclasses
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipebench.config import WandbConfig, known_keys
from pipebench.metrics import bubble_fraction
from pipebench.record import Repeat, RunResult, losses, step_times, traces
from pipebench.rows import AXES, Row, StageRow

if TYPE_CHECKING:
    import wandb

X_AXIS = "training_step"

STAGE_TABLE = "per_stage"
"""Not `stages`: the summary holds K under that name, and one of the two would be lost."""

PLAIN = {"replicas": 1, "recompute": "never", "partition": "time", "engine": "pipebench"}
"""What goes without saying in a run's name."""

SETTINGS: dict[str, Any] = {
    "silent": True,  # also keeps wandb from asking for a key, even at a terminal
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "host": "",
    "init_timeout": 10.0,
    "finish_timeout": 10.0,  # without it a network that breaks off holds the sweep for ever
    "finish_timeout_raises": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,  # the usual 15 s would lose a whole point to a kill
}


class WandbRuns:
    """The W&B runs of one sweep. wandb's service process lives from the first point to `finish`."""

    def __init__(self, config: WandbConfig, folder: Path, name: str, warn: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder.resolve()  # wandb notes paths; a later sync may start elsewhere
        self._name = name
        self._warn = warn
        self._mode = config.mode
        self._told = False

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        """Write the point's run, at the second try if need be. What goes wrong is told once, never raised."""
        error = self._attempt(result, row, stages)
        if error is not None:
            if self._mode == "online":
                self._mode = "offline"
                self._warn(f"W&B is not reachable, logging offline from here on: {_one_line(error)}")
            error = self._attempt(result, row, stages)
        if error is not None and not self._told:
            self._told = True
            self._warn(f"W&B lacks some points, result.json has them: {_one_line(error)}")

    def finish(self) -> None:
        """End wandb's service process."""
        with _own_folders(self._folder):
            _end_service()

    def _attempt(self, result: RunResult, row: Row, stages: list[StageRow]) -> Exception | None:
        before = set(self._run_folders(result.key))
        try:
            with _own_folders(self._folder):
                _write(self._init(result, row), result, row, stages)
        except Exception as error:
            self.finish()  # it may hold on to the broken run and refuse the next try: "run ID is in use"
            for broken in set(self._run_folders(result.key)) - before:
                shutil.rmtree(broken, ignore_errors=True)
            return error
        return None

    def _run_folders(self, key: str) -> Iterator[Path]:
        return (self._folder / "wandb").glob(f"*run-*-{run_id(self._folder, key)}")

    def _init(self, result: RunResult, row: Row) -> "wandb.Run":
        import wandb

        known = wandb.Settings.model_fields  # an unknown setting is an error, and older versions know fewer
        settings = wandb.Settings(**{name: value for name, value in SETTINGS.items() if name in known})
        wandb.setup(settings)  # `silent` of a run alone leaves the messages around its start and end
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode="online" if self._mode == "online" else "offline",
            dir=self._folder,
            id=run_id(self._folder, result.key),
            name=run_name(row),
            group=self._folder.name,
            job_type="point",
            tags=[result.status],
            config={
                **dataclasses.asdict(result.config),
                "environment": result.environment,
                "sweep": self._name,
            },
            reinit="create_new",  # the default hands out the run before this one
            settings=settings,
        )


def run_id(folder: Path, key: str) -> str:
    """Return the same id for the same point of the same sweep, so that pushing twice makes no second run."""
    return hashlib.sha256(f"{folder.name}/{key}".encode()).hexdigest()[:16]


def run_name(row: Row) -> str:
    """Return such as `K=2 M=8 gpipe transformer optimizer.lr=0.1`: what differs, what is usual left out."""
    swept = [name for name in row if name not in AXES and name in known_keys()]
    told = [f"{name}={row[name]}" for name, usual in PLAIN.items() if row[name] != usual]
    told += [f"{name}={row[name]}" for name in swept]
    return " ".join([f"K={row['stages']} M={row['micro']}", row["schedule"], row["model"], *told])


def commands(folder: Path) -> list[str]:
    """Return the shell commands that show a sweep's offline runs here, and that send them to W&B."""
    runs = shlex.quote(str(folder / "wandb"))
    return [f"wandb leet {runs}", f"wandb sync {runs}/offline-run-*"]


def _write(run: "wandb.Run", result: RunResult, row: Row, stages: list[StageRow]) -> None:
    """Write everything and end the run. (As a context manager it would print an error's traceback.)"""
    try:
        _log_history(run, result)
        _log_stages(run, stages)
        run.summary.update({name: value for name, value in row.items() if value is not None})
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _log_history(run: "wandb.Run", result: RunResult) -> None:
    """Log every step of every worker group over the training step, the first under the plain names."""
    run.define_metric(X_AXIS, hidden=True, summary="none")
    for number, repeat in enumerate(result.repeats, start=1):
        suffix = "" if number == 1 else f"_repeat_{number}"
        for name in ("loss", "step_s", "bubble_fraction"):
            # The summary belongs to the row: its step_s is the median, not the last sample.
            run.define_metric(name + suffix, step_metric=X_AXIS, summary="none")
        for training_step, samples in enumerate(_steps(result, repeat), start=1):
            run.log({X_AXIS: training_step, **{name + suffix: value for name, value in samples.items()}})


def _steps(result: RunResult, repeat: Repeat) -> list[dict[str, float]]:
    """Return what is known of each training step, the untimed ones of the warm-up first."""
    times = step_times(repeat)
    steps = [{"loss": loss} for loss in losses(repeat)] or [{} for _ in times]
    for step, step_s in zip(steps[len(steps) - len(times) :], times, strict=True):
        step["step_s"] = step_s
    bubbles = [bubble_fraction(trace) for trace in traces(result, repeat)]
    for step, bubble in zip(steps[len(steps) - len(bubbles) :], bubbles, strict=True):
        step["bubble_fraction"] = bubble
    return steps


def _log_stages(run: "wandb.Run", stages: list[StageRow]) -> None:
    if not stages:
        return
    import wandb

    columns: list[str | int] = [entry.name for entry in dataclasses.fields(StageRow)]
    data: list[Iterable[Any]] = [dataclasses.astuple(stage) for stage in stages]
    run.log({STAGE_TABLE: wandb.Table(columns=columns, data=data)})


@contextlib.contextmanager
def _own_folders(folder: Path) -> Iterator[None]:
    """Set, for a moment, what wandb takes from the environment only, unless the user has set it.

    Tables wait for their upload in the data folder, logs lie in the cache, by default both in the user's
    home: that would tear a sweep apart. Without the last, wandb may send reports of its own errors.
    """
    inside = folder / "wandb"
    ours = {
        "WANDB_DATA_DIR": str(inside),
        "WANDB_CACHE_DIR": str(inside / "cache"),
        "WANDB_ERROR_REPORTING": "false",
    }
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _end_service() -> None:
    """End the service process, if there is one; the next `wandb.init` starts another."""
    if "wandb" not in sys.modules:
        return
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits when the service ended badly
        wandb.teardown()


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
