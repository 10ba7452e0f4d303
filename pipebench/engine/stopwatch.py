"""When each action of a step began and ended, at a cost that a timed step does not notice."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import torch

from pipebench.schedule.action import Action
from pipebench.trace import Span

TellSpans = Callable[[], tuple[Span, ...]]
"""Puts a step's spans together when somebody asks, since that costs more than taking the times did."""


_Mark = tuple[float, bytes]
"""A moment on the host's clock and what schedstat said then, to be understood after the step."""

_AT_FIRST: _Mark = (float("-inf"), b"")
_SHORT_S = 50e-6
"""An action that begins sooner after another has at most that much of the delay between them counted as its own."""


def no_spans() -> tuple[Span, ...]:
    """Tell the spans of an engine that records none."""
    return ()


class Stopwatch(Protocol):
    """`start` and `stop` around each action; `step_done` once at the step's end. Spans are on the host's clock."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def step_done(self, rank: int, actions: Sequence[Action]) -> TellSpans:
        """Return what tells the spans since the last call, one for each action, and begin anew."""


class HostStopwatch:
    """perf_counter, one clock for all processes of a Linux host, and the kernel's run-queue delay.

    /proc/thread-self/schedstat tells for how long the thread was ready and had no core (1 us a read, so what was read
    at an action's end serves for the next if that begins at once). Without it the delay is 0, and costs on an
    oversubscribed machine include waiting for a core.
    """

    def __init__(self) -> None:
        self._marks: list[_Mark] = [_AT_FIRST]
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._schedstat = -1

    def start(self) -> None:
        now = perf_counter()
        stopped, schedstat = self._marks[-1]
        self._marks.append((now, self._read() if now - stopped > _SHORT_S else schedstat))

    def stop(self) -> None:
        self._marks.append((perf_counter(), self._read()))

    def step_done(self, rank: int, actions: Sequence[Action]) -> TellSpans:
        marks, self._marks = self._marks[1:], [_AT_FIRST]
        return partial(_host_spans, rank, actions, marks)

    def close(self) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _read(self) -> bytes:
        return os.pread(self._schedstat, 64, 0) if self._schedstat >= 0 else b"0 0"


class CudaStopwatch:
    """CUDA events on the current stream, placed on the host's clock by one synchronised event per step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._origin()

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def step_done(self, rank: int, actions: Sequence[Action]) -> TellSpans:
        tell = partial(_cuda_spans, rank, actions, self._events, self._origin_event, self._origin_s)
        self._events = []
        self._origin()
        return tell

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def _origin(self) -> None:
        torch.cuda.synchronize()
        self._origin_event = torch.cuda.Event(enable_timing=True)
        self._origin_event.record()
        self._origin_event.synchronize()
        self._origin_s = perf_counter()


def _host_spans(rank: int, actions: Sequence[Action], marks: Sequence[_Mark]) -> tuple[Span, ...]:
    times = [(moment, int(schedstat.split()[1])) for moment, schedstat in marks]
    return tuple(
        Span(rank, action, start, stop, (stop_delay - start_delay) / 1e9)
        for action, (start, start_delay), (stop, stop_delay) in zip(actions, times[::2], times[1::2], strict=True)
    )


def _cuda_spans(
    rank: int, actions: Sequence[Action], events: Sequence[torch.cuda.Event], origin: torch.cuda.Event, origin_s: float
) -> tuple[Span, ...]:
    torch.cuda.synchronize()
    times = [origin_s + origin.elapsed_time(event) / 1e3 for event in events]
    return tuple(
        Span(rank, action, start, stop) for action, start, stop in zip(actions, times[::2], times[1::2], strict=True)
    )
