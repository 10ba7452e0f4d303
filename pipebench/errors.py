"""The errors a user can meet, drawn as a tree.

    PipebenchError
    ├── ConfigError      the command line or a config file asks for something impossible
    ├── ScheduleError    a schedule's rows are incomplete, doubled or cannot proceed
    │   └── LimitError   ... or no order keeps the memory limit
    ├── ResultError      a result folder cannot be read
    ├── CompareError     two sweeps that must not be compared, or have nothing in common
    └── PointError       a point failed while it ran
        ├── StageError   ... inside one action of one rank
        └── LossError    ... since its loss is no number

Broken invariants of our own are `assert`s, not errors of this tree.
"""


class PipebenchError(Exception):
    """Base of everything raised on purpose; its text is one line for the user."""


class ConfigError(PipebenchError):
    """A key, a value and what is allowed there."""


class ScheduleError(PipebenchError):
    """What is wrong with the rows, and where; `grid` shows the rows with the failing ones marked, when it is known."""

    def __init__(self, text: str, grid: str = "") -> None:
        super().__init__(text)
        self.grid = grid


class LimitError(ScheduleError):
    """A memory limit, and the least that would do, which `needed_bytes` holds."""

    def __init__(self, text: str, needed_bytes: float) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


class ResultError(PipebenchError):
    """A file, and why it is not a result."""


class CompareError(PipebenchError):
    """What A has, what B has, and which flag permits it."""


class PointError(PipebenchError):
    """A point that did not deliver a measurement."""


class StageError(PointError):
    """`rank 2 failed at 2F0: <the original error>`, which is the cause of this one."""


class LossError(PointError):
    """The rank, the step and what its loss was."""


def one_line(text: str) -> str:
    """Return `text` with whatever could break a line, or a terminal, written out: users' words stand in errors."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def first_line(error: BaseException) -> str:
    """Return what stands on the first line of an error of somebody else's; where it says nothing, what its type says.

    A type's own text is the first line of its documentation.
    """
    said = next(iter(str(error).splitlines()), "")
    meaning = next(iter((type(error).__doc__ or "").strip().splitlines()), "")
    return said or ": ".join(filter(None, [type(error).__name__, meaning]))
