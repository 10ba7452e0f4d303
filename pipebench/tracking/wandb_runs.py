"""Weights & Biases: one run for each point of a sweep and one for the sweep, all in `<sweep>/wandb/`, one group.

A run is written in one go after the point is done, so no timed step ever waits for W&B. Offline needs neither
key nor network; online that fails falls back to offline for the rest of the sweep. Runs name no host, user,
program or environment variable. W&B draws no line over a configuration value of several runs, so the charts over
micro-batches are the history of the sweep's own run, whose step is M.
"""

import contextlib
import dataclasses
import hashlib
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from pipebench.config import WandbConfig
from pipebench.errors import first_line
from pipebench.record import RunResult
from pipebench.rows import Row, StageRow
from pipebench.tracking.curves import Series, run_name, samples_of, series_of
from pipebench.tracking.wandb_environment import inside_sweep

if TYPE_CHECKING:
    import wandb

TRAINING_STEP = "training_step"
MICRO_BATCHES = "M"

STAGE_TABLE = "per_stage"
"""Not `stages`: the summary holds K under that name, and one of the two would be lost."""

REPORT = "report"
"""Job type of the sweep's own run, and what stands for a point's key in its id."""

SETTINGS: dict[str, Any] = {
    "silent": True,  # also keeps wandb from asking for a key, even at a terminal
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "sagemaker_disable": True,  # there wandb would name runs after the job
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


MOST_S = 11.0
"""Seconds for a run. The first that takes longer is the last that is tried online, so this is what W&B may cost."""

_SERVICE = "wandb-core"
"""What the service process is called."""


@dataclass(frozen=True, slots=True)
class _About:
    """What a run is called and filed under. `key` is the point's, or REPORT."""

    key: str
    name: str
    job_type: str
    tag: str
    config: dict[str, Any]


class WandbRuns:
    """The W&B runs of one sweep. wandb's service process lives from the first point to `finish`.

    A run that is written again takes the place of the one before: ids are those of sweep and point. (What the tables of
    the one before had staged for upload stays behind, some hundred bytes each.)
    """

    def __init__(self, config: WandbConfig, folder: Path, name: str, warn: Callable[[str], None]) -> None:
        self._config = config
        self._shown_folder = folder
        self._folder = folder.resolve()  # wandb notes paths; a later sync may start elsewhere
        self._name = name
        self._warn = warn
        self._mode = config.mode
        self._url = ""

    def log_point(self, result: RunResult, row: Row, stages: list[StageRow]) -> None:
        known = dataclasses.asdict(result.config).items()
        config = {name: value for name, value in known if value != MISSING}  # a record may lack keys
        config |= {"environment": result.environment, "sweep": self._name}
        about = _About(result.key, run_name(row), "point", result.status, config)
        self._write(about, partial(_log_point, result=result, row=row, stages=stages))

    def log_sweep(self, rows: Sequence[Row], pictures: Sequence[Path]) -> None:
        about = _About(REPORT, f"{REPORT} {self._name}", REPORT, REPORT, {"sweep": self._name})
        self._write(about, partial(_log_sweep, rows=rows, pictures=pictures))

    def finish(self) -> None:
        """End wandb's service process."""
        with inside_sweep(self._folder):
            end_service()

    def where(self) -> list[str]:
        online = [self._url] if self._url else []
        return online if self._mode == "online" else [*online, *commands(self._shown_folder)]

    def _write(self, about: _About, log: Callable[["wandb.Run"], None]) -> None:
        """Write a run, at the second try if need be; raise what goes wrong then."""
        error = self._attempt(about, log)
        if error is not None:
            if self._mode == "online":
                self._mode = "offline"
                self._warn(f"W&B is not reachable, logging offline from here on: {first_line(error)}")
            error = self._attempt(about, log)
        if error is not None:
            raise error

    def _attempt(self, about: _About, log: Callable[["wandb.Run"], None]) -> Exception | None:
        """Write a run and remove what it replaces; where it fails, remove what there is of it and return the error."""
        before = set(self._run_folders(about.key))
        try:
            with inside_sweep(self._folder), no_longer_than(MOST_S, self._mode):
                run = self._start(about)
                _log_and_end(run, log)
        except Exception as error:
            self.finish()  # it may hold on to the broken run and refuse the next try: "run ID is in use"
            _remove(set(self._run_folders(about.key)) - before)
            return error
        if self._mode == "online":
            self._url = run.url or ""
        if set(self._run_folders(about.key)) > before:
            _remove(before)
        return None

    def _run_folders(self, key: str) -> Iterator[Path]:
        return (self._folder / "wandb").glob(f"*run-*-{run_id(self._folder, key)}*")  # -1, -2: in one second

    def _start(self, about: _About) -> "wandb.Run":
        import wandb

        known = wandb.Settings.model_fields  # an unknown setting is an error, and older versions know fewer
        settings = wandb.Settings(**{name: value for name, value in SETTINGS.items() if name in known})
        wandb.setup(settings)  # `silent` of a run alone leaves the messages around its start and end
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode="online" if self._mode == "online" else "offline",
            dir=self._folder,
            id=run_id(self._folder, about.key),
            name=about.name,
            group=self._folder.name,
            job_type=about.job_type,
            tags=[about.tag],
            config=about.config,
            reinit="create_new",  # the default hands out the run before this one
            settings=settings,
        )


