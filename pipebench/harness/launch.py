"""Start one process per rank, wait, and gather what they deliver or why they failed.

The parent never spins: it sleeps until a worker says something, dies, or is silent for too long. Workers are fresh
for each group. On the CPU they are forked from a server that has torch loaded already (8 workers in 0.1 s instead of
7); CUDA does not survive a fork, so there they are spawned. A worker ends itself when its parent is gone.
"""

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing as mp
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipebench.engine.whereabouts import Place, Whereabouts, make_file, open_record, read_places
from pipebench.errors import ResultError
from pipebench.harness.failures import (
    RankFailure,
    death_of,
    failure_of,
    first_cause,
    num_oom_kills,
    original,
    output_path,
)
from pipebench.harness.hang import hang_of
from pipebench.harness.limits import ASLEEP_S, Deadline, Limits
from pipebench.harness.orphans import die_with_parent
from pipebench.interrupts import held_back
from pipebench.schedule.action import Schedule

PRELOADED = ["pipebench.harness.preload"]
GRACE_S = 2.0
OTHERS_S = 0.2
"""How long the other ranks are listened to after a failure: the first message heard need not be the first failure."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a group is doing now; `step_s` is the last step's time where there is one."""

    phase: str
    done: int = 0
    total: int = 0
    step_s: float | None = None


OnProgress = Callable[[Progress], None]


class Report:
    """How a worker says what it does: where it is to whoever looks, and rank 0's progress to the parent.

    Rank 0 waits until the parent has drawn it.
    """

    def __init__(self, rank: int, connection: "Connection[Any, Any]", whereabouts: Whereabouts) -> None:
        self.whereabouts = whereabouts
        self._rank = rank
        self._connection = connection

    def __call__(self, progress: Progress) -> None:
        self.whereabouts.enters(progress.phase, progress.done, progress.total)
        if self._rank == 0:
            self._connection.send(progress)
            self._connection.recv()


@dataclass(frozen=True, slots=True)
class _Group:
    """The processes of one point and what the parent knows of them."""

    processes: list[BaseProcess]
    connections: list["Connection[Any, Any]"]
    folder: Path
    schedule: Schedule | None
    oom_kills_before: int

    @property
    def places(self) -> list[Place]:
        return read_places(_whereabouts_path(self.folder))


def run_group(
    work: str,
    jobs: Sequence[Any],
    device: str,
    on_progress: OnProgress,
    limits: Limits,
    folder: Path,
    schedule: Schedule | None = None,
) -> list[Any]:
    """Run `work(job, report)` in one fresh process per job and return the results in order.

    `work` is written `module:function`, so that this process need not import what only workers need.
    `on_progress` is called in this process while the reporting worker waits, so that whatever it draws falls
    between steps. `folder` is a temporary one for whatever the ranks share; `schedule` is what they run, for the words
    of a hang. What workers print is shown when all is well. Raise GroupError with the first failure, or with what
    every rank was doing when a limit passed; by then all processes are gone. Raise ResultError where `folder` cannot
    be written, as on a full disk.
    """
    context = _context(device)
    try:
        make_file(_whereabouts_path(folder), len(jobs))
    except OSError as error:
        raise ResultError(f"{folder}: cannot be written: {error}") from error
    group = _Group([], [], folder, schedule, num_oom_kills())
    try:
        with held_back():  # one that is asked for and not yet noted would be left behind
            for rank, job in enumerate(jobs):
                here, there = context.Pipe()
                process = context.Process(target=_enter, args=(work, job, rank, there, folder), daemon=True)
                process.start()
                there.close()
                group.processes.append(process)
                group.connections.append(here)
        results = _gather(group, Deadline(limits), on_progress)
        _join(group.processes)
        _show_output(folder, len(jobs))
        return results
    finally:
        _kill(group.processes)
        for connection in group.connections:
            connection.close()


def _context(device: str) -> ForkServerContext | SpawnContext:
    """Return how processes are started, with those running that this needs; they are deaf to Ctrl-C from the start."""
    resource_tracker.ensure_running()  # which lets signals through that were held back
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with held_back():
        forkserver.ensure_running()
    _await_server()
    return context


@functools.cache
def _await_server() -> None:
    """Wait until the fork server has loaded what workers need, which takes seconds, by asking for a process.

    Ctrl-C may come meanwhile: then nobody wants this process, which takes no notice. A worker would complain.
    """
    first = mp.get_context("forkserver").Process(target=_do_nothing, daemon=True)
    first.start()
    first.join()
    first.close()


