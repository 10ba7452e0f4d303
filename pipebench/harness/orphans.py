"""No process outlives its sweep: the kernel tells the fork server and the workers when their parent is gone.

A process that is stopped hears of nothing by itself, but cannot refuse SIGKILL. Only Linux tells; elsewhere, workers
notice that the parent's end of their connection is closed, and the fork server that nobody needs it any more.
"""

import atexit
import ctypes
import os
import signal
import sys

from pipebench.temporary import remove_behind_owner

_PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even if it is stopped then."""
    _when_parent_ends(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_with_parent() -> None:
    """Let this process, the fork server, end when its parent has, and remove what the parent could not.

    The kernel also sends the signal when only the parent's thread that started this process ends; and SIGTERM may be
    meant for the whole group, where the parent decides. So what counts is whether the parent is there.
    """
    parent = os.getppid()

    def end(signal_number: int, frame: object) -> None:
        if os.getppid() != parent:
            remove_behind_owner()
            os._exit(0)  # an exception may fall anywhere, also where it is only printed

    atexit.register(remove_behind_owner)
    signal.signal(signal.SIGTERM, end)
    _when_parent_ends(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _when_parent_ends(signal_number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))
