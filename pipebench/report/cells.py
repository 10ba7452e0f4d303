"""How a value looks in a table: digits, units, marks, and text that cannot break out of its cell."""

import html
import math
import re
from collections.abc import Sequence

from pipebench.rows import MEASURED, Row

NOTHING = "\N{EN DASH}"
MIB = 2**20

LEGEND = {
    "!": "disturbed: something else went on on the machine, see the column flags and the list of disturbed points",
    "*": "oversubscribed: stages x threads exceed the cores, so its wall clock says nothing about K devices",
    "~": "not steady: step times had not settled when the warm-up ended",
    "unchecked": "measured, but its gradients were not compared with plain PyTorch (gate=off)",
    "simulated": "played by the simulator with the costs of a profile: nothing ran",
    "wrong": "its gradients differ from plain PyTorch's: not a result",
    "error": "the point failed, see its message",
    "oom": "it ran out of memory",
    "nan": "its loss is no finite number",
    "timeout": "it took longer than a limit, or made no progress for as long as one",
    "crashed": "one of its processes ended without a word",
    "deadlock": "its schedule cannot proceed",
    "skipped": "not run, since it cannot fit or its engine cannot do it, see its message",
    "interrupted": "it was stopped while it ran",
    "unreadable": "its result file is damaged, or of another version of pipebench",
    "pending": "not run, or not yet",
    NOTHING: "not measured, or a combination that was not asked for",
}

MARKS = "!*~"
"""The marks of a row that has a number, in the order they stand behind it."""

_SPECIAL = {ord(character): f"&#{ord(character)};" for character in "|<>*`[]\\~$"}


def setting(value: object) -> str:
    """Return a setting as a user writes it, a dash where it has none."""
    return NOTHING if value is None else str(value)


def digits(value: float | None, num: int = 3) -> str:
    """Return `num` significant digits, in plain notation and never fewer than all whole digits."""
    if value is None:
        return NOTHING
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = int(f"{value:.{num - 1}e}".partition("e")[2])
    return f"{value:.{max(0, num - 1 - exponent)}f}"


def milliseconds(seconds: float | None) -> str:
    return digits(None if seconds is None else seconds * 1e3, 4)


def with_interval(row: Row) -> str:
    """Return the median step in ms with its 95 % interval; what was simulated is exact and has none."""
    if row["step_s"] is None or row["status"] == "simulated":
        return milliseconds(row["step_s"])
    low, high = milliseconds(row["step_ci_low_s"]), milliseconds(row["step_ci_high_s"])
    return f"{milliseconds(row['step_s'])} [{low}, {high}]"


def tenths(seconds: float) -> str:
    """Return milliseconds to a tenth: numbers that are to be added up need the same digits."""
    return f"{round(seconds * 1e3, 1) + 0.0:.1f}"  # no -0.0


def mebibytes(num_bytes: float | None) -> str:
    return digits(None if num_bytes is None else num_bytes / MIB)


def fraction(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def scientific(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def bubble(row: Row, separator: str) -> str:
    """Return measured, replayed and bound: none of them is printed without the others."""
    return separator.join(fraction(row[name]) for name in ("bubble_fraction", "bubble_replayed", "bubble_bound"))


def marks(row: Row) -> str:
    """Return the marks of a row's flags."""
    disturbed = "!" if row["flags"] else ""
    return (
        disturbed
        + ("*" if row["oversubscribed"] else "")
        + ("~" if row["status"] in MEASURED and not row["steady"] else "")
    )


def kind(row: Row) -> str:
    """Return the status of a point that is comparable and yet no ordinary measurement, to stand behind its number."""
    return f" {row['status']}" if row["status"] in ("unchecked", "simulated") else ""


def measured_or_simulated(rows: Sequence[Row]) -> str:
    """Return the word for what all these rows are."""
    simulated = [row["status"] == "simulated" for row in rows]
    return "simulated" if rows and all(simulated) else "measured or simulated" if any(simulated) else "measured"


def escape(value: object) -> str:
    """Return text that stays text in a Markdown cell and in HTML, on one line.

    Intervals and marks at the end cannot be syntax, and stay readable in the source.
    """
    text = " ".join(str(value).replace("&", "&amp;").translate(_SPECIAL).split())
    text = re.sub(r"&#91;([\d., %]+)&#93;(?!\(|:|&#91;)", r"[\1]", text)
    return re.sub(r"(?:&#42;)?(?:&#126;)?$", lambda marks: html.unescape(marks[0]), text)
