"""Where each rank is in its row, in memory that the parent can read while the rank hangs.

One fixed-size record per rank in a small file that all map. A rank overwrites a word and a clock before it waits and
before it computes, which costs less than a microsecond; nothing is sent, and nobody looks until something is wrong.
"""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.schedule.action import Action, Schedule, decode

_NAME_BYTES = 48
_NUMBERS_BYTES = 32
RECORD_BYTES = _NUMBERS_BYTES + _NAME_BYTES
"""An action's code doubled, plus 1 where it runs (0: none); since when, on the host's clock; how many of how many steps
of the phase are done; the phase's name.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank was doing when it was looked at: `action` is None between steps; `since_s` is on the host's clock.

    `done` of the phase's `total` steps are done; a phase that has none, or has just begun, has 0 of 0.
    """

    phase: str
    action: Action | None
    runs: bool
    since_s: float
    done: int = 0
    total: int = 0


class Whereabouts:
    """One rank's record, written by that rank alone: `RECORD_BYTES` of memory, shared or its own."""

    def __init__(self, record: memoryview) -> None:
        self._code = record[:8].cast("q")
        self._since_s = record[8:16].cast("d")
        self._steps = record[16:_NUMBERS_BYTES].cast("q")
        self._name = record[_NUMBERS_BYTES:]

    def waits(self, code: int) -> None:
        """Note that this action (as in `Row.codes`) is next and waits for its tensor."""
        self._code[0] = 2 * code
        self._since_s[0] = time.perf_counter()

    def runs(self, code: int) -> None:
        self._code[0] = 2 * code + 1
        self._since_s[0] = time.perf_counter()

    def between(self) -> None:
        """Note that the row is done."""
        self._code[0] = 0
        self._since_s[0] = time.perf_counter()

    def enters(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Note the phase, and how many of its steps are done."""
        self._steps[0], self._steps[1] = done, total
        self._name[:] = phase.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        self.between()


def make_file(path: Path, num_ranks: int) -> None:
    path.write_bytes((bytes(_NUMBERS_BYTES) + b" " * _NAME_BYTES) * num_ranks)


def open_record(path: Path, rank: int) -> Whereabouts:
    """Return a rank's record in a file made by `make_file`."""
    with path.open("r+b") as file:
        shared = memoryview(mmap.mmap(file.fileno(), 0))
    return Whereabouts(shared[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES])


def read_places(path: Path) -> list[Place]:
    """Return where every rank is now."""
    content = memoryview(path.read_bytes())
    records = (content[start : start + RECORD_BYTES] for start in range(0, len(content), RECORD_BYTES))
    return [_place(record) for record in records]


def _place(record: memoryview) -> Place:
    [code], [since_s] = record[:8].cast("q"), record[8:16].cast("d")
    done, total = record[16:_NUMBERS_BYTES].cast("q")
    phase = bytes(record[_NUMBERS_BYTES:]).decode(errors="replace").strip()
    return Place(phase, decode(code // 2) if code else None, bool(code % 2), since_s, done, total)


def steps_in_words(places: Sequence[Place]) -> str:
    """Return `measuring, 812 of 100000 steps done` of the rank that is least far, nothing where none counts steps."""
    counting = [place for place in places if place.total]
    if not counting:
        return ""
    last = min(counting, key=lambda place: place.done)
    return f"{last.phase}, {last.done} of {last.total} steps done"


def in_words(place: Place, schedule: Schedule | None, now_s: float) -> str:
    """Return `waits at 1F0 for 0F0 from rank 0 since 3 s`, `runs 2B3 since 41 s`, or where else it is."""
    since = f" since {now_s - place.since_s:.0f} s" if place.since_s else ""
    if place.action is None and place.total:
        return f"is between two steps{since}"
    if place.action is None:
        return f"is {place.phase or 'starting'}{since}"
    if place.runs:
        return f"runs {place.action}{since}"
    sources = "" if schedule is None else " and ".join(_sources(place.action, schedule))
    return f"waits at {place.action}{' for ' + sources if sources else ''}{since}"


def _sources(action: Action, schedule: Schedule) -> Sequence[str]:
    own = schedule.rank_of(action)
    needed = [(each, schedule.rank_of(each)) for each in schedule.dependencies(action)]
    return [f"{each} from rank {rank}" for each, rank in needed if rank != own]
