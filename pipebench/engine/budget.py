"""Which layers to run again so that what is kept fits: the cheapest set, by measured seconds and bytes.

Without torch: the process that decides never computes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

_STEPS = 2048
"""Bytes are told apart to this part of all that could be let go of, so that there are no more sets than that."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer, the seconds that running it again costs, and the bytes that are not kept then."""

    layer: int
    seconds: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class _Set:
    seconds: float
    num_bytes: float
    layers: tuple[int, ...]


def cheapest(candidates: Sequence[Candidate], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """Return the layers of the cheapest set that fits, None where none does.

    Of the sets that let go of as many bytes the cheapest is asked whether it `fits`, cheapest first. That is a
    knapsack's dynamic programme, with the question in the place of a capacity: what fits hangs on more than the sum.
    """
    return next((found.layers for found in _frontier(candidates) if fits(found.layers)), None)


def _frontier(candidates: Sequence[Candidate]) -> Iterator[_Set]:
    """Yield the sets that no other beats in both seconds and bytes, cheapest first."""
    step = sum(candidate.num_bytes for candidate in candidates) / _STEPS or 1.0
    found = [_Set(0.0, 0.0, ())]
    for one in candidates:
        more = [
            _Set(each.seconds + one.seconds, each.num_bytes + one.num_bytes, (*each.layers, one.layer))
            for each in found
        ]
        best: dict[int, _Set] = {}
        for each in sorted([*found, *more], key=lambda each: each.seconds):
            best.setdefault(round(each.num_bytes / step), each)
        found = list(_unbeaten(best.values()))
    yield from found


def _unbeaten(sets: Iterable[_Set]) -> Iterator[_Set]:
    most = -1.0
    for each in sets:
        if each.num_bytes > most:
            most = each.num_bytes
            yield each
