"""Signals that ask the process to end, and moments at which they must wait."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class _Waiting:
    """Whether an interrupt has to wait, and whether one does."""

    held: bool = False
    came: bool = False


_now = _Waiting()


def interrupt() -> None:
    """Raise KeyboardInterrupt, at the end of a block that holds it back where there is one; for a signal's handler."""
    if not _now.held:
        raise KeyboardInterrupt
    _now.came = True


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Let interrupts wait until the block ends or calls what it is given.

    A process that is started meanwhile is deaf to the signals until it chooses to hear them. Blocking them would not
    do for this one: a thread of some library's may take them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    held, _now.held = _now.held, True

    def let_through() -> None:
        _now.held = held
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if _now.came and not held:
            _now.came = False
            raise KeyboardInterrupt

    try:
        yield let_through
    finally:
        let_through()
