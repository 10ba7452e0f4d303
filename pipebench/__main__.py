"""`python -m pipebench`, and the command `pipebench`: answer Ctrl-C from the first moment to the last.

Before the command line is loaded there is nothing to clean up, after it has returned there is nothing to say. Workers
import this file again as their main module, so it must import nothing of the package at the top.
"""

import atexit
import os
import signal
import sys
from types import FrameType


def run() -> int:
    """Run the command line and return the exit code."""
    _answer_with(_leave)
    atexit.register(_answer_with, signal.SIG_IGN)  # at last: the interpreter's own end would let a signal kill it
    from pipebench.cli import main

    code = main()
    _answer_with(lambda number, frame: os._exit(code))
    return code


def _answer_with(handler: "signal._HANDLER") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(run())
