"""Seeds that depend on what is drawn, not on who draws it, so that K, schedule and recompute change nothing."""

from collections.abc import Iterable
from enum import IntEnum

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a seed is for; keeps equal numbers in different places from drawing equal values."""

    WEIGHTS = 1
    DATA = 2
    DROPOUT = 3
    TEACHER = 4


def seed_of(seed: int, purpose: Purpose, *parts: int) -> int:
    """Mix a run's seed with whatever else the draw depends on (SplitMix64's finalizer; Steele et al. 2014)."""
    state = seed
    for part in (purpose, *parts):
        state = _mixed(state, part)
    return state & (_MASK >> 1)


def seeds_of(seed: int, purpose: Purpose, parts: Iterable[int], lasts: Iterable[int]) -> list[int]:
    """Return `seed_of` for each last part; what they have in common is mixed once."""
    state = seed
    for part in (purpose, *parts):
        state = _mixed(state, part)
    return [_mixed(state, last) & (_MASK >> 1) for last in lasts]


def _mixed(state: int, part: int) -> int:
    state = (state * 0x9E3779B97F4A7C15 + part + 1) & _MASK
    state ^= state >> 30
    state = (state * 0xBF58476D1CE4E5B9) & _MASK
    state ^= state >> 27
    state = (state * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