def _do_nothing() -> None:
    pass


def _whereabouts_path(folder: Path) -> Path:
    return folder / "whereabouts"


def _enter(work: str, job: Any, rank: int, connection: "Connection[Any, Any]", folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    die_with_parent()
    threading.Thread(target=_end_with_parent, args=(connection.fileno(), folder), daemon=True).start()
    message: Any
    try:
        _print_into(output_path(folder, rank))
        report = Report(rank, connection, open_record(_whereabouts_path(folder), rank))
        module, _, function = work.partition(":")
        message = (getattr(importlib.import_module(module), function)(job, report),)
    except Exception as error:
        when_s = time.perf_counter()
        place = read_places(_whereabouts_path(folder))[rank]
        message = failure_of(error, rank, place, when_s, full_folder=folder.parent if _is_full(folder) else None)
        with contextlib.suppress(MemoryError, OSError):  # no memory for its text, or no room for its file
            traceback.print_exception(original(error), chain=False)
    with contextlib.suppress(OSError):  # the parent is gone: nobody to tell
        connection.send(message)
    # Nothing is left to do; the interpreter's and torch's own leave-taking costs 0.1 s of a core per worker.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.statvfs(folder).f_bavail == 0
    return False


def _end_with_parent(connection: int, folder: Path) -> None:
    """End this process, and remove what the group shares, when the other end of the connection is closed.

    The thread sleeps in the kernel until then; a parent that is killed cannot tell its workers, which the fork
    server would keep alive.
    """
    closed = select.poll()
    closed.register(connection, 0)  # neither readable nor writable: only that the other end is gone
    closed.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _print_into(path: Path) -> None:
    """Send everything this process prints, also from C++ and on a crash, into a file of its own."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(file)
    faulthandler.enable()


def _show_output(folder: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        sys.stderr.write(output_path(folder, rank).read_text(errors="replace"))


def _gather(group: _Group, deadline: Deadline, on_progress: OnProgress) -> list[Any]:
    results: dict[int, Any] = {}
    open_ranks = {connection: rank for rank, connection in enumerate(group.connections)}
    while open_ranks:
        ready = wait(list(open_ranks), max(0.0, deadline.remaining_s()))
        if not ready and deadline.remaining_s() < -ASLEEP_S:
            deadline.start_again()
        elif not ready:
            raise hang_of(deadline.missed(), group.processes, group.places, group.schedule, group.folder)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks[connection]
            message = _hear(group, connection, rank)
            if isinstance(message, RankFailure):
                del open_ranks[connection]
                raise first_cause([message, *_failures_waiting(group, open_ranks, message)], group.folder)
            if isinstance(message, Progress):
                on_progress(message)
                deadline.hear(message.step_s)
                with contextlib.suppress(OSError):  # it died meanwhile, which is heard next
                    connection.send(None)
            else:
                [results[rank]] = message
                deadline.hear(None)
                del open_ranks[connection]
    return [results[rank] for rank in range(len(group.processes))]


def _hear(group: _Group, connection: "Connection[Any, Any]", rank: int) -> Any:
    """Return what a rank says: its progress, its result in a tuple, or its failure; a dead one's is made here."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        now_s = time.perf_counter()
        process = group.processes[rank]
        process.join(GRACE_S)
        out_of_memory = num_oom_kills() > group.oom_kills_before
        return death_of(rank, process.exitcode, out_of_memory, group.places[rank], now_s)


def _failures_waiting(
    group: _Group, open_ranks: "dict[Connection[Any, Any], int]", first: RankFailure
) -> list[RankFailure]:
    """Hear what the other ranks say within a moment; longer while only victims of another rank have spoken."""
    failures: list[RankFailure] = []
    waiting = dict(open_ranks)
    began = time.monotonic()
    while waiting:
        patience_s = GRACE_S if all(failure.by_peer for failure in (first, *failures)) else OTHERS_S
        remaining_s = began + patience_s - time.monotonic()
        ready = wait(list(waiting), remaining_s) if remaining_s > 0 else []
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            message = _hear(group, connection, waiting[connection])
            if isinstance(message, Progress):
                continue  # it waits for an answer that will not come
            del waiting[connection]
            failures += [message] if isinstance(message, RankFailure) else []
    return failures


def _join(processes: Sequence[BaseProcess]) -> None:
    """Wait a moment for processes that have delivered; how they exit does not matter any more."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()
