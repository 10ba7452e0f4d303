"""Start one process per rank, wait, and gather what they deliver or why they failed.

The parent never spins: it sleeps until a worker says something or dies. Workers are fresh for each group.
On the CPU they are forked from a server that has torch loaded already (8 workers in 0.1 s instead of 7);
CUDA does not survive a fork, so there they are spawned.
"""

import contextlib
import importlib
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from pipebench.errors import PointError

PRELOADED = ["pipebench.harness.preload"]
GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a group is doing now; `step_s` is the last step's time where there is one."""

    phase: str
    done: int = 0
    total: int = 0
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank failed, and when on the host's clock: the earliest of a group is the cause."""

    when_s: float
    rank: int
    text: str
    details: str


Report = Callable[[Progress], None]


def run_group(work: str, jobs: Sequence[Any], device: str, on_progress: Report) -> list[Any]:
    """Run `work(job, report)` in one fresh process per job and return the results in order.

    `work` is written `module:function`, so that this process need not import what only workers need.
    `on_progress` is called in this process while the reporting worker waits, so that whatever it draws falls
    between steps. Raise PointError with the first failure; by then all processes are gone.
    """
    context = _context(device)
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank, job in enumerate(jobs):
            here, there = context.Pipe()
            process = context.Process(target=_enter, args=(work, job, rank, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            connections.append(here)
        results = _gather(processes, connections, on_progress)
        _join(processes)
        return results
    finally:
        _kill(processes)
        for connection in connections:
            connection.close()


def _context(device: str) -> ForkServerContext | SpawnContext:
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _enter(work: str, job: Any, rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides

    def report(progress: Progress) -> None:
        connection.send(progress)
        connection.recv()

    with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):  # the parent is gone: nobody to tell
        try:
            module, _, function = work.partition(":")
            result = getattr(importlib.import_module(module), function)(job, report)
        except (BrokenPipeError, EOFError, ConnectionResetError):
            raise
        except Exception as error:
            connection.send(_Failure(time.perf_counter(), rank, _one_line(error), traceback.format_exc()))
        else:
            connection.send((result,))
    # Nothing is left to do; the interpreter's and torch's own leave-taking costs 0.1 s of a core per worker.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _gather(processes: Sequence[BaseProcess], connections: Sequence[Connection], on_progress: Report) -> list[Any]:
    results: dict[int, Any] = {}
    open_ranks = {connection: rank for rank, connection in enumerate(connections)}
    while open_ranks:
        for ready in wait(list(open_ranks)):
            assert isinstance(ready, Connection)
            rank = open_ranks[ready]
            try:
                message = ready.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join(GRACE_S)
                died = _Failure(
                    time.perf_counter(), rank, f"rank {rank} died, exit code {processes[rank].exitcode}", ""
                )
                raise PointError(_first([died, *_failures_waiting(open_ranks)]).text) from None
            if isinstance(message, Progress):
                on_progress(message)
                ready.send(None)
            elif isinstance(message, _Failure):
                raise PointError(_first([message, *_failures_waiting(open_ranks)]).text)
            else:
                [results[rank]] = message
                del open_ranks[ready]
    return [results[rank] for rank in range(len(processes))]


def _failures_waiting(open_ranks: dict[Connection, int]) -> list[_Failure]:
    """Hear what the other ranks say within a moment: the first message read need not be the first failure."""
    failures = []
    deadline = time.monotonic() + 0.2
    waiting = dict(open_ranks)
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), remaining):
            assert isinstance(ready, Connection)
            del waiting[ready]
            with contextlib.suppress(EOFError, ConnectionResetError):
                message = ready.recv()
                if isinstance(message, _Failure):
                    failures.append(message)
    return failures


def _first(failures: Sequence[_Failure]) -> _Failure:
    return min(failures, key=lambda failure: failure.when_s)


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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PointError) else f"{type(error).__name__}: {text}"
