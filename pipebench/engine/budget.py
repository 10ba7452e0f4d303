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
    """`last` is the layer that was put in last, None in the empty set, and `others` the set it was put into."""

    seconds: float = 0.0
    num_bytes: float = 0.0
    last: int | None = None
    others: "_Set | None" = None

    def with_layer(self, one: Candidate) -> "_Set":
        return _Set(self.seconds + one.seconds, self.num_bytes + one.num_bytes, one.layer, self)

    @property
    def layers(self) -> tuple[int, ...]:
        found, each = [], self
        while each.others is not None and each.last is not None:
            found.append(each.last)
            each = each.others
        return tuple(reversed(found))


def cheapest(candidates: Sequence[Candidate], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """Return the layers of the cheapest set that fits, None where none does.

    Of the sets that let go of as many bytes the cheapest is asked whether it `fits`, cheapest first. That is a
    knapsack's dynamic programme, with the question in the place of a capacity: what fits hangs on more than the sum.
    """
    return next((layers for layers in (found.layers for found in _frontier(candidates)) if fits(layers)), None)


def _frontier(candidates: Sequence[Candidate]) -> Iterator[_Set]:
    """Yield the sets that no other beats in both seconds and bytes, cheapest first."""
    step = sum(candidate.num_bytes for candidate in candidates) / _STEPS or 1.0
    found = [_Set()]
    for one in candidates:
        best: dict[int, _Set] = {}
        for each in sorted([*found, *[each.with_layer(one) for each in found]], key=lambda each: each.seconds):
            best.setdefault(round(each.num_bytes / step), each)
        found = list(_unbeaten(best.values()))
    yield from found


def _unbeaten(sets: Iterable[_Set]) -> Iterator[_Set]:
    most = -1.0
    for each in sets:
        if each.num_bytes > most:
            most = each.num_bytes
            yield each