def run_id(folder: Path, key: str) -> str:
    """Return the same id for the same point of the same sweep, so that pushing twice makes no second run."""
    return hashlib.sha256(f"{folder.name}/{key}".encode()).hexdigest()[:16]


def commands(folder: Path) -> list[str]:
    """Return the shell commands that show a sweep's offline runs here, and that send them to W&B."""
    runs = shlex.quote(str(folder / "wandb"))
    return [f"wandb leet {runs}", f"wandb sync {runs}/offline-run-*"]


def _log_and_end(run: "wandb.Run", log: Callable[["wandb.Run"], None]) -> None:
    """Write everything and end the run. (As a context manager it would print an error's traceback.)"""
    try:
        log(run)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _log_point(run: "wandb.Run", result: RunResult, row: Row, stages: list[StageRow]) -> None:
    """Log every step of every worker group over the training step, the table of stages, and the row as summary."""
    samples = samples_of(result)
    run.define_metric(TRAINING_STEP, hidden=True, summary="none")
    for name in dict.fromkeys(name for step in samples for name in step.values):
        # The summary belongs to the row: its step_s is the median, not the last sample.
        run.define_metric(name, step_metric=TRAINING_STEP, summary="none")
    for step in samples:
        run.log({TRAINING_STEP: step.training_step, **step.values})
    _log_stages(run, stages)
    run.summary.update({name: value for name, value in row.items() if value is not None})


def _log_stages(run: "wandb.Run", stages: list[StageRow]) -> None:
    if not stages:
        return
    import wandb

    columns: list[str | int] = [entry.name for entry in dataclasses.fields(StageRow)]
    data: list[Iterable[Any]] = [dataclasses.astuple(stage) for stage in stages]
    run.log({STAGE_TABLE: wandb.Table(columns=columns, data=data)})


def _log_sweep(run: "wandb.Run", rows: Sequence[Row], pictures: Sequence[Path]) -> None:
    """Log the numbers of all K at each M, all K of a chart in one picture, the result table and the figures.

    W&B gives each name before the slash a section of its own, and each series in it a panel.
    """
    import wandb

    charts: dict[str, list[Series]] = {}
    for series in series_of(rows):
        charts.setdefault(series.chart, []).append(series)
    run.define_metric(MICRO_BATCHES, hidden=True, summary="none")
    for chart in charts:
        run.define_metric(f"{chart}/*", step_metric=MICRO_BATCHES)
    for micro, values in _by_micro_batches(charts).items():
        run.log({MICRO_BATCHES: micro, **values})
    run.log({f"{REPORT}/{chart}": _together(chart, lines) for chart, lines in charts.items()})
    run.log({"results": _table(rows), **{f"figures/{path.stem}": wandb.Image(str(path)) for path in pictures}})


def _by_micro_batches(charts: dict[str, list[Series]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for chart, lines in charts.items():
        for series in lines:
            for micro, value in series.values.items():
                found.setdefault(micro, {})[f"{chart}/{series.name}"] = value
    return dict(sorted(found.items()))


def _together(chart: str, lines: Sequence[Series]) -> object:
    """Return a chart of W&B's own with all series, which separate keys of one run do not get by themselves."""
    import wandb

    return wandb.plot.line_series(
        xs=[list(series.values) for series in lines],
        ys=[list(series.values.values()) for series in lines],
        keys=[series.name for series in lines],
        title=chart,
        xname=MICRO_BATCHES,
    )


def _table(rows: Sequence[Row]) -> "wandb.Table":
    import wandb

    columns = [_of_one_type([row[name] for row in rows]) for name in rows[0]]
    lines: list[Iterable[Any]] = list(zip(*columns, strict=True))
    return wandb.Table(columns=list(rows[0]), data=lines)


def _of_one_type(column: list[Any]) -> list[Any]:
    """Return a column that W&B's tables take: a swept key such as `threads=auto,2` holds words and numbers."""
    types = {type(value) for value in column if value is not None}
    mixed = len(types) > 1 and not types <= {int, float}
    return [value if value is None or not mixed else str(value) for value in column]


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_longer_than(seconds: float, mode: str) -> Iterator[None]:
    """Kill the service when the block takes longer: whatever waits for it fails then, and TimeoutError is raised.

    wandb's own limits hold for a start and an end each; an online table asks the server besides, for half a minute.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        _kill_service()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    except Exception as error:
        if over.is_set():  # what wandb makes of a service that died says nothing of the server
            whom = _server() if mode == "online" else _SERVICE
            raise TimeoutError(f"no answer from {whom} within {seconds:.0f} s") from error
        raise
    finally:
        timer.cancel()


def _server() -> str:
    """Return the address that wandb sends to, without what a user may have put into it to log in."""
    import wandb

    address = urlsplit(wandb.setup().settings.base_url)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"


def _kill_service() -> None:
    """Kill the service process, whatever it is waiting for; wandb itself offers only to ask it to end."""
    for pid in _children():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == _SERVICE:
                os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return the processes that any thread of this one started."""
    pids: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, listing.read_text().split())
    return pids


def end_service() -> None:
    """End the service process, if there is one; the next `wandb.init` starts another."""
    if "wandb" not in sys.modules:
        return
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits when the service ended badly
        wandb.teardown()
    _kill_service()  # wandb does not wait for one it could not tell to end
